"""Targets of an update: advantage, old and reference logprob, weight and mask of each trained token of a step.

    rewards ─► advantage per rollout or turn ─► per token, less KL penalties ─┐
    logprobs of engine, trainer, reference ───────────────────────────────────┼─► Targets
    correction weights, rejection, masked rollouts ───────────────────────────┘

KL penalties inside advantages are per token, and come after the estimator:

    A_t = A_s − β (logp_old,t − logp_ref,t)                    `algorithm.kl_place=reward`
    A_t = c_r A_s + c (logp_teacher,t − logp_old,t)             `algorithm.teacher_coef`, `algorithm.reward_coef`
    A_t = A_t + c (mean d − d_t),  d = logp_samp − logp_old     `correction.kl_penalty` ("KL Divergence Analysis",
                                                                jphme, gist, 2026)

Before the estimator they would be divided by the group's deviation: a group of equal task rewards would train on KL
noise scaled up to 1. On policy the expected gradient of the first is −β times that of KL(π ‖ π_ref) at each visited
position; effects on later positions are left out (discount 0), so it does not depend on the rows of a rollout.

Dimensions: `_S` rollouts of the step, `_K` their turns, `_N` trained tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import OldPolicy
from lockstep.trainer.objective.advantages.critic import Credit
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages, RewardTerms, TurnInputs
from lockstep.trainer.objective.correction.weights import kl_penalized_advantages
from lockstep.trainer.objective.kl import k3
from lockstep.trainer.objective.own.lookup import advantage_named
from lockstep.trainer.objective.per_rollout import rollout_max, rollout_sum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Logprobs:
    """Logprobs of all trained tokens of the step before the update, on every rank."""

    old: OldPolicy
    ref_N: Tensor | None = None
    """Under the frozen reference; None without one."""
    values_N: Tensor | None = None
    """The critic's value of the state before each token; None without a critic."""
    repacked_N: Tensor | None = None
    """The trainer's logprobs in another packing; None where the noise floor is not due."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Targets per trained token of the step. Detached, on CPU."""

    advantages_N: Tensor
    old: OldPolicy
    correction: StepCorrection
    ref_logp_N: Tensor | None = None
    credit: Credit | None = None
    """With a critic: inputs of advantages and returns of each optimizer step."""
    returns_N: Tensor | None = None
    """With a critic: targets of the values."""

    @property
    def keep_N(self) -> Tensor:
        return self.correction.keep_N

    def for_rollouts(self, rollouts: Tensor, algorithm: AlgorithmConfig) -> Targets:
        """Return the targets of an optimizer step on these rollouts (indices); with a critic it computes its own."""
        if self.credit is None:
            return self
        chosen_N = torch.isin(self.credit.rollout_N, rollouts)
        estimate = advantage_named(algorithm.advantage).configured(algorithm)
        advantages_N, returns_N = estimate(self.credit, chosen_N)
        return replace(self, advantages_N=advantages_N, returns_N=returns_N)


def rollout_targets(
    batch: StepBatch, logprobs: Logprobs, correction: StepCorrection, algorithm: AlgorithmConfig
) -> tuple[Targets, dict[str, float]]:
    """Return the targets of an algorithm without a critic, and metrics of its advantages."""
    if advantage_named(algorithm.advantage).needs_states:
        advantages_N, metrics = state_advantages(batch, algorithm)
    elif algorithm.turn_rewards:
        advantages_N, metrics = turn_advantages(batch, algorithm)
    else:
        advantages_S, metrics = rollout_advantages(batch, algorithm)
        advantages_N = advantages_S[batch.rollout_N]
    advantages_N = penalized(advantages_N.float(), batch, logprobs, correction, algorithm)
    targets = Targets(advantages_N=advantages_N, old=logprobs.old, correction=correction, ref_logp_N=logprobs.ref_N)
    return targets, metrics


def rollout_advantages(batch: StepBatch, algorithm: AlgorithmConfig) -> Advantages:
    """Return (S,) float64 advantages by the configured estimator."""
    needs_greedy = advantage_named(algorithm.advantage).needs_greedy
    return _estimate(
        AdvantageInputs(
            rewards_S=torch.from_numpy(batch.rewards_S),
            group_S=torch.from_numpy(batch.group_S),
            greedy_rewards_S=torch.from_numpy(batch.greedy_rewards_S) if needs_greedy else None,
            terms=RewardTerms(
                rewards_SF=torch.from_numpy(batch.terms_SF), weights_F=torch.from_numpy(batch.term_weights_F)
            ),
        ),
        algorithm,
    )


