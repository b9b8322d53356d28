"""Back-propagate one fixed batch as the trainer does and write the gradients instead of stepping.

Started by tests/integration/test_gradients.py, by itself or by `accelerate launch`:

    gradients.py MODEL_DIR OUT.npz PRESET[,PRESET...] TOKEN_BUDGET [checkpointing] [apart] [experts] [rounded]

A preset is a file of configs/algorithm; each gets a KL term against the reference, a copy of the model.
apart: rows do not share prefixes. experts: the model is a mixture of experts, and losses about its routers are added.
rounded: ranks sum gradients in bfloat16.
"""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import yaml

from lockstep.rollout.records import EngineCall, FinishReason, Rollout, VersionSpan
from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import FromEngine, Recomputed
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.declare import POLICY_LOSSES
from lockstep.trainer.score.reference import make_reference
from lockstep.trainer.update.updater import Updater
from tests.fixtures.teachers import made_up_scores

PRESETS = Path(__file__).resolve().parents[3] / "configs" / "algorithm"


ROUTER_LOSSES = {"router_aux_coef": 0.5, "router_z_coef": 0.02}


BITING = {
    "ppo_clip": {"clip_low": 0.05, "clip_high": 0.1},
    "dppo": {"divergence_bound": 3e-4},
    "opsm": {"off_policy_kl": 0.01},
    "m2po": {"m2_budget": 0.02},
    "clip_cov": {"cov_fraction": 0.1, "cov_low": 0.01},
    "kl_cov": {"cov_fraction": 0.1},
}
"""Bounds by loss that are narrow enough to clip or mask some tokens of this batch."""


def settings_of(preset: str, **more: float) -> AlgorithmConfig:
    """Return the preset with KL and entropy terms and bounds that are narrow enough for this batch."""
    values = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())
    values |= BITING.get(values["loss"], {})
    return AlgorithmConfig(**values, kl_coef=0.1, entropy_coef=0.01, **more)


FORMAT = (1.0, 0.0, 0.5, 0.0, 1.0, 0.5, 0.0, 0.5, 1.0)
"""Rewards of a second function, for advantages of each function alone."""
REWARDS = (0.0, 1.0, 0.75, 1.0, 0.0, 0.0, 0.25, 0.0, 1.0)
"""Rewards, different within every group, because equal ones give no advantages and a gradient of zero."""


