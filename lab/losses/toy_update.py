"""The trainer's update (`trainer/update/updater.py`) of a tiny model on a small step, as one rank computes it.

The step has rollouts of unequal lengths with several turns, branches and common prompts, sampling, old and reference
logprobs that differ, correction weights, rejected tokens, a KL term and an entropy bonus. Every rank makes the same
model and the same step.

Dimensions: `_N` trained tokens of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lockstep.rollout.records import EngineCall, FinishReason, Rollout
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.critic_credit import critic_targets
from lockstep.trainer.credit.old_policy import FromEngine, Recomputed
from lockstep.trainer.credit.targets import Logprobs, Targets, rollout_targets
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.critic import with_critic
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.loss_normalization import NORMALIZERS
from lockstep.trainer.objective.own.lookup import advantage_named
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.update.updater import Updater

VOCABULARY = 64
TURNS = ((9,), (4, 11), (1,), (17, 3, 6), (5, 8), (13,))
"""Sampled tokens of each turn of each rollout."""
BRANCHED = (1, 3)
"""Rollouts whose last turn continues the prompt, not the turn before, so that it is in another row."""
REWARDS = ((1.0, 0.0), (0.0, 0.5), (0.5, 0.25), (0.0, 0.5), (1.0, 1.0), (0.25, 0.0))
"""Rewards of each rollout by two functions; they differ within each group of three."""
PROMPT_LENGTH = 20
"""Tokens that the rollouts of a group share: enough to be computed once (trainer/batch/prefixes.py)."""
LOG_RATIOS = (20.0, 100.0, 1000.0)
"""Log ratios of the extreme tokens [nats]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The step on several ranks and in several microbatches, which must not change the gradient."""

    name: str
    ranks: int = 1
    microbatches: int | None = None
    """Number per rank; None: one per row."""
    shares_prefixes: bool = False
    """True if the rows of a microbatch share their prefixes."""


ONE_MICROBATCH = Division(name="1 rank x 1 microbatch", microbatches=1)
DIVISIONS = (
    ONE_MICROBATCH,
    Division(name="1 rank x 2 microbatches", microbatches=2),
    Division(name="2 ranks x 1 microbatch", ranks=2, microbatches=1),
    Division(name="2 ranks x 3 microbatches", ranks=2, microbatches=3),
    Division(name="a microbatch per row (branches apart)"),
    Division(name="branches on different ranks", ranks=2),
    Division(name="shared prefixes", microbatches=1, shares_prefixes=True),
    Division(name="shared prefixes on 2 ranks", ranks=2, microbatches=2, shares_prefixes=True),
)
"""Each is compared with `ONE_MICROBATCH`."""


class KeptGradient(Distributed):
    """`Distributed` that keeps the gradient of a step in place of making it."""

    gradient: Tensor

    def step(self, lr: float, grad_norm: float, *, critic_only: bool = False) -> None:
        gradients = [parameter.grad for parameter in self.unwrapped.parameters() if parameter.grad is not None]
        self.gradient = torch.cat([gradient.flatten() for gradient in gradients]).double()
        self.discard_gradients()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankReport:
    """Results of a rank."""

    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By name of the division and normalizer; averaged over ranks, so all ranks have the same ones."""
    extreme_norm: float | None = None
    """Norm of the gradient at extreme log ratios; None: not computed."""


def divisions_of(num_ranks: int) -> list[Division]:
    """Return the divisions that the update of this number of ranks is computed with."""
    return [one for one in DIVISIONS if one.ranks == num_ranks]


def report_of(
    algorithm: Mapping[str, Any], distributed: KeptGradient, begin: Callable[[str], object], *, with_extremes: bool
) -> RankReport:
    """Compute the update of each division of this number of ranks; a collective.

    Args:
        algorithm: settings of `Config.algorithm`.
        begin: called with what comes next.
        with_extremes: also at extreme log ratios.
    """
    config = Config(algorithm=AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01, **algorithm))
    config.model.critic = "shared"
    policy = Policy(tiny_model())
    module = with_critic(policy, config.model, has_critic=config.plan.has_critic, engine_context=None)
    if config.plan.has_critic:  # a new head is 0 everywhere
        nn.init.normal_(list(module.parameters())[-1], std=0.3, generator=torch.Generator().manual_seed(1))
    batch, targets, extreme = toy_step(module, config.algorithm)
    prepared_module = distributed.prepare(module, torch.optim.SGD(module.parameters()))
    report = RankReport()
    for division in divisions_of(distributed.world_size):
        begin(division.name)
        config.share_prefixes = "auto" if division.shares_prefixes else "never"
        config.token_budget = token_budget(division, batch, prepared_module, distributed)
        report.gradients[division.name] = {}
        for normalizer in NORMALIZERS:
            config.algorithm.normalizer = normalizer
            Updater(prepared_module, distributed, config).update(batch, targets)
            report.gradients[division.name][normalizer] = distributed.gradient
    if not with_extremes:
        return report
    begin("extreme log ratios")
    metrics = Updater(prepared_module, distributed, config).update(batch, extreme).metrics
    return replace(report, extreme_norm=metrics["optim/grad_norm"])


