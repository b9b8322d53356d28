"""Turn rewards and the length penalty: added once, visible by name, and never to a rollout without a reward."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from lockstep.rewards.composition import FaultTolerance, Reward, RewardSet, Tally
from lockstep.rewards.functions.built_in import soft_overlong
from lockstep.rewards.shaping import Shaping, length_penalty, turn_rewards
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus


def rollout(*lengths: int, **outcome: Any) -> Rollout:
    calls = tuple(
        EngineCall(prompt_ids=(1,), sampled_ids=(5,) * n, sampled_logprobs=(-1.0,) * n, finish_reason=FinishReason.STOP)
        for n in lengths or (3,)
    )
    return Rollout(rollout_id=0, group_id=0, calls=calls, outcome=outcome)


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (90, -0.5), (95, -0.75), (100, -1.0), (130, -1.0)]
)
def test_the_length_penalty_is_linear_in_the_buffer(length: int, expected: float) -> None:
    """DAPO, equation 13, with L_max = 100 and L_cache = 20."""
    assert length_penalty(length, start=80, horizon=100) == pytest.approx(expected)


def test_the_setting_and_the_built_in_reward_are_the_same_penalty() -> None:
    shaping = Shaping(horizon=100, overlong_buffer=0.25)
    for length in (1, 74, 75, 76, 87, 99, 100, 101):
        given = rollout(length)
        assert shaping.apply(given).reward == soft_overlong(given, max_tokens=100, buffer_tokens=25), length


def test_the_length_penalty_counts_the_sampled_tokens_of_all_turns() -> None:
    shaped = Shaping(horizon=8, overlong_buffer=0.5, overlong_penalty=2.0).apply(replace(rollout(4, 2), reward=1.0))
    assert (shaped.reward, shaped.rewards) == (0.0, {"overlong": -1.0})


def test_turn_rewards_are_summed_into_the_reward_beside_the_length_penalty() -> None:
    given = replace(rollout(3, 3, turn_rewards=[0.25]), reward=1.0, rewards={"exact": 1.0})
    shaped = Shaping(turn_rewards=True, horizon=6, overlong_buffer=0.5).apply(given)
    assert (shaped.reward, shaped.rewards) == (0.25, {"exact": 1.0, "turns": 0.25, "overlong": -1.0})
    assert Shaping(turn_rewards=True).apply(rollout()).rewards == {"turns": 0.0}, "an environment may report none"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1.0, 2.0], r"turn_rewards is \[1.0, 2.0\]; expected at most 1 finite numbers, one per turn"),
        ([float("nan")], "expected at most 1 finite numbers"),
        ("good", "turn_rewards is 'good'; expected a list of numbers"),
        ([None], "expected a list of numbers"),
    ],
    ids=str,
)
def test_malformed_turn_rewards_fail_the_rollout(given: Any, says: str) -> None:
    shaped = Shaping(turn_rewards=True).apply(rollout(turn_rewards=given))
    assert shaped.status is RolloutStatus.FAILED
    with pytest.raises(ValueError, match=says):
        raise ValueError(shaped.error)


def test_without_shaping_reported_turn_rewards_are_ignored() -> None:
    given = rollout(turn_rewards="good")
    assert Shaping().apply(given) is given


def test_a_reward_set_returns_finished_rollouts_and_leaves_failed_ones_alone() -> None:
    rewards = RewardSet(
        [Reward(name="short", function=lambda found: 1.0 if found.num_sampled < 5 else "no number", weight=2.0)],
        FaultTolerance(max_error_rate=1.0),
        Shaping(horizon=4, overlong_buffer=0.5),
    )
    rollouts = [rollout(3), rollout(5)]
    for tally in (None, Tally()):
        first, second = asyncio.run(rewards.score(rollouts, tally=tally))
        assert (first.reward, first.rewards) == (1.5, {"short": 1.0, "overlong": -0.5})
        assert (second.status, second.reward, second.rewards) == (RolloutStatus.FAILED, 0.0, {})
    assert asyncio.run(rewards.score(rollouts, is_shaped=False))[0].rewards == {"short": 1.0}


def test_the_last_turn_gets_what_the_turns_before_it_did_not() -> None:
    given = replace(rollout(1, 1, 1, turn_rewards=[0.5, 0.25]), reward=2.0)
    assert turn_rewards(given, reported=True).tolist() == [0.5, 0.25, 1.25]
    assert turn_rewards(given, reported=False).tolist() == [0.0, 0.0, 2.0]