def fixed_rollouts() -> list[Rollout]:
    """Make nine rollouts in three groups: unequal lengths, several turns, two of them branched.

    Rollouts of a group share a prefix that is long enough to be computed once.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, 200, (3, 20))

    def call(prompt: tuple[int, ...], length: int) -> EngineCall:
        return EngineCall(
            prompt_ids=prompt,
            sampled_ids=tuple(rng.integers(5, 200, length).tolist()),
            sampled_logprobs=tuple((-6 + rng.normal(0, 0.3, length)).clip(max=0).tolist()),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=0, start=0, end=length),),
        )

    rollouts = []
    for rollout_id in range(9):
        first = call((*prompts[rollout_id // 3].tolist(), *rng.integers(5, 200, 6).tolist()), int(rng.integers(2, 30)))
        calls = [first]
        if rollout_id % 2:
            calls.append(call((*first.all_ids, 7, 8, 9), int(rng.integers(1, 20))))
        if rollout_id in (3, 4):  # edited history: a branch
            calls.append(call((*first.prompt_ids, 11, 12), int(rng.integers(1, 20))))
        rollouts.append(
            Rollout(
                rollout_id=rollout_id,
                group_id=rollout_id // 3,
                calls=tuple(calls),
                reward=REWARDS[rollout_id],
                outcome={"turn_states": [f"state {turn}" for turn in range(len(calls))]},
                rewards={"answer": REWARDS[rollout_id] - FORMAT[rollout_id], "format": FORMAT[rollout_id]},
            )
        )
    return rollouts


class GradientsOnly(Distributed):
    """`Distributed` that keeps the gradients of an update instead of making it."""

    gradients: dict[str, np.ndarray]

    def step(self, lr: float, grad_norm: float, *, critic_only: bool = False) -> None:
        named = {name: p for name, p in self.unwrapped.named_parameters() if p.requires_grad}
        if self.uses_deepspeed:
            from deepspeed.utils import safe_get_full_grad

            full = {name: safe_get_full_grad(parameter) for name, parameter in named.items()}
            self.module.optimizer.zero_grad()
        else:
            full = {name: parameter.grad for name, parameter in named.items()}
        self.gradients = {name: grad.detach().float().cpu().numpy().copy() for name, grad in full.items()}
        if not self.uses_deepspeed:
            self.module.zero_grad()


def sampled_with(batch: StepBatch, logprobs: np.ndarray) -> StepBatch:
    """Return the batch with other (N,) sampling logprobs."""
    rows = []
    for row, start in zip(batch.rows, batch.layout.token_start, strict=False):
        sampling = row.sampling_logprobs.copy()
        sampling[row.loss_mask] = logprobs[start : start + row.loss_mask.sum()]
        rows.append(replace(row, sampling_logprobs=sampling))
    return replace(batch, rows=tuple(rows))


def count_runs(modules: dict[str, torch.nn.Module]) -> Counter[str]:
    """Count the forward passes of each module with gradients, including recomputation in backward."""
    runs: Counter[str] = Counter()
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda *_, name=name: runs.update([name] * torch.is_grad_enabled()))
    return runs


def main(model_dir: str, out: str, algorithms: str, token_budget: str, *flags: str) -> None:
    checkpointing = "checkpointing" in flags
    reduce_dtype = "bfloat16" if "rounded" in flags else "float32"
    distributed = GradientsOnly.start(dtype="float32", max_grad_norm=0.0, reduce_dtype=reduce_dtype)
    torch.manual_seed(0)
    policy = Policy.from_pretrained(model_dir, gradient_checkpointing=checkpointing)
    runs = count_runs({"pack": policy, "layer": policy.causal_lm.get_decoder().get_submodule("layers.0")})
    module = distributed.prepare(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
    greedy_rewards = dict.fromkeys(range(3), 0.5)
    sampled = StepBatch.of(fixed_rollouts(), mask_truncated=False, greedy_rewards=greedy_rewards, with_states=True)
    # Presets without a teacher do not read its scores.
    sampled = replace(sampled, teacher=made_up_scores(sampled, top_k=6, vocab_size=200))
    result: dict[str, np.ndarray] = {}
    reference = None
    for name in algorithms.split(","):
        algorithm = settings_of(name, **(ROUTER_LOSSES if "experts" in flags else {}))
        config = Config(algorithm=algorithm, token_budget=int(token_budget))
        config.model.path = model_dir
        config.share_prefixes = "never" if "apart" in flags else "auto"
        updater = Updater(module, distributed, config)
        updater.entropy = replace(updater.entropy, entropy=0.1)  # below the target of an adaptive bonus, so it acts
        reference = reference or make_reference(config, distributed, module)
        assert reference is not None
        scored = updater.scorer.score(dealt(sampled, distributed))
        # Off-policy on purpose: ratios must differ from 1, or clipping and sequence levels would not be seen.
        noise = torch.from_numpy(np.random.default_rng(1).normal(size=(3, len(scored)))).float()
        old = scored + 0.15 * noise[0]
        result |= {"policy/scored": scored.numpy(), "reference/scored": reference.score(sampled).numpy()}
        # The engine of the fixed rollouts is another model: too far away for losses that are measured against it.
        declared = POLICY_LOSSES[algorithm.loss]
        is_measured = declared.weighs_by_sampling or declared.step_values is not None
        batch = sampled_with(sampled, (old + 0.15 * noise[2]).numpy()) if is_measured else sampled
        batch = dealt(batch, distributed)  # as in a step
        logprobs = Logprobs(old=Recomputed(old), ref_N=scored + 0.2 * noise[1])
        correction = StepCorrection.of(batch, logprobs.old, CorrectionConfig(mode="token_truncate"))
        targets, _ = rollout_targets(batch, logprobs, correction, config.algorithm)
        if algorithm.teacher_divergence == "off":
            assert targets.advantages_N.abs().min() > 0, "a token without an advantage proves nothing of the loss"
        # `old` is not of the weights before this update, so losses per sequence need the ratio of a pass of their own.
        metrics = updater.update(batch, replace(targets, old=FromEngine(old))).metrics
        masked = metrics.get("policy/step_mask_frac", metrics["policy/clip_frac"] if algorithm.loss == "dppo" else 0.5)
        assert 0 < masked < 0.9, f"{name} masks a share of {masked}, so its mask is not tested"
        result |= {
            f"metrics/{metric}": np.array(value) for metric, value in metrics.items() if metric.startswith("router/")
        }
        result["shared_tokens_frac"] = np.array(metrics["perf/shared_tokens_frac"])
        result |= {f"{name}/{parameter}": grad for parameter, grad in distributed.gradients.items()}
    result["layer_runs_per_pack"] = np.array(runs["layer"] / runs["pack"])
    if distributed.is_main:
        np.savez(out, **result)
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
