"""Rewards that compare the answers of a group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lockstep.rewards.composition import FaultTolerance, make_reward_set
from lockstep.rewards.functions import consensus
from lockstep.rewards.functions.consensus import MajorityVote, Novelty
from lockstep.rewards.resolve import check_built_in
from lockstep.rollout.errors import ConfigError
from tests.unit.rewards.test_composition import rollout


def of(reward: type[MajorityVote | Novelty], *answers: str, **settings: Any) -> list[float | None]:
    return reward(**settings)([rollout(answer, number=number) for number, answer in enumerate(answers)])


def test_the_majority_earns_one() -> None:
    answers = ("It is 7.", "The answer is 7.0", "8", "no idea", "x = 7", "8")
    assert of(MajorityVote, *answers) == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert of(Novelty, *answers) == [pytest.approx(value) for value in (0.6, 0.6, 0.8, 0.0, 0.6, 0.8)]


def test_equally_frequent_answers_all_earn_one_so_that_an_undecided_group_teaches_nothing() -> None:
    assert of(MajorityVote, "1", "2", "2", "1", "3") == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert of(MajorityVote, "1", "2", "3") == [1.0, 1.0, 1.0]


def test_a_group_without_answers_earns_nothing() -> None:
    assert of(MajorityVote, "", "none") == [0.0, 0.0]
    assert of(Novelty, "", "none") == [0.0, 0.0]


def test_a_rollout_alone_has_no_reward() -> None:
    assert of(MajorityVote, "7") == [None]
    assert of(Novelty, "7") == [None]


@pytest.mark.parametrize(
    ("settings", "answers", "expected"),
    [
        ({"answer": "text"}, ("Paris", " paris ", "PARIS.", "Rome"), [1.0, 1.0, 0.0, 0.0]),
        ({"answer": "text"}, ("-1", "1", "1", "1"), [0.0, 1.0, 1.0, 1.0]),
        ({"answer": "number"}, ("1,000", "1e3", "1000.0", "1000.001"), [1.0, 1.0, 1.0, 0.0]),
        ({"answer": "number"}, (r"\boxed{\frac{1}{2}}", "0.5", r"\boxed{\frac32}", "2"), [1.0, 1.0, 0.0, 0.0]),
        ({"answer": "number"}, ("1234567", "1234568", "1234567", "12:30"), [1.0, 0.0, 1.0, 0.0]),
        ({"answer": "number"}, (r"\boxed{4} or 5", "4", "5", "6"), [1.0, 1.0, 0.0, 0.0]),
        ({"tag": "answer"}, ("<answer>4</answer> 5", "<answer>4</answer>", "4", "5"), [1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_kinds_of_answers(settings: dict[str, Any], answers: tuple[str, ...], expected: list[float]) -> None:
    assert of(MajorityVote, *answers, **settings) == expected


def test_answers_that_are_equal_as_mathematics_agree() -> None:
    pytest.importorskip("math_verify")
    answers = (r"$\frac{1}{2}$", "$0.5$", "$1/2$", "$2$", "no formula here")
    assert of(MajorityVote, *answers, answer="math") == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"answer": "letters"}, "expected one of number, text, math; set reward.settings.majority_vote.answer=number"),
        ({"answer": 3}, "answer=3: expected one of"),
        ({"answer": [1]}, "expected one of"),
        ({"tag": 3}, "tag=3: expected a text"),
        ({"tags": "x"}, "it takes answer, tag: leave out reward.settings.majority_vote.tags"),
    ],
)
def test_settings_are_checked_before_the_run(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_built_in("majority_vote", settings)


def test_math_without_its_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"answer=math needs math-verify; pip install 'lockstep-rl\[math\]'"):
        check_built_in("majority_vote", {"answer": "math"})


def test_both_run_in_a_worker_by_name() -> None:
    rewards = make_reward_set(
        ["majority_vote", "novelty"],
        settings={"majority_vote": {"answer": "text"}, "novelty": {"answer": "text"}},
        tolerance=FaultTolerance(max_error_rate=1.0),
    )
    try:
        scored = asyncio.run(rewards.score([rollout(answer, number=n) for n, answer in enumerate("aab")]))
    finally:
        rewards.close()
    assert [one.rewards for one in scored] == [
        {"majority_vote": 1.0, "novelty": 0.5},
        {"majority_vote": 1.0, "novelty": 0.5},
        {"majority_vote": 0.0, "novelty": 1.0},
    ]