def state_advantages(batch: StepBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, float]]:
    """Return (N,) float64 advantages by an estimator that compares turns of equal state."""
    from lockstep.trainer.objective.turn_credit import spread_turns  # other runs do not load it

    rollout_K, group_S = batch.turn_rollout_K, torch.from_numpy(batch.group_S)
    turns = TurnInputs(
        returns_K=_returns(batch, algorithm), rollout_K=rollout_K, state_K=torch.from_numpy(batch.states_K)
    )
    inputs = AdvantageInputs(rewards_S=torch.from_numpy(batch.rewards_S), group_S=group_S, turns=turns)
    advantages_K, metrics = _estimate(inputs, algorithm)
    metrics["reward/zero_std_fraction"] = _flat_fraction(advantages_K, group_S[rollout_K])
    return spread_turns(advantages_K, rollout_K, batch.turn_index_K, batch.rollout_N, batch.turns_N), metrics


def turn_advantages(batch: StepBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, float]]:
    """Return (N,) float64 advantages: returns of the token's turn, against the same turn of the group."""
    from lockstep.trainer.objective.turn_credit import spread_turns, turn_groups

    rollout_K, turn_K = batch.turn_rollout_K, batch.turn_index_K
    group_K = torch.from_numpy(batch.group_S)[rollout_K]
    inputs = AdvantageInputs(rewards_S=_returns(batch, algorithm), group_S=turn_groups(group_K, turn_K))
    advantages_K, metrics = _estimate(inputs, algorithm)
    metrics["reward/zero_std_fraction"] = _flat_fraction(advantages_K, group_K)
    return spread_turns(advantages_K, rollout_K, turn_K, batch.rollout_N, batch.turns_N), metrics


def _estimate(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    return advantage_named(algorithm.advantage).configured(algorithm)(inputs)


def _returns(batch: StepBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Return (K,) discounted sums of the rewards from each turn on."""
    from lockstep.trainer.objective.turn_credit import discounted_returns

    rewards_K = torch.from_numpy(batch.turn_rewards_K)
    return discounted_returns(rewards_K, batch.turn_rollout_K, gamma=algorithm.turn_discount)


def _flat_fraction(advantages_K: Tensor, group_K: Tensor) -> float:
    """Return the share of groups in which no turn has an advantage."""
    groups, index_K = torch.unique(group_K, return_inverse=True)
    if not len(groups):
        return 0.0
    return float((rollout_max(advantages_K.abs(), index_K, len(groups)) == 0).double().mean())


def penalized(
    advantages_N: Tensor, batch: StepBatch, logprobs: Logprobs, correction: StepCorrection, algorithm: AlgorithmConfig
) -> Tensor:
    """Return advantages with the KL penalties of the module docstring."""
    old_N, teacher = logprobs.old.logp_N, batch.teacher
    if teacher is not None:
        advantages_N = algorithm.reward_coef * advantages_N
    if old_N is None:  # implies that nothing of the following is configured (`StepPlan.old`)
        return advantages_N
    if teacher is not None:
        from lockstep.trainer.objective.distillation.sampled import teacher_advantages  # other runs do not load it

        advantages_N = advantages_N + teacher_advantages(old_N, teacher.logp_N, coef=algorithm.teacher_coef)
    if logprobs.ref_N is not None and algorithm.kl_place == "reward":
        advantages_N = advantages_N - algorithm.kl_coef * (old_N - logprobs.ref_N)
    if correction.settings.kl_penalty:
        advantages_N = kl_penalized_advantages(
            advantages_N,
            batch.sampling_logprobs_N,
            old_N,
            coef=correction.settings.kl_penalty,
            keep_T=correction.keep_N,
        )
    return advantages_N


def reference_metrics(old_N: Tensor, ref_N: Tensor | None, batch: StepBatch) -> dict[str, float]:
    """Return the KL from the reference before the update; empty without a reference.

    `objective/kl`: mean over rollouts of Σ_t (logp_old − logp_ref), the cost in PPO's reward. `policy/ref_kl` and
    `policy/ref_kl_k3`: means over tokens of the same difference and of its k3 estimate.
    """
    if ref_N is None or not len(old_N):
        return {}
    diff_N = (old_N - ref_N).double()
    return {
        "objective/kl": float(rollout_sum(diff_N, batch.rollout_N, batch.num_rollouts).mean()),
        "policy/ref_kl": float(diff_N.mean()),
        "policy/ref_kl_k3": float(k3(-diff_N).mean()),
    }
