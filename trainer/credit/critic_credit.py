"""Credit of a whole step with a critic: token rewards, GAE, the KL controller, and what is reported about them.

The one place where PPO's pure parts (`token_rewards`, `ppo`, `kl_control`, `ppo_metrics`) meet settings and a batch.

Shape legend: _S rollouts of the step, _N trained tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.batch.step_batch import StepBatch
from trainer.config.schema import AlgorithmConfig, Config
from trainer.credit.targets import Logprobs, kept_tokens
from trainer.objective.correction import CorrectionResult
from trainer.objective.kl_control import AdaptiveKl, FixedKl, KlController
from trainer.objective.ppo_credit import Credit, CreditRule, assign
from trainer.objective.ppo_metrics import objective_metrics, value_metrics
from trainer.objective.token_rewards import TurnRewards, token_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """A step's credit."""

    advantages_N: Tensor
    """Over the whole step; each optimizer step computes its own."""
    credit: Credit
    next_kl_coef: float
    metrics: dict[str, float]


class CreditAssignment:
    """PPO's way from rewards to advantages."""

    def __init__(self, config: Config) -> None:
        self._algorithm = config.algorithm
        self._controller = kl_controller(config.algorithm)

    def assign(self, batch: StepBatch, logprobs: Logprobs, correction: CorrectionResult, *, kl_coef: float) -> Assigned:
        """logprobs: with values. kl_coef: weight of the KL penalty on this step's tokens."""
        assert logprobs.values_N is not None, "the critic scores what the policy scores"
        assert logprobs.old_N is not None, "and with it"
        in_reward = logprobs.ref_N is not None and self._algorithm.kl_place == "reward"
        scores_S = torch.from_numpy(batch.rewards_S)
        rewards = token_rewards(
            TurnRewards(torch.from_numpy(batch.turn_rewards_K), batch.turn_rollout_K, batch.turn_index_K),
            logprobs.old_N,
            logprobs.ref_N if logprobs.ref_N is not None else logprobs.old_N,
            batch.rollout_N,
            batch.turns_N,
            num_rollouts=batch.num_rollouts,
            kl_coef=kl_coef if in_reward else 0.0,
        )
        credit = Credit(
            rewards_N=rewards.rewards_T,
            values_N=logprobs.values_N,
            rollout_N=batch.rollout_N,
            turns_N=batch.turns_N,
            keep_N=kept_tokens(batch, correction),
        )
        everything_N = torch.ones_like(credit.keep_N)
        advantages_N, returns_N = assign(credit, everything_N, credit_rule(self._algorithm))
        next_kl_coef = kl_coef
        if in_reward and batch.num_rollouts:
            kl = float(rewards.kl_S.double().mean())
            next_kl_coef = self._controller.next(kl_coef, kl=kl, num_episodes=batch.num_rollouts)
        metrics = objective_metrics(
            scores_S, rewards.kl_S, rewards.penalty_T, logprobs.old_N, batch.rollout_N, kl_coef=kl_coef
        )
        if logprobs.ref_N is None:  # a KL of 0 would look like a measurement
            metrics = {name: value for name, value in metrics.items() if not name.startswith("objective/kl")}
        return Assigned(
            advantages_N=advantages_N,
            credit=credit,
            next_kl_coef=next_kl_coef,
            metrics=metrics | value_metrics(credit.values_N, returns_N, credit.keep_N),
        )


def credit_rule(algorithm: AlgorithmConfig) -> CreditRule:
    return CreditRule(
        gamma=algorithm.gamma,
        lam=algorithm.gae_lambda,
        whiten_rewards=algorithm.whiten_rewards,
        whiten_advantages=algorithm.whiten_advantages,
    )


def kl_controller(algorithm: AlgorithmConfig) -> KlController:
    if algorithm.kl_target is None:
        return FixedKl()
    return AdaptiveKl(target=algorithm.kl_target, horizon=algorithm.kl_horizon)
