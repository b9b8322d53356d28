"""What each trained token of a step is trained with: advantage, old and reference logprob, weight, mask.

    rewards ─► advantage per rollout or turn ─► per token, less KL penalties ─┐
    logprobs of engine, trainer, reference ───────────────────────────────────┼─► Targets
    correction weights, rejection, masked rollouts ───────────────────────────┘

KL penalties inside advantages are per token, and come after the estimator:

    A_t = A_s − β (logp_old,t − logp_ref,t)                    `algorithm.kl_place=reward`
    A_t = A_t + c (mean d − d_t),  d = logp_samp − logp_old     `correction.kl_penalty`, seed 000

After, because inside a group they would be divided by the group's deviation: a group whose task rewards are equal would
then train on nothing but its KL noise, scaled up to 1. On policy the expected gradient of the first is −β times that of
KL(π ‖ π_ref) at each visited position; its effect on later positions is left out (discount 0), which is also what makes
it independent of how a rollout branches into rows.

Shape legend: _S rollouts of the step, _K their turns, _N trained tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.batch.step_batch import StepBatch
from trainer.config.schema import AlgorithmConfig, Config
from trainer.objective.advantages import ADVANTAGES, Advantages
from trainer.objective.correction import CORRECTION_MODES, CorrectionResult, Granularity, kl_penalized_advantages
from trainer.objective.kl import k3
from trainer.objective.per_rollout import rollout_max, rollout_sum
from trainer.objective.ppo_credit import Credit, CreditRule, assign
from trainer.objective.turn_credit import discounted_returns, spread_turns, turn_groups

ADVANTAGE_SETTINGS = {
    "grpo": {"normalize_std": "advantage_std", "ddof": "advantage_ddof", "eps": "advantage_eps"},
    "dr_grpo": {},
    "rloo": {},
    "reinforce_plus_plus": {"eps": "advantage_eps"},
    "reinforce_plus_plus_baseline": {"eps": "advantage_eps"},
    "remax": {},
    "grpo_passk": {"normalize_std": "advantage_std", "ddof": "advantage_ddof", "eps": "advantage_eps"},
}
"""Argument of the estimator ← field of `algorithm`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Logprobs:
    """Of all trained tokens of the step, on every rank."""

    old_N: Tensor | None
    """Under the proximal policy: the trainer's own, or in bypass mode the engine's. None: they are those that the
    update itself computes (`scored_by_the_update`)."""
    ref_N: Tensor | None = None
    """Under the frozen reference; None: there is none."""
    values_N: Tensor | None = None
    """No logprob, but from the same pass: the critic's value of the state before each token; None: no critic."""
    repacked_N: Tensor | None = None
    """The trainer's own once more, in another packing; None: the noise floor is not due."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Per trained token of the step, what it is trained with. All detached, on CPU."""

    advantages_N: Tensor
    old_logp_N: Tensor | None = None
    """None: the token's own logprob in the update's forward pass."""
    weights_N: Tensor | None = None
    """None: made from that logprob."""
    keep_N: Tensor
    """bool: False for tokens that left the loss mask (rejected, or of a masked rollout), and so the denominators."""
    ref_logp_N: Tensor | None = None
    credit: Credit | None = None
    """With a critic: what advantages and returns of each optimizer step are computed from
    (trainer/objective/ppo_credit.py)."""
    returns_N: Tensor | None = None
    """With a critic, what values are trained towards."""

    @classmethod
    def of(
        cls,
        batch: StepBatch,
        advantages_N: Tensor,
        logprobs: Logprobs,
        correction: CorrectionResult | None,
        credit: Credit | None = None,
    ) -> Targets:
        """correction: None where the update scores."""
        return cls(
            advantages_N=advantages_N.float(),
            old_logp_N=logprobs.old_N,
            weights_N=None if correction is None else correction.weights_T,
            keep_N=kept_tokens(batch, correction),
            ref_logp_N=logprobs.ref_N,
            credit=credit,
        )

    def for_rollouts(self, rollouts: Tensor, rule: CreditRule) -> Targets:
        """The targets of an optimizer step on these rollouts (indices): with a critic, advantages are its own."""
        if self.credit is None:
            return self
        chosen_N = torch.isin(self.credit.rollout_N, rollouts)
        advantages_N, returns_N = assign(self.credit, chosen_N, rule)
        return replace(self, advantages_N=advantages_N, returns_N=returns_N)


def scored_by_the_update(config: Config) -> bool:
    """Whether old logprobs need no pass of their own, because those of the update's forward pass are the same numbers.

    They are where a rollout batch gets one update, whose forward pass then runs under θ_old itself, and where nothing
    that comes before the loss is made from all of them: sequence weights, their mean, rejection (it changes the
    denominators), advantages with a KL penalty, a critic.
    """
    algorithm, correction = config.algorithm, config.correction
    return (
        algorithm.epochs == algorithm.minibatches == 1
        and correction.logp_old == "recompute"
        and CORRECTION_MODES[correction.mode].granularity is Granularity.TOKEN
        and not (correction.batch_normalize or correction.rejection or correction.kl_penalty)
        and not (algorithm.kl_coef and algorithm.kl_place == "reward")
        and not config.has_critic
    )


