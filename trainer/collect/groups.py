"""Groups between rewards and training: dynamic sampling, greedy baselines, their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.rewards.shaping import turn_rewards
from lockstep.rollout.records import Cause, Rollout, RolloutStatus
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.objective.own.lookup import advantage_named

Group = Sequence[Rollout]
"""Scored rollouts of one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Rollouts of one step; empty on ranks that do not sample."""

    rollouts: tuple[Rollout, ...] = ()
    """All sampled rollouts except greedy ones, including failed ones and those of dropped groups."""
    trained: tuple[Rollout, ...] = ()
    """Rollouts of kept groups."""
    greedy_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of greedy answers by group id; empty unless the advantage needs them."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, kept: Sequence[Group], dropped: Sequence[Group], greedy: Sequence[Rollout], algorithm: AlgorithmConfig
    ) -> Collected:
        """Combine groups that are trained and groups without spread. greedy: one answer per kept group, if needed."""
        trained_rollouts = [rollout for group in kept for rollout in group]
        others = [rollout for group in dropped for rollout in group]
        metrics: dict[str, float] = {}
        if algorithm.dynamic_sampling:
            groups = (*kept, *dropped)
            num_with_spread = sum(has_spread(group, by_turn=algorithm.turn_rewards) for group in groups)
            metrics |= {
                "rollout/refill_factor": (len(trained_rollouts) + len(others)) / max(len(trained_rollouts), 1),
                "rollout/dropped_filtered": float(sum(rollout.is_trainable for rollout in others)),
                "reward/zero_std_fraction": 1 - num_with_spread / len(groups),
            }
        baselines: dict[int, float] = {}
        if advantage_named(algorithm.advantage).needs_greedy:
            pairs = zip(kept, greedy, strict=True)
            baselines = {group[0].group_id: answer.reward for group, answer in pairs if answer.is_trainable}
            trained_rollouts = [_with_baseline(rollout, baselines) for rollout in trained_rollouts]
            metrics |= {
                "reward/greedy_mean": sum(baselines.values()) / max(len(baselines), 1),
                "rollout/greedy_tokens": float(sum(answer.num_sampled for answer in greedy)),
                "rollout/greedy_fraction": len(greedy) / (len(greedy) + len(trained_rollouts) + len(others)),
            }
        return cls(
            rollouts=tuple(sorted([*trained_rollouts, *others], key=lambda rollout: rollout.rollout_id)),
            trained=tuple(trained_rollouts),
            greedy_rewards=baselines,
            metrics=metrics,
        )


def rewards_of(group: Group) -> list[float]:
    """Return the rewards of its trainable rollouts."""
    return [rollout.reward for rollout in group if rollout.is_trainable]


def is_kept(group: Group, algorithm: AlgorithmConfig) -> bool:
    """True if the group is trained: under dynamic sampling, if its rewards differ."""
    return not algorithm.dynamic_sampling or has_spread(group, by_turn=algorithm.turn_rewards)


def has_spread(group: Group, *, by_turn: bool = False) -> bool:
    """True if two trainable rollouts differ in reward; by_turn: in the reward of some turn."""
    trainable = [rollout for rollout in group if rollout.is_trainable]
    if not by_turn:
        return len({rollout.reward for rollout in trainable}) > 1
    return len({tuple(np.trim_zeros(turn_rewards(rollout, reported=True), "b")) for rollout in trainable}) > 1


def _with_baseline(rollout: Rollout, greedy_rewards: Mapping[int, float]) -> Rollout:
    """Mark the rollout as FAILED if its baseline is missing, because its advantage is unknown, not zero."""
    if rollout.group_id in greedy_rewards or not rollout.is_trainable:
        return rollout
    error = "the greedy answer to its prompt failed: no baseline"
    return replace(rollout, status=RolloutStatus.FAILED, error=error, cause=Cause.BASELINE)
