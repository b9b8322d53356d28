"""The policy loss as a component: over the trained tokens of the rollouts, with KL, entropy, value and router losses.

`Targets` holds advantages, correction weights and old logprobs of all trained tokens of the step; a microbatch selects
its own by `PackedBatch.token_index_T`. So a token's targets do not depend on its pack, and only sums of per-token
losses reach the framework.

Dimensions: _S rollouts of the step, _N trained tokens of the step, _T trained tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.objective.kl import kl_term
from lockstep.trainer.objective.loss_normalization import StepCounts, loss_coefficients, normalized_loss
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs
from lockstep.trainer.objective.own.lookup import policy_loss_named
from lockstep.trainer.objective.per_rollout import rollout_count
from lockstep.trainer.objective.value_loss import clipped_value_loss
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.score.whole_step import WholeStep
from lockstep.trainer.update.components import Outputs, RolloutStep, Share, component_metrics
from lockstep.trainer.update.router_loss import RouterLoss, RouterStep

PPO_NAMES = {"approxkl": "policy/approx_kl", "clipfrac": "policy/clip_frac", "entropy": "policy/entropy"}
"""Names of metrics in the PPO literature, reported with a critic."""


class PolicyComponent:
    """The configured policy loss."""

    def __init__(self, config: Config, scorer: Scorer, routers: RouterLoss) -> None:
        self._config = config
        self._scorer = scorer
        self._routers = routers
        loss = policy_loss_named(config.algorithm.loss)
        self.loss: Callable[[LossInputs], LossOutputs] = loss.configured(config.algorithm)
        self._whole_step = WholeStep(loss, config)

    def term(self, step: RolloutStep) -> PolicyTerm:
        """Return the term of an optimizer step; a collective."""
        counts, tokens_S = self._counts(step)
        keep_N = step.targets.keep_N
        return PolicyTerm(
            loss=self.loss,
            algorithm=self._config.algorithm,
            targets=step.targets,
            counts=counts,
            tokens_S=tokens_S,
            step_values=self._whole_step.values(
                self._scorer, step.batch, step.targets, step.rows, is_first=step.is_first, update=step.update
            ),
            entropy_coef=step.entropy_coef,
            critic_only=self._config.trains_critic_alone(step.update),
            routers=self._routers.opened(step.batch, step.rows, keep_N, counts.num_tokens),
        )

    def _counts(self, step: RolloutStep) -> tuple[StepCounts, Tensor]:
        """Return the denominators and tokens per rollout of this optimizer step, equal on all ranks."""
        kept_S = rollout_count(step.batch.rollout_N[step.targets.keep_N], step.batch.num_rollouts)
        counts = StepCounts(
            num_rollouts=len(step.rollouts),
            num_tokens=int(kept_S[torch.from_numpy(step.rollouts)].sum()),
            max_completion_length=self._config.horizon,
        )
        return counts, kept_S


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTerm:
    """The policy loss of one optimizer step."""

    loss: Callable[[LossInputs], LossOutputs]
    algorithm: AlgorithmConfig
    targets: Targets
    counts: StepCounts
    tokens_S: Tensor
    """Kept tokens of each rollout."""
    step_values: Mapping[str, Tensor]
    """(N,) values of the loss over the whole step, by name."""
    entropy_coef: float
    critic_only: bool
    """True if the value loss is the only one."""
    routers: RouterStep

    def arguments(self, packed: PackedBatch) -> Mapping[str, Any]:
        return {}

    def share(self, outputs: Outputs) -> Share:
        algorithm, targets, packed = self.algorithm, self.targets, outputs.packed
        logp_T, entropy_T, values_T = outputs.logp_T, outputs.entropy_T, outputs.values_T
        keep_T = targets.keep_N[packed.token_index_T]
        kept_index_T = packed.token_index_T[keep_T]

        def at_tokens(values_N: Tensor) -> Tensor:
            return values_N[kept_index_T].to(logp_T.device, logp_T.dtype)

        keep = keep_T.nonzero().squeeze(1).to(logp_T.device)  # indices: the size of a mask's result is on the device
        rollout_T = packed.rollout_T[keep]
        old_T = targets.old.at(kept_index_T, logp_T[keep])
        weights_T = targets.correction.weights_at(kept_index_T, old_T, packed.sampling_logprobs_T[keep])
        made = self.loss(
            LossInputs(
                logp_T=logp_T[keep],
                old_logp_T=old_T,
                advantages_T=at_tokens(targets.advantages_N),
                rollout_T=rollout_T,
                num_rollouts=len(self.tokens_S),
                weights_T=weights_T,
                sampling_logp_T=packed.sampling_logprobs_T[keep].to(logp_T.dtype),
                step_values={name: at_tokens(values_N) for name, values_N in self.step_values.items()},
            )
        )
        loss_T, sums = made.loss_T, dict(made.metrics)
        if targets.ref_logp_N is not None and algorithm.kl_place == "loss":
            kl_T = kl_term(algorithm.kl_estimator, logp_T[keep], at_tokens(targets.ref_logp_N), old_T)
            loss_T = loss_T + algorithm.kl_coef * kl_T
        if self.entropy_coef:
            loss_T = loss_T - self.entropy_coef * entropy_T[keep]
        if self.critic_only:
            loss_T = torch.zeros_like(loss_T)
        if targets.credit is not None and targets.returns_N is not None:
            value_loss = clipped_value_loss(
                values_T[keep],
                at_tokens(targets.credit.values_N),
                at_tokens(targets.returns_N),
                clip=algorithm.value_clip,
            )
            sums |= {**value_loss.metrics, "ppo/policy/loss": made.loss_T.detach().sum()}
            loss_T = loss_T + algorithm.value_coef * value_loss.loss_T
        coefficient_T = loss_coefficients(
            algorithm.normalizer, rollout_T, self.tokens_S.to(rollout_T.device), self.counts, dtype=loss_T.dtype
        )
        loss = normalized_loss(loss_T, coefficient_T)
        router = self.routers.share(outputs.routers, packed.target_index_T[keep])
        loss = loss if router.loss is None or self.critic_only else loss + router.loss
        sums |= {"policy/entropy": entropy_T[keep].detach().sum(), "policy/loss": loss.detach(), **router.sums}
        return Share(loss=loss, sums=sums)

    def metrics(self, totals: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Return the loss, means over the kept tokens, and their number."""
        num_tokens = self.counts.num_tokens
        means = {
            name: float(total) if name == "policy/loss" else float(total) / max(num_tokens, 1)
            for name, total in totals.items()
            if total.ndim == 0
        }
        if self.targets.credit is not None:
            means |= {f"ppo/policy/{name}": means[found] for name, found in PPO_NAMES.items() if found in means}
        if self.algorithm.entropy_target is not None:
            means["policy/entropy_coef"] = self.entropy_coef
        of_component = component_metrics("policy", loss=means["policy/loss"], weight=1.0, num_tokens=num_tokens)
        return {**means, **of_component, **self.routers.metrics(totals)}
