"""One training step of GRPO by hand, from prompts to weights in the engine: the whole method on one page.

    python scripts/make_demo_model.py     # once, about a minute: the model and its questions
    python examples/one_step.py           # a minute on two CPU cores, with vLLM in this process

    prompts ─► episodes ─► rewards ─► rows ─► advantages ─► logprobs ─► correction ─► loss ─► update ─► sync ─► samples

Read `one_step` from top to bottom. Each stage is a function of the library, called without a `Config`; nothing exact is
written twice. `Trainer.step` (trainer/step.py, docs/step.md) makes the same step, with all that a run needs around it:
tests/integration/test_one_step.py compares the updated weights of the two, bit for bit.

Three policies: π_samp sampled, in the engine; π_old scored the samples, in the trainer before the update; π_θ is being
trained. The correction weight ρ = π_old / π_samp makes up for the engine, the ratio r = π_θ / π_old is what PPO clips.
Here both are 1 up to rounding, because the engine is fresh and there is one update: nothing is truncated or clipped.

Left out here, with the reason, and the place in the library:

* Several ranks: no stage depends on their number. Rank 0 samples and sends the rows to the others
  (trainer/batch/step_batch.py), and all share the packs (trainer/batch/assignment.py, trainer/distributed/).
* Several updates per rollout batch (epochs, minibatches): π_θ leaves π_old after the first (trainer/update/updater.py).
* The saving of a forward pass: the first pass of the update can give the logprobs of π_old, too
  (trainer/credit/old_policy.py).
* Critic, KL from a reference, teacher, entropy bonus, router losses: GRPO needs none of them. Each is one more
  component (trainer/update/components/), from trainer/credit/, trainer/score/reference.py, trainer/engines/teacher.py.
* Masks, for truncated rollouts and rejected tokens: here every sampled token is trained (trainer/credit/correction.py).
* Other prompts in place of groups with equal rewards, which teach nothing (trainer/collect/source.py), and sampling
  during the update (trainer/collect/async_source.py).
* Engines on other machines, or on the trainer's GPU, where they sleep during the update (trainer/engines/).
* Speed and memory: common prefixes computed once (trainer/batch/prefixes.py), smaller packs when memory runs out
  (trainer/score/token_budget.py), mixed precision (trainer/distributed/).
* Care for long runs: skipped updates (trainer/update/update_guard.py), learning rates (trainer/update/schedule.py),
  dead engines (trainer/engines/recovery.py), checkpoints (trainer/checkpoint/), metrics (trainer/observe/).

Dimensions: `_S` rollouts of the step, `_N` trained tokens of the step, `_T` trained tokens of one pack.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.rewards.composition import make_reward_set
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments.demo.calculator import CalculatorEnvironment
from lockstep.rollout.records import Rollout
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import SyncReport, WeightSync
from lockstep.trainer.batch.assignment import plan
from lockstep.trainer.batch.packing import PackedBatch, collate, whole_row
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs
from lockstep.trainer.objective.correction.mismatch import mismatch_metrics
from lockstep.trainer.objective.correction.weights import correction_weights
from lockstep.trainer.objective.loss_normalization import StepCounts, loss_coefficients, normalized_loss
from lockstep.trainer.objective.losses import POLICY_LOSSES
from lockstep.trainer.objective.losses.inputs import LossInputs
from lockstep.trainer.objective.per_rollout import rollout_count
from lockstep.trainer.run.library_logs import quiet_third_parties

# The values of `experiment=demo`, but for the size of the batch and of the packs.
NUM_PROMPTS, GROUP_SIZE = 8, 8  # a group is the rollouts of one prompt, which are compared with each other
MAX_TURNS = 3  # a tool call, its correction, and the answer
MAX_TOKENS_PER_TURN, CONTEXT = 48, 512
TEMPERATURE = 1.0
TOKEN_BUDGET = 1024  # tokens per pack (a microbatch); so few that the step has several
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # DAPO's wider upper bound: unlikely tokens may grow
MAX_WEIGHT = 2.0  # truncated importance sampling
LR, BETAS, MAX_GRAD_NORM = 3e-4, (0.9, 0.95), 1.0
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OneStep:
    """All that the step computed, for inspection."""

    rollouts: Sequence[Rollout]
    batch: StepBatch
    advantages_N: Tensor
    old_N: Tensor
    """The trainer's logprobs before the update."""
    weights_N: Tensor
    loss: float
    grad_norm: float
    policy: Policy
    """With the trained weights."""
    synced: SyncReport
    again: StepBatch
    """Rows sampled after the sync."""
    trained_gap: float
    """Mean |log π_engine − log π_trainer| over the tokens of `again`, by the trained weights [nats]."""
    initial_gap: float
    """The same by the weights before the update."""


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Read the data rows of the first prompts: `question` for the environment, `answer` for the reward."""
    return [json.loads(line) for line in path.read_text().splitlines()[:NUM_PROMPTS]]


def start_engine(model_dir: Path, loop: BackgroundLoop, log_path: Path) -> EmbeddedEngine:
    """Start vLLM. It computes in float32, as the trainer does: then the two differ by the order of their sums only."""
    return EmbeddedEngine(
        EngineSettings(model=model_dir, dtype="float32", max_model_len=CONTEXT, kv_cache_gib=0.25),
        loop=loop,  # engine and episodes share one event loop, in a thread of its own
        log_path=log_path,
    )


def one_step(engine: EmbeddedEngine, model_dir: Path, questions: Sequence[Mapping[str, Any]]) -> OneStep:
    """Make one step. engine: just started, with the model of `model_dir`. questions: of `read_questions`."""
    # 1. Prompts to episodes. An episode is a conversation: the model samples a turn, and the environment answers with
    #    the result of the tool that it called, until the model gives its answer. The engine batches the turns of all
    #    episodes. It takes and returns token ids, with the logprob of each sampled one. A sampled turn is never
    #    tokenized again, so no id changes on its way to the loss.
    chat = Chat.from_pretrained(model_dir)  # messages to ids, and back
    sampler = Sampler(engine=engine, chat=chat, make_environment=CalculatorEnvironment, max_turns=MAX_TURNS, seed=SEED)
    sampling = Sampling(
        max_tokens=MAX_TOKENS_PER_TURN,
        temperature=TEMPERATURE,  # top_p and top_k are off: they would sample from another distribution than π
        stop_token_ids=chat.stop_token_ids,
    )

    def sample(step: int) -> list[Rollout]:
        """Sample all groups. The step is part of the seeds, so each has other samples of the same prompts."""
        return engine.loop.run(sampler.collect(questions, samples_per_prompt=GROUP_SIZE, sampling=sampling, step=step))

    samples = sample(step=0)

    # 2. Rewards: one number per rollout, 1 for the right answer. A reward that fails is not a 0: its rollout is FAILED,
    #    and `StepBatch.of` leaves it out; its group goes on with the others.
    rollouts = engine.loop.run(make_reward_set(["demo_answer"]).score(samples))

    # 3. Training rows. The prompt of a turn begins with the whole conversation before it, so one row of the last prompt
    #    and turn has all turns of a rollout: three turns cost one forward pass, not three. Where an environment edits
    #    the history, the rollout has a row per branch, and still trains each sampled token once
    #    (rollout/episode/rows.py). The loss mask has the sampled tokens. What the user and the tool said is context.
    batch = StepBatch.of(rollouts, mask_truncated=False)
    trainable = [rollout for rollout in rollouts if rollout.is_trainable]
    assert trainable, f"no rollout can be trained; the first one failed: {rollouts[0].error}"
    assert batch.layout.num_tokens == sum(rollout.num_sampled for rollout in trainable), "each token is trained once"
    assert (batch.versions_N == 0).all(), "an engine counts from version 0, the weights on disk"

    # 4. Advantages: how much better a rollout did than the others of its group, (r − mean) / std. The group's mean is
    #    the baseline in place of a critic. In a group of equal rewards all advantages are 0. Every token of a rollout
    #    gets the advantage of its rollout.
    inputs = AdvantageInputs(rewards_S=torch.from_numpy(batch.rewards_S), group_S=torch.from_numpy(batch.group_S))
    advantages_S, _ = ADVANTAGES["grpo"](inputs)
    advantages_N = advantages_S[batch.rollout_N].float()

    # 5. Logprobs of the sampled tokens by the trainer, before the update: π_old. Rows are packed into flat sequences
    #    without padding; the rows of a pack cannot see each other, so it does not matter which ones share it.
    policy = Policy.from_pretrained(model_dir, engine_context=CONTEXT)  # rotary positions may depend on it
    packs = pack_rows(batch)
    old_N = score(policy, packs)

    # 6. Correction. The engine's kernels round differently, and its weights may be older. The importance weight
    #    ρ = π_old / π_samp of each token, a constant without gradient, makes up for both. Here it is within 1e-5 of 1;
    #    in bfloat16 it varies. One above MAX_WEIGHT becomes MAX_WEIGHT: a few large ones would cause most variance.
    evidence = (old_N, batch.sampling_logprobs_N, batch.rollout_N, batch.num_rollouts)
    correction = correction_weights(*evidence, mode="token_truncate", bounds=(0.0, MAX_WEIGHT))

    # 7. Loss and gradient. The loss of a token is PPO's clipped surrogate times ρ. All are divided by one number, the
    #    trained tokens of the whole step, counted before the first backward. So packs add up to the same gradient
    #    however the rows are divided; a mean per pack, or per row, would give the tokens of short ones more weight.
    counts = StepCounts(
        num_rollouts=batch.num_rollouts,
        num_tokens=batch.layout.num_tokens,
        max_completion_length=MAX_TURNS * MAX_TOKENS_PER_TURN,  # the denominator of Dr. GRPO; not used by "token"
    )
    tokens_S = rollout_count(batch.rollout_N, batch.num_rollouts)  # trained tokens of each rollout, not used by "token"
    loss = 0.0
    for pack in packs:
        logp_T, _ = policy(pack, temperature=TEMPERATURE, with_entropy=False)
        index_T = pack.token_index_T  # places of the pack's tokens among those of the step
        outputs = POLICY_LOSSES["ppo_clip"](
            LossInputs(
                logp_T=logp_T,
                old_logp_T=old_N[index_T],
                advantages_T=advantages_N[index_T],
                rollout_T=pack.rollout_T,
                num_rollouts=batch.num_rollouts,
                weights_T=correction.weights_T[index_T],
            ),
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
        )
        coefficient_T = loss_coefficients("token", pack.rollout_T, tokens_S, counts, dtype=logp_T.dtype)
        share = normalized_loss(outputs.loss_T, coefficient_T)
        share.backward()  # gradients of packs add up in `.grad`
        loss += share.item()

    # 8. Update: clip the gradient by its global norm, then one step of AdamW. A gradient that is not finite must
    #    not reach the parameters.
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM, error_if_nonfinite=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    optimizer.step()

    # 9. Weight sync. The engine pauses, receives every parameter, drops its KV cache, which belongs to the old weights,
    #    and labels what it samples from now on with the version. Then the canary: both sides score one row of tokens,
    #    and a difference beyond rounding raises `SyncError`, so that no step samples from weights that are wrong.
    def score_canary(ids: Sequence[int]) -> list[float]:
        with torch.no_grad():
            return policy(collate([whole_row(ids)], [0]), with_entropy=False)[
                0
            ].tolist()  # a pack of row 0 alone, at 1.0

    sync = WeightSync(module=policy.model, engines=[engine], score_canary=score_canary)
    sync_report = sync.push(version=1)  # updates since the weights on disk
    sync.close()  # a run keeps it open for the next push

    # 10. Sample again, as the next step would. Each token carries the version that sampled it, and its logprob by the
    #     engine is that of the trained weights, not of the initial ones.
    again = StepBatch.of(sample(step=1), mask_truncated=False)
    assert (again.versions_N == 1).all(), "every token was sampled by the new weights"
    packs = pack_rows(again)
    initial = Policy.from_pretrained(model_dir, engine_context=CONTEXT)
    trained_gap, initial_gap = (
        float((again.sampling_logprobs_N - score(scorer, packs)).abs().mean()) for scorer in (policy, initial)
    )
    return OneStep(
        rollouts=rollouts,
        batch=batch,
        advantages_N=advantages_N,
        old_N=old_N,
        weights_N=correction.weights_T,
        loss=loss,
        grad_norm=float(grad_norm),
        policy=policy,
        synced=sync_report,
        again=again,
        trained_gap=trained_gap,
        initial_gap=initial_gap,
    )


def pack_rows(batch: StepBatch) -> list[PackedBatch]:
    """Pack all rows, at most `TOKEN_BUDGET` tokens in a pack. `collate` is the one place that shifts targets: the
    logprob of a token comes from the position before it."""
    (packs,) = plan([len(row) for row in batch.rows], num_ranks=1, token_budget=TOKEN_BUDGET).microbatches
    return [collate(batch.rows, pack, batch.layout) for pack in packs]


@torch.no_grad()
def score(policy: Policy, packs: Sequence[PackedBatch]) -> Tensor:
    """Return (N,) log π of the trained tokens, in the order of the step, at the temperature that sampled them."""
    logp_N = torch.zeros(sum(len(pack.token_index_T) for pack in packs))
    for pack in packs:
        logp_N[pack.token_index_T] = policy(pack, temperature=TEMPERATURE, with_entropy=False)[0]
    return logp_N


def report(step: OneStep) -> None:
    """Print the step in numbers."""
    rollouts, batch, again = step.rollouts, step.batch, step.again
    num_turns, num_ids = sum(rollout.num_turns for rollout in rollouts), sum(map(len, batch.rows))
    mismatch = mismatch_metrics(step.old_N, batch.sampling_logprobs_N, batch.rollout_N, batch.num_rollouts)
    print(f"episodes  {len(rollouts)} with {num_turns} turns, mean reward {batch.rewards_S.mean():.3f}")
    print(f"rows      {len(batch.rows)} with {num_ids} tokens, of which {batch.layout.num_tokens} are trained")
    print(f"mismatch  kl {mismatch['rollout_correction/kl']:.1e} nats")
    print(f"weights   {step.weights_N.min():.6f} to {step.weights_N.max():.6f}")
    print(f"update    loss {step.loss:.6f}, gradient norm {step.grad_norm:.4f}")
    print(f"sync      version {step.synced.version}, the canary differs by {step.synced.canary_abs_diff:.1e} nats")
    print(
        f"samples   {again.layout.num_tokens} tokens of version {int(again.versions_N.unique())}; the engine's logprobs"
    )
    print(f"          differ by {step.trained_gap:.1e} nats from those of the trained weights,")
    print(f"          and by {step.initial_gap:.1e} nats from those of the initial ones")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/calculator"), help="directory of the model")
    parser.add_argument("--data", type=Path, default=Path("data/demo/calculator/train.jsonl"), help="its questions")
    parser.add_argument("--log", type=Path, default=Path("runs/one_step/engine.log"), help="log of the engine")
    arguments = parser.parse_args()
    if not arguments.data.exists():
        parser.error(f"{arguments.data} was not found; make it and the model with `python scripts/make_demo_model.py`")
    quiet_third_parties()
    questions = read_questions(arguments.data)
    with BackgroundLoop() as loop:
        engine = start_engine(arguments.model, loop, arguments.log)
        report(one_step(engine, arguments.model, questions))
        loop.run(engine.close())


if __name__ == "__main__":
    main()