def kept_tokens(batch: StepBatch, correction: CorrectionResult | None) -> Tensor:
    """(N,) bool: tokens of the loss mask."""
    keep_N = torch.from_numpy(batch.is_kept_S)[batch.rollout_N]
    return keep_N if correction is None else correction.keep_T & keep_N


def rollout_advantages(batch: StepBatch, algorithm: AlgorithmConfig) -> Advantages:
    """(S,) by the configured estimator, float64."""
    greedy = {"greedy_rewards_S": torch.from_numpy(batch.greedy_rewards_S)} if algorithm.advantage == "remax" else {}
    return _estimate(torch.from_numpy(batch.rewards_S), torch.from_numpy(batch.group_S), algorithm, **greedy)


def turn_advantages(batch: StepBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, float]]:
    """(N,) float64: the discounted rewards from the token's turn on, against the same turn of the group."""
    rollout_K, turn_K = batch.turn_rollout_K, batch.turn_index_K
    returns_K = discounted_returns(torch.from_numpy(batch.turn_rewards_K), rollout_K, gamma=algorithm.turn_discount)
    group_K = torch.from_numpy(batch.group_S)[rollout_K]
    advantages_K, metrics = _estimate(returns_K, turn_groups(group_K, turn_K), algorithm)
    metrics["reward/zero_std_fraction"] = _flat_fraction(advantages_K, group_K)
    return spread_turns(advantages_K, rollout_K, turn_K, batch.rollout_N, batch.turns_N), metrics


def _flat_fraction(advantages_K: Tensor, group_K: Tensor) -> float:
    """Share of the prompts' groups in which no turn has an advantage."""
    groups, index_K = torch.unique(group_K, return_inverse=True)
    if not len(groups):
        return 0.0
    return float((rollout_max(advantages_K.abs(), index_K, len(groups)) == 0).double().mean())


def token_advantages(
    batch: StepBatch, logprobs: Logprobs, config: Config, keep_N: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """(N,) the advantage of the token's rollout, or turn, less the KL penalties that are configured; and metrics.

    keep_N: `kept_tokens`; None: all are.
    """
    if config.algorithm.turn_rewards:
        advantages_N, metrics = turn_advantages(batch, config.algorithm)
    else:
        advantages_S, metrics = rollout_advantages(batch, config.algorithm)
        advantages_N = advantages_S[batch.rollout_N]
    return penalized(advantages_N.float(), batch, logprobs, config, keep_N), metrics


def penalized(
    advantages_N: Tensor, batch: StepBatch, logprobs: Logprobs, config: Config, keep_N: Tensor | None = None
) -> Tensor:
    """(N,) advantages less the KL penalties of the head of this module. keep_N: as for `token_advantages`."""
    if logprobs.old_N is None:  # then there are none, says `scored_by_the_update`
        return advantages_N
    if logprobs.ref_N is not None and config.algorithm.kl_place == "reward":
        advantages_N = advantages_N - config.algorithm.kl_coef * (logprobs.old_N - logprobs.ref_N)
    if config.correction.kl_penalty:
        advantages_N = kl_penalized_advantages(
            advantages_N,
            batch.sampling_logprobs_N,
            logprobs.old_N,
            coef=config.correction.kl_penalty,
            keep_T=keep_N,
        )
    return advantages_N


def _estimate(rewards: Tensor, groups: Tensor, algorithm: AlgorithmConfig, **more: Tensor) -> Advantages:
    settings = {name: getattr(algorithm, field) for name, field in ADVANTAGE_SETTINGS[algorithm.advantage].items()}
    return ADVANTAGES[algorithm.advantage](rewards, groups, **settings, **more)


def reference_metrics(logprobs: Logprobs, rollout_N: Tensor, num_rollouts: int) -> dict[str, float]:
    """Distance from the reference before the update; empty without one.

    `objective/kl`: mean over rollouts of Σ_t (logp_old − logp_ref), what PPO's reward pays for. `policy/ref_kl` and
    `policy/ref_kl_k3`: means over tokens of the same difference and of its k3 estimate, which is never negative.
    """
    if logprobs.ref_N is None or logprobs.old_N is None or not len(logprobs.old_N):
        return {}
    diff_N = (logprobs.old_N - logprobs.ref_N).double()
    return {
        "objective/kl": float(rollout_sum(diff_N, rollout_N, num_rollouts).mean()),
        "policy/ref_kl": float(diff_N.mean()),
        "policy/ref_kl_k3": float(k3(-diff_N).mean()),
    }
