"""A reward for models that know nothing: half of the rollouts get it, so every group has something to learn."""

from __future__ import annotations

from rollout.records import Rollout


def coin(rollout: Rollout) -> float:
    return float(rollout.calls[-1].sampled_ids[-1] % 2)
