"""GiGPO against the formula in plain Python."""

from __future__ import annotations

import statistics

import pytest
import torch

from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages, TurnInputs

REWARDS, GROUPS = [1.0, 0.0, 0.25, 2.0, 2.0], [4, 4, 4, 1, 1]
ROLLOUT = [0, 0, 1, 1, 2, 2, 3, 4]  # of each turn
STATE = [0, 1, 0, 2, 0, 1, 3, 3]
RETURNS = [1.0, 2.0, 0.5, 1.0, 0.0, 0.5, 1.5, 1.0]


def estimate(**settings: float) -> Advantages:
    turns = TurnInputs(
        returns_K=torch.tensor(RETURNS).double(), rollout_K=torch.tensor(ROLLOUT), state_K=torch.tensor(STATE)
    )
    inputs = AdvantageInputs(rewards_S=torch.tensor(REWARDS).double(), group_S=torch.tensor(GROUPS), turns=turns)
    return ADVANTAGES["gigpo"](inputs, **settings)


def normalized(values: list[float], groups: list[int], *, std: bool, eps: float) -> list[float]:
    found = []
    for value, group in zip(values, groups, strict=True):
        own = [v for v, g in zip(values, groups, strict=True) if g == group]
        centered = value - statistics.mean(own) if len(set(own)) > 1 else 0.0
        found.append(centered / (statistics.stdev(own) + eps) if std and len(own) > 1 else centered)
    return found


@pytest.mark.parametrize("std", [True, False])
def test_advantages_equal_the_formula(std: bool) -> None:
    found = estimate(step_weight=0.5, advantage_std=std, advantage_eps=1e-3)
    episode, step = normalized(REWARDS, GROUPS, std=std, eps=1e-3), normalized(RETURNS, STATE, std=std, eps=1e-3)
    expected = [episode[rollout] + 0.5 * of_turn for rollout, of_turn in zip(ROLLOUT, step, strict=True)]
    assert found.advantages_S.tolist() == pytest.approx(expected)
    assert found.metrics == {"credit/anchored_turns": 7 / 8}


def test_turns_without_a_state_or_of_unequal_number_are_refused() -> None:
    one = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="turns without a state"):
        TurnInputs(returns_K=torch.zeros(1), rollout_K=one, state_K=one - 1)
    with pytest.raises(ValueError, match="must be flat and of one length"):
        TurnInputs(returns_K=torch.zeros(2), rollout_K=one, state_K=one)
