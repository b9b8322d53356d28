"""Measures that reward functions take of themselves."""

from __future__ import annotations

import asyncio

from lockstep.rewards.composition import Reward, RewardSet, Tally
from lockstep.rewards.meter import Meter, add, average, measuring
from tests.unit.rewards.test_composition import rollout


def cheap(r):
    add("calls", 1)
    average("seconds", 2.0)
    return 1.0


def dear(r):
    add("calls", 3)
    average("seconds", float(r.rollout_id))
    return 1.0


def test_measures_are_reported_by_function_and_once():
    rewards = RewardSet([Reward(name="cheap", function=cheap), Reward(name="dear", function=dear)])
    asyncio.run(rewards.score([rollout(number=0), rollout(number=1)]))
    metrics = {name: value for name, value in rewards.take_metrics().items() if name.startswith("judge/")}
    assert metrics == {
        "judge/cheap/calls": 2.0,
        "judge/cheap/seconds": 2.0,
        "judge/dear/calls": 6.0,
        "judge/dear/seconds": 0.5,
    }
    assert not any(name.startswith("judge/") for name in rewards.take_metrics())


def test_rollouts_that_are_not_trained_are_not_measured():
    rewards = RewardSet([Reward(name="cheap", function=cheap)])
    asyncio.run(rewards.score([rollout()], tally=Tally()))
    assert "judge/cheap/calls" not in rewards.take_metrics()


def test_outside_a_reward_set_nothing_is_measured():
    meter = Meter()
    with measuring(meter):
        pass
    cheap(rollout())
    assert meter.read() == {}
