"""Metrics of rewards and of what environments report."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.rollout.records import EngineCall, FinishReason, Rollout
from lockstep.trainer.observe.step_metrics import outcome_metrics, reward_metrics


def means(*outcomes: dict[str, Any]) -> dict[str, float]:
    return outcome_metrics([Rollout(rollout_id=n, group_id=0, calls=(), outcome=one) for n, one in enumerate(outcomes)])


def test_a_number_that_some_rollouts_do_not_report_counts_as_zero_there():
    assert means({"found": 1, "said": "yes"}, {}) == {"environment/found": 0.5}


@pytest.mark.parametrize("other", [None, "a text", [1], {"a": 1}])
def test_a_fact_that_is_a_number_in_one_rollout_only_is_averaged_there_and_the_others_are_counted(other: Any):
    assert means({"found": 1}, {"found": other}, {"found": 0}, {"found": other}) == {
        "environment/found": 0.5,
        "environment/found/not_numbers": 2.0,
    }


def test_the_largest_numbers_that_an_outcome_may_have_are_averaged():
    assert means({"found": 10**100}, {"found": -(10**100)}, {"found": 1e100}) == {
        "environment/found": pytest.approx(1e100 / 3)
    }


def test_groups_of_equal_rewards_are_counted_as_solved_or_as_failed():
    call = EngineCall(prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-0.5,), finish_reason=FinishReason.STOP)
    rewards = {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (0.0, 1.0), 3: (0.25, 0.25)}
    rollouts = [
        Rollout(rollout_id=n, group_id=group, calls=(call,), reward=reward)
        for n, (group, reward) in enumerate((group, reward) for group, pair in rewards.items() for reward in pair)
    ]
    found = reward_metrics(rollouts, pass_threshold=1.0)
    assert (found["reward/flat_solved_fraction"], found["reward/flat_failed_fraction"]) == (0.25, 0.5)
