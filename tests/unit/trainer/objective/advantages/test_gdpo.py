"""GDPO against the formula in plain Python: each reward in its group, the sum over the step."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from lockstep.rollout.errors import RewardError
from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages, RewardTerms

NAN = math.nan


def estimate(terms: list[list[float]], groups: list[int], weights: list[float], **settings: float) -> Advantages:
    rewards_SF, weights_F = torch.tensor(terms).double(), torch.tensor(weights).double()
    inputs = AdvantageInputs(
        rewards_S=(rewards_SF * weights_F).nansum(dim=1),
        group_S=torch.tensor(groups),
        terms=RewardTerms(rewards_SF=rewards_SF, weights_F=weights_F),
    )
    return ADVANTAGES["gdpo"](inputs, **settings)


def naive(terms: list[list[float]], groups: list[int], weights: list[float], eps: float) -> list[float]:
    sums = [0.0] * len(groups)
    for k, weight in enumerate(weights):
        for group in set(groups):
            members = [i for i, g in enumerate(groups) if g == group and not math.isnan(terms[i][k])]
            own = [terms[i][k] for i in members]
            if len(set(own)) < 2:
                continue
            mean, std = statistics.mean(own), statistics.stdev(own)
            for i in members:
                sums[i] += weight * (terms[i][k] - mean) / (std + eps)
    return [(total - statistics.mean(sums)) / (statistics.stdev(sums) + eps) for total in sums]


TERMS = [[1, 0.1], [0, 0.4], [1, 0.2], [0, NAN], [0, 0.3], [3, 0.9], [1, 0.3]]
GROUPS = [4, 2, 4, 2, 4, 2, 2]


def test_advantages_equal_the_formula() -> None:
    found = estimate(TERMS, GROUPS, [1.0, -0.5], advantage_eps=1e-3).advantages_S
    assert found.tolist() == pytest.approx(naive(TERMS, GROUPS, [1.0, -0.5], 1e-3))


def test_rollouts_with_equal_sums_of_other_rewards_have_other_advantages() -> None:
    """Both have a sum of 2, but only one of four got the first reward."""
    found = estimate([[2, 0], [0, 2], [0, 2], [0, 0]], [0] * 4, [1, 1]).advantages_S.tolist()
    assert found[0] > found[1] == found[2] > found[3]


def test_the_scale_of_a_reward_has_no_effect_and_its_weight_has() -> None:
    scaled = [[a, 100 * b] for a, b in TERMS]
    plain = estimate(TERMS, GROUPS, [1, 1], advantage_eps=0.0).advantages_S
    torch.testing.assert_close(estimate(scaled, GROUPS, [1, 1], advantage_eps=0.0).advantages_S, plain)
    assert not torch.allclose(estimate(TERMS, GROUPS, [1, 3], advantage_eps=0.0).advantages_S, plain)


def test_a_group_is_silent_only_if_every_function_is() -> None:
    """Group 0: equal sums of different rewards. Group 1: equal rewards."""
    found = estimate([[1, 0], [0, 1], [1, 1], [1, 1]], [0, 0, 1, 1], [1, 2])
    assert found.advantages_S[0] < 0 < found.advantages_S[1]
    assert found.advantages_S[2:].tolist() == [0, 0]
    assert found.metrics == {"reward/zero_std_fraction": 0.5}


def test_rewards_by_function_are_required_and_finite() -> None:
    inputs = AdvantageInputs(rewards_S=torch.ones(2), group_S=torch.zeros(2, dtype=torch.long))
    with pytest.raises(RewardError, match="gdpo needs the rewards by function"):
        ADVANTAGES["gdpo"](inputs)
    with pytest.raises(RewardError, match="infinite"):
        RewardTerms(rewards_SF=torch.tensor([[math.inf]]), weights_F=torch.ones(1))
    with pytest.raises(ValueError, match="one weight per column"):
        RewardTerms(rewards_SF=torch.ones(2, 2), weights_F=torch.ones(1))
    terms = RewardTerms(rewards_SF=torch.ones(1, 1), weights_F=torch.ones(1))
    with pytest.raises(ValueError, match="1 rollouts for 2 rewards"):
        AdvantageInputs(rewards_S=torch.ones(2), group_S=torch.zeros(2, dtype=torch.long), terms=terms)
