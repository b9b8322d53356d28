"""Length control by hand, and where it enters the reward."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from lockstep.rewards.composition import FaultTolerance, Reward, RewardSet
from lockstep.rewards.length import LengthControl, Member, alp, kimi, sigmoid
from lockstep.rewards.shaping import Shaping
from lockstep.rollout.records import EngineCall, FinishReason, Rollout


def group(*members: tuple[int, bool]) -> list[Member]:
    return [Member(length=length, is_solved=is_solved) for length, is_solved in members]


MIXED = group((10, True), (20, True), (30, False), (50, True), (15, False))


def test_kimi_falls_from_the_shortest_to_the_longest_and_gives_failures_no_bonus() -> None:
    """λ: .5, .25, 0, −.5, .375; the last rollout failed."""
    assert kimi(MIXED, horizon=100) == pytest.approx([0.5, 0.25, 0.0, -0.5, 0.0])
    assert kimi(group((7, True), (7, False)), horizon=100) == [0.0, 0.0]


def test_sigmoid_compares_solved_rollouts_with_the_mean_of_the_solved_ones() -> None:
    """Lengths 10, 20, 50: mean 80/3, population deviation √(2600/9)."""
    std = math.sqrt(2600 / 9)
    expected = [-1 / (1 + math.exp(-(length - 80 / 3) / std)) for length in (10, 20, 50)]
    found = sigmoid(MIXED, horizon=100)
    assert [found[0], found[1], found[3]] == pytest.approx(expected, abs=1e-6)
    assert (found[2], found[4]) == (0.0, 0.0)
    assert sigmoid(group((7, False), (9, False)), horizon=100) == [0.0, 0.0]
    assert sigmoid(group((7, True), (7, True)), horizon=100) == [-0.5, -0.5]


def test_alp_charges_a_token_by_the_pass_rate_of_the_group() -> None:
    assert alp(MIXED, horizon=100) == pytest.approx([-0.6 * x for x in (0.1, 0.2, 0.3, 0.5, 0.15)])
    unsolved = group((10, False), (20, False))
    assert alp(unsolved, horizon=100) == pytest.approx([-0.05, -0.1]), "at least 1/G"


def rollout(number: int, group_id: int, *lengths: int) -> Rollout:
    calls = tuple(
        EngineCall(prompt_ids=(1,), sampled_ids=(5,) * n, sampled_logprobs=(-1.0,) * n, finish_reason=FinishReason.STOP)
        for n in lengths
    )
    return Rollout(rollout_id=number, group_id=group_id, calls=calls)


def test_the_term_counts_all_turns_of_whole_groups_and_is_part_of_the_reward_by_name() -> None:
    """Group 0: lengths 2 + 4 and 2, both solved. Group 1: one of two solved. The failed rollout is left out."""
    control = LengthControl(rule="alp", weight=2.0, solved_reward=1.0, horizon=10)
    values = iter([1.0, 1.0, 1.0, 0.5, "no number"])
    rewards = RewardSet(
        [Reward(name="answer", function=lambda r: next(values))],
        FaultTolerance(max_error_rate=1.0),
        Shaping(length=control),
    )
    given = [rollout(0, 0, 2, 4), rollout(1, 0, 2), rollout(2, 1, 5), rollout(3, 1, 5), rollout(4, 1, 5)]
    found = asyncio.run(rewards.score(given))
    assert [one.rewards.get("length_control") for one in found] == pytest.approx([-1.2, -0.4, -0.5, -0.5, None])
    assert [one.reward for one in found] == pytest.approx([1 - 1.2, 1 - 0.4, 0.5, 0.0, 0.0])


def test_whether_a_rollout_is_solved_does_not_depend_on_other_shaping() -> None:
    control = LengthControl(rule="alp", weight=1.0, horizon=4)
    shaping = Shaping(length=control, horizon=4, overlong_buffer=0.5, overlong_penalty=3.0)
    (found,) = shaping.apply_to([replace(rollout(0, 0, 4), reward=1.0)])
    assert found.rewards == {"overlong": -3.0, "length_control": -1.0}


def test_by_default_nothing_is_added() -> None:
    given = [rollout(0, 0, 2)]
    assert Shaping().apply_to(given) == given
