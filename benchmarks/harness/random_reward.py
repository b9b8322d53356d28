"""Random reward for untrained models. About half of the rollouts get it, so groups have non-zero advantages."""

from __future__ import annotations

from lockstep.rollout.records import Rollout


def random_reward(rollout: Rollout) -> float:
    """Return 1 if the last sampled id is odd, else 0."""
    return float(rollout.calls[-1].sampled_ids[-1] % 2)
