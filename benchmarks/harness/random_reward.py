"""Rewards without a task. About half of the rollouts get them, so groups have non-zero advantages."""

from __future__ import annotations

from lockstep.rollout.records import Rollout


def random_reward(rollout: Rollout) -> float:
    """Return 1 if the last sampled id is odd, else 0."""
    return float(rollout.calls[-1].sampled_ids[-1] % 2)


def odd_length(rollout: Rollout) -> float:
    """Return 1 if the answer has an odd number of characters, else 0; needs no ids, which TRL does not give."""
    return float(len(rollout.answer) % 2)
