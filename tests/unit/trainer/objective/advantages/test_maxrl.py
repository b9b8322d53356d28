"""MaxRL by hand, and against the gradient of the log of a success rate."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lockstep.rollout.errors import RewardError
from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs


def advantages(rewards: list[float], groups: list[int]) -> list[float]:
    inputs = AdvantageInputs(rewards_S=torch.tensor(rewards).double(), group_S=torch.tensor(groups))
    return ADVANTAGES["maxrl"](inputs).advantages_S.tolist()


def test_the_distance_to_the_mean_is_divided_by_the_mean() -> None:
    """Group 0: mean 1/4. Group 1: mean 1/2."""
    assert advantages([1, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]) == pytest.approx([3, -1, -1, -1, 1, -1])


def test_a_group_without_success_or_failure_has_no_advantage() -> None:
    assert advantages([0, 0, 1, 1], [0, 0, 1, 1]) == [0, 0, 0, 0]


def test_the_expected_gradient_is_that_of_the_truncated_log_of_the_success_rate() -> None:
    """A policy that succeeds with probability p, in groups of 3: the expectation over all 8 outcomes of the mean of
    A ∇log π is d/dp of the series of log p in 1 − p up to order 3: 1 + (1 − p) + (1 − p)²."""
    p = 0.3
    expected = 0.0
    for outcome in itertools.product([0, 1], repeat=3):
        probability = math.prod(p if success else 1 - p for success in outcome)
        scores = [1 / p if success else -1 / (1 - p) for success in outcome]  # d log π / dp
        found = advantages([float(success) for success in outcome], [0, 0, 0])
        expected += probability * sum(a * s for a, s in zip(found, scores, strict=True)) / 3
    # The group mean holds the rollout itself: as with every such baseline, the subtracted part has an expectation of
    # its own, here that of groups with a success, in which the mean of ∇log π is 1/p · K/3 − 1/(1 − p) · (3 − K)/3.
    baseline = sum(math.comb(3, k) * p**k * (1 - p) ** (3 - k) * (k / 3 / p - (3 - k) / 3 / (1 - p)) for k in (1, 2, 3))
    assert expected + baseline == pytest.approx(1 + (1 - p) + (1 - p) ** 2)


def test_negative_rewards_are_refused() -> None:
    with pytest.raises(RewardError, match=r"found the reward -0.5; expected rewards from 0 on"):
        advantages([1.0, -0.5], [0, 0])