def tiny_model() -> Qwen3ForCausalLM:
    """Make a random model with distributions that are far from uniform."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def toy_step(module: nn.Module, algorithm: AlgorithmConfig) -> tuple[StepBatch, Targets, Targets]:
    """Return the rows of a step and their targets, with usual and with extreme log ratios. module: not yet wrapped."""
    rollouts, advantage = _rollouts(), advantage_named(algorithm.advantage)
    greedy = {rollout.group_id: 0.5 for rollout in rollouts}
    batch = StepBatch.of(rollouts, mask_truncated=False, greedy_rewards=greedy, with_states=advantage.needs_states)
    logp_N, values_N = _scores(module, batch, with_values=advantage.needs_critic)
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn((3, len(logp_N)), generator=generator)
    old_N, ref_N = logp_N + 0.15 * noise[0], logp_N + 0.2 * noise[1]
    batch = _sampled_with(batch, old_N + 0.15 * noise[2])
    usual = _targets(batch, old_N, ref_N, values_N, algorithm)
    extreme_N = old_N.clone()
    extreme_N[: 3 * len(LOG_RATIOS)] = logp_N[: 3 * len(LOG_RATIOS)] - torch.tensor(LOG_RATIOS).repeat(3)
    extreme_N[-3:] = 0.0
    extreme = replace(usual, old=FromEngine(extreme_N))
    return batch, usual, extreme


def token_budget(division: Division, batch: StepBatch, module: nn.Module, distributed: Distributed) -> int:
    """Return the largest token budget that gives each rank the division's number of microbatches."""
    if division.microbatches is None:
        return 1  # a longer row gets a microbatch of its own
    total = sum(map(len, batch.rows))
    share = "auto" if division.shares_prefixes else "never"
    scorer = Scorer(module, distributed, temperature=1.0, token_budget=total, share_prefixes=share)
    return next(
        budget
        for budget in range(total, 0, -1)
        if len(scorer.share(batch, range(len(batch.rows)), token_budget=budget).packs) == division.microbatches
    )


def _rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, VOCABULARY, (length,), generator=generator).tolist())

    prompts = (ids(PROMPT_LENGTH), ids(PROMPT_LENGTH))
    rollouts = []
    for number, (lengths, rewards) in enumerate(zip(TURNS, REWARDS, strict=True)):
        calls: list[EngineCall] = []
        for turn, length in enumerate(lengths):
            is_branch = number in BRANCHED and turn == len(lengths) - 1
            before = prompts[number // 3] if is_branch or not calls else calls[-1].all_ids
            calls.append(
                EngineCall(
                    prompt_ids=(*before, *ids(3)),
                    sampled_ids=ids(length),
                    sampled_logprobs=(0.0,) * length,  # replaced by `_sampled_with`
                    finish_reason=FinishReason.STOP,
                )
            )
        rollouts.append(
            Rollout(
                rollout_id=number,
                group_id=number // 3,
                calls=tuple(calls),
                reward=math.fsum(rewards),
                rewards=dict(zip(("answer", "format"), rewards, strict=True)),
                outcome={"turn_states": [f"state {turn}" for turn in range(len(calls))]},
            )
        )
    return rollouts


def _scores(module: nn.Module, batch: StepBatch, *, with_values: bool) -> tuple[Tensor, Tensor | None]:
    """Return (N,) logprobs and values row by row, in the same bits on every rank."""
    arguments = {"with_values": True} if with_values else {}
    with torch.no_grad():
        results = [module(collate([row], [0]), with_entropy=False, **arguments) for row in batch.rows]
    logp_N = torch.cat([outputs[0] for outputs in results])
    return logp_N, torch.cat([outputs[2] for outputs in results]) if with_values else None


def _sampled_with(batch: StepBatch, logp_N: Tensor) -> StepBatch:
    """Return the batch with other sampling logprobs."""
    rows = []
    for row, start in zip(batch.rows, batch.layout.token_start, strict=False):
        sampling = row.sampling_logprobs.copy()
        sampling[row.loss_mask] = logp_N[start : start + row.num_trained].numpy()
        rows.append(replace(row, sampling_logprobs=sampling))
    return replace(batch, rows=tuple(rows))


def _targets(
    batch: StepBatch, old_N: Tensor, ref_N: Tensor, values_N: Tensor | None, algorithm: AlgorithmConfig
) -> Targets:
    logprobs = Logprobs(old=Recomputed(old_N), ref_N=ref_N, values_N=values_N)
    settings = CorrectionConfig(mode="token_truncate", rejection={"token_k3": 0.05})
    correction = StepCorrection.of(batch, logprobs.old, settings)
    if values_N is not None:
        targets = critic_targets(batch, logprobs, correction, algorithm, kl_coef=algorithm.kl_coef).targets
    else:
        targets, _ = rollout_targets(batch, logprobs, correction, algorithm)
    # In the first update of a batch θ is θ_old, but these logprobs are of another policy, as in later updates.
    return replace(targets, old=FromEngine(old_N))
