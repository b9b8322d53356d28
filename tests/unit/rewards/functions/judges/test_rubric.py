"""Rewards from a judge with several criteria."""

from __future__ import annotations

import pytest

from lockstep.rewards.resolve import check_built_in
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import RolloutStatus
from tests.unit.rewards.functions.judges.test_scored import Judge
from tests.unit.rewards.workers.test_pool import rollout

CRITERIA = {"right": {"text": "It is right.", "weight": 3}, "clear": {"text": "It is clear."}}
GOOD = "It is fine.\nright: 10\nclear: 2.5"


def test_a_rubric_is_scored_in_one_call_and_each_criterion_is_a_metric():
    judge = Judge((200, GOOD), name="rubric_judge")
    scored, rewards = judge(rollout("because"), criteria=CRITERIA)
    assert scored.reward == pytest.approx((3 * 1.0 + 0.25) / 4)
    assert len(judge.requests) == 1
    text = judge.requests[0]["messages"][0]["content"]
    assert all(part in text for part in ("It is right.", "It is clear.", "because", "clear: <a number from 0 to 10>"))
    metrics = rewards.take_metrics()
    assert metrics["judge/rubric_judge/criterion/right"] == 1.0
    assert metrics["judge/rubric_judge/criterion/clear"] == 0.25
    assert metrics["judge/rubric_judge/calls"] == 1


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("right: 10", "no score for 'clear'"),
        (f"{GOOD}\nclear: 3", "two scores for 'clear'"),
        ("right: 10\nclear: 11", "expected a number from 0 to 10"),
        ("right: 10\nclear: good", "expected a number from 0 to 10"),
        ("right: 10\nclear: nan", "expected a number from 0 to 10"),
        ("right: 10\nclear: 3-4", "expected a number from 0 to 10"),
        ("right: 10\nclear: 3/10", "expected a number from 0 to 10"),
        ("", "no score for 'right'"),
    ],
)
def test_a_reply_without_exactly_one_score_per_criterion_is_an_error(reply: str, says: str):
    scored, rewards = Judge((200, reply), name="rubric_judge")(rollout("because"), criteria=CRITERIA)
    assert scored.status is RolloutStatus.FAILED
    assert says in (scored.error or "")
    metrics = rewards.take_metrics()
    assert metrics["reward/errors/exception"] == 1
    assert not any("criterion" in name for name in metrics)


@pytest.mark.parametrize(
    ("criteria", "says"),
    [
        ({}, "expected a mapping"),
        ("clear", "expected a mapping"),
        ({"a b": {"text": "x"}}, "letters, digits"),
        ({"a": {}}, "criteria.a.text"),
        ({"a": "x"}, "criteria.a.text"),
        ({"a": {"text": "x", "wieght": 1}}, "leave out .*wieght"),
        ({"a": {"text": "x", "weight": 0}}, "above 0"),
        ({"a": {"text": "x", "weight": float("nan")}}, "above 0"),
        ({"a": {"text": "x", "weight": True}}, "above 0"),
    ],
)
def test_criteria_in_another_form_are_refused_before_the_run(criteria: object, says: str):
    with pytest.raises(ConfigError, match=says):
        check_built_in("rubric_judge", {"url": "u", "model": "m", "criteria": criteria})
