"""Targets of a step with a critic: rewards per token, GAE, the adapted KL coefficient, and their metrics.

Dimensions: `_S` rollouts of the step, `_N` trained tokens of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.targets import Logprobs, Targets
from lockstep.trainer.objective.advantages.critic import Credit
from lockstep.trainer.objective.kl_control import adapted_kl_coef
from lockstep.trainer.objective.ppo_metrics import objective_metrics, value_metrics
from lockstep.trainer.objective.token_rewards import TurnRewards, token_rewards


class CriticTargets(NamedTuple):
    targets: Targets
    """Advantages over the whole step; `for_rollouts` gives those of an optimizer step."""
    next_kl_coef: float
    metrics: dict[str, float]


def critic_targets(
    batch: StepBatch, logprobs: Logprobs, correction: StepCorrection, algorithm: AlgorithmConfig, *, kl_coef: float
) -> CriticTargets:
    """Return the targets of a step. logprobs: with values. kl_coef: weight of the KL penalty in this step."""
    old_N, values_N, ref_N = logprobs.old.logp_N, logprobs.values_N, logprobs.ref_N
    assert old_N is not None, "a critic needs logprobs before the update"
    assert values_N is not None
    in_reward = ref_N is not None and algorithm.kl_place == "reward"
    rewards = token_rewards(
        TurnRewards(torch.from_numpy(batch.turn_rewards_K), batch.turn_rollout_K, batch.turn_index_K),
        old_N,
        old_N if ref_N is None else ref_N,
        batch.rollout_N,
        batch.turns_N,
        num_rollouts=batch.num_rollouts,
        kl_coef=kl_coef if in_reward else 0.0,
    )
    credit = Credit(
        rewards_N=rewards.rewards_T,
        values_N=values_N,
        rollout_N=batch.rollout_N,
        turns_N=batch.turns_N,
        keep_N=correction.keep_N,
    )
    targets = Targets(
        advantages_N=torch.zeros_like(values_N),
        old=logprobs.old,
        correction=correction,
        ref_logp_N=ref_N,
        credit=credit,
    ).for_rollouts(torch.arange(batch.num_rollouts), algorithm)
    next_kl_coef = kl_coef
    if in_reward and algorithm.kl_target is not None and batch.num_rollouts:
        next_kl_coef = adapted_kl_coef(
            kl_coef,
            kl=float(rewards.kl_S.double().mean()),
            num_episodes=batch.num_rollouts,
            target=algorithm.kl_target,
            horizon=algorithm.kl_horizon,
        )
    metrics = objective_metrics(
        torch.from_numpy(batch.rewards_S), rewards.kl_S, rewards.penalty_T, old_N, batch.rollout_N, kl_coef=kl_coef
    )
    if ref_N is None:  # a KL of 0 would read as a measurement
        metrics = {name: value for name, value in metrics.items() if not name.startswith("objective/kl")}
    assert targets.returns_N is not None
    return CriticTargets(targets, next_kl_coef, metrics | value_metrics(values_N, targets.returns_N, correction.keep_N))
