"""Rewards from a judge that compares the answers of a group in pairs."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from lockstep.rewards.functions.judges.pairwise import PairwiseJudge, pairs
from lockstep.rewards.resolve import check_built_in
from lockstep.rollout.errors import ConfigError, RewardError
from lockstep.rollout.records import Rollout, RolloutStatus
from tests.fixtures.cost import cpu_s
from tests.unit.rewards.functions.judges.test_scored import Judge
from tests.unit.rewards.workers.test_pool import rollout

Rule = Callable[[str, str], str]
"""Reply to answers A and B."""


class Comparing(Judge):
    """Server whose reply depends on the two answers that it is shown."""

    def __init__(self, rule: Rule, *, delay_s: float = 0.0) -> None:
        super().__init__((200, ""), name="pairwise_judge")
        self.rule, self.delay_s = rule, delay_s
        self.now = self.most = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.delay_s)
        self.now -= 1
        reply = self.rule(*answers_of(body))
        if reply == "refuse":
            return web.json_response({}, status=401)
        usage = {"prompt_tokens": 10, "completion_tokens": 2}
        return web.json_response({"choices": [{"message": {"content": reply}}], "usage": usage})

    def compare(self, *answers: str, **settings: Any) -> tuple[list[Rollout], dict[str, float]]:
        """Score groups, one per text of answers, and return them with the judge's metrics."""
        given = [
            replace(rollout(answer, answer="42"), group_id=group, rollout_id=100 * group + number)
            for group, texts in enumerate(answers)
            for number, answer in enumerate(texts)
        ]
        scored, rewards = asyncio.run(self.judge_all(given, **settings))
        metrics = rewards.take_metrics()
        prefix = "judge/pairwise_judge/"
        return scored, {name.removeprefix(prefix): value for name, value in metrics.items() if prefix in name}


def answers_of(body: Any) -> tuple[str, str]:
    text = body["messages"][0]["content"]
    found = re.findall(r"Answer ([AB]):\n(\[\w+\])\n(.*?)\n\2", text, re.DOTALL)
    assert [letter for letter, *_ in found] == ["A", "B"]
    return found[0][2], found[1][2]


def earlier_letter(a: str, b: str) -> str:
    """Prefer the answer that is earlier in the alphabet."""
    return f"Both are fine.\nVerdict: {'A' if a < b else 'B'}"


def rewards_of(scored: list[Rollout]) -> list[float]:
    return [one.reward for one in scored]


def test_the_reward_is_the_share_of_comparisons_won() -> None:
    judge = Comparing(earlier_letter)
    scored, measured = judge.compare("cab")
    assert rewards_of(scored) == [0.0, 1.0, 0.5], "a beats both, b beats c"
    assert len(judge.requests) == 6, "three pairs in both orders"
    assert measured.pop("seconds") > 0
    assert measured == {
        "calls": 6.0,
        "hit_fraction": 0.0,
        "prompt_tokens": 60.0,
        "completion_tokens": 12.0,
        "failed_fraction": 0.0,
        "tie_fraction": 0.0,
        "first_fraction": 0.5,
    }


def test_a_judge_that_prefers_the_first_answer_is_canceled_by_both_orders() -> None:
    scored, measured = Comparing(lambda a, b: "Verdict: A").compare("abc")
    assert rewards_of(scored) == [0.5, 0.5, 0.5]
    assert (measured["first_fraction"], measured["tie_fraction"]) == (1.0, 1.0)
    judge = Comparing(lambda a, b: "Verdict: A")
    scored, measured = judge.compare("abcd", both_orders=False)
    assert len(judge.requests) == 6
    first = Counter(answers_of(body)[0] for body in judge.requests)
    assert rewards_of(scored) == [pytest.approx(first[letter] / 3) for letter in "abcd"]
    assert max(first.values()) - min(first.get(letter, 0) for letter in "abcd") <= 1, "the first place is shared"


def test_equal_answers_are_a_tie_without_a_request() -> None:
    judge = Comparing(earlier_letter)
    scored, measured = judge.compare("aab", cache=0)
    assert rewards_of(scored) == [0.75, 0.75, 0.0]
    assert len(judge.requests) == 4
    assert measured["tie_fraction"] == pytest.approx(1 / 3)


def test_groups_are_compared_within_themselves_and_equal_questions_are_asked_once() -> None:
    judge = Comparing(earlier_letter)
    scored, measured = judge.compare("ab", "bc", "ba")
    assert rewards_of(scored) == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert len(judge.requests) == 4, "the third group has the pair of the first"
    assert measured["hit_fraction"] == pytest.approx(2 / 6)


def test_a_rollout_alone_is_not_compared() -> None:
    judge = Comparing(earlier_letter)
    (scored,), measured = judge.compare("a")
    assert "no reward function applies" in str(scored.error)
    assert judge.requests == []
    assert measured == {}


@pytest.mark.parametrize(
    ("reply", "points"),
    [
        ("Verdict: A", 1.0),
        ("verdict: b", 0.0),
        ("**Verdict:** A", 1.0),
        ("**Verdict**: **Answer B**.", 0.0),
        ("Verdict: [[A]]", 1.0),
        ("Verdict:\nB\n\nI hope that this helps.", 0.0),
        ("Verdict: A? No.\nVerdict: Tie", 0.5),
        ("Verdict: B\nVerdict: A", 1.0),
        ("Verdict = 'tie'", 0.5),
    ],
)
def test_verdicts_in_usual_forms_are_read(reply: str, points: float) -> None:
    assert PairwiseJudge(url="u", model="m")._read(reply) == points


@pytest.mark.parametrize(
    "reply", ["", "A", "Verdict: C", "Verdict: A or B", "Verdict: Apples", "Verdict:", "Verdict: A is better than B"]
)
def test_other_replies_are_no_verdict(reply: str) -> None:
    with pytest.raises(RewardError, match="no line 'Verdict: A'"):
        PairwiseJudge(url="u", model="m")._read(reply)


def test_a_failed_comparison_counts_for_neither_and_is_measured() -> None:
    def rule(a: str, b: str) -> str:
        return "Hard to say." if {a, b} == {"a", "b"} else earlier_letter(a, b)

    scored, measured = Comparing(rule).compare("abcd")
    assert rewards_of(scored) == [1.0, 1.0, pytest.approx(1 / 3), 0.0]
    assert measured["failed_fraction"] == pytest.approx(1 / 6)


def test_a_rollout_most_of_whose_comparisons_fail_is_an_error_and_never_a_zero() -> None:
    def rule(a: str, b: str) -> str:
        return "refuse" if "a" in (a, b) else earlier_letter(a, b)

    judge = Comparing(rule)
    scored, _ = judge.compare("abc")
    assert [one.status is RolloutStatus.FAILED for one in scored] == [True, False, False]
    assert "2 of 2 comparisons failed, the last: judge http" in str(scored[0].error)
    assert "status 401" in str(scored[0].error)
    assert rewards_of(scored)[1:] == [1.0, 0.0], "b beats c; what was asked about a counts for neither"


def test_a_group_that_is_not_judged_in_time_is_a_timeout() -> None:
    scored, _ = Comparing(earlier_letter, delay_s=5.0).compare("ab", timeout_s=0.5)
    assert all("pairwise_judge: timeout" in str(one.error) for one in scored)


def test_requests_at_once_are_limited_over_all_groups() -> None:
    judge = Comparing(earlier_letter, delay_s=0.02)
    judge.compare("abcd", "efgh", concurrency=3)
    assert judge.most == 3
    assert len(judge.requests) == 24


def test_the_judge_sees_the_question_of_both_and_the_reference_if_a_column_is_set() -> None:
    judge = Comparing(earlier_letter)
    judge.compare("ab", column="answer", criteria="Prefer the kind one.")
    text = judge.requests[0]["messages"][0]["content"]
    assert text.startswith("You compare two answers to a question. Prefer the kind one.\nQuestion and Reference and ")
    assert re.search(r"Reference:\n(\[\w+\])\n42\n\1\nAnswer A:", text)
    scored, _ = Comparing(earlier_letter).compare("ab", column="solution")
    assert "no column 'solution'" in str(scored[0].error)


def test_turns_after_the_first_difference_are_not_part_of_the_question() -> None:
    judge = Comparing(earlier_letter)
    given = [
        replace(
            rollout("x"),
            rollout_id=number,
            calls=rollout("x").calls * 2,
            messages=(
                {"role": "user", "content": "Sum?"},
                {"role": "assistant", "content": f"Of what, {letter}?"},
                {"role": "user", "content": f"Of mine, {letter}."},
                {"role": "assistant", "content": letter},
            ),
        )
        for number, letter in enumerate("ab")
    ]
    asyncio.run(judge.judge_all(given))
    text = judge.requests[0]["messages"][0]["content"]
    between = r"Turns before Answer A:\n\1\nAssistant: Of what, (.)\?\nUser: Of mine, \2\.\n\1\n"
    assert re.search(rf"Question:\n(\[\w+\])\nSum\?\n\1\n{between}Answer A:\n\1\n\2\n", text)


@pytest.mark.parametrize("count", range(2, 10))
@pytest.mark.parametrize("comparisons", [None, 1, 2, 3, 4, 20])
def test_each_rollout_is_in_equally_many_comparisons_with_different_others(count: int, comparisons: int | None) -> None:
    chosen = pairs(count, comparisons)
    assert len({frozenset(pair) for pair in chosen}) == len(chosen)
    assert all(first != second for first, second in chosen)
    met = Counter(index for pair in chosen for index in pair)
    wanted = count - 1 if comparisons is None else min(count - 1, comparisons)
    assert set(met.values()) == {wanted + (wanted * count) % 2}
    assert set(met) == set(range(count))


def test_a_choice_of_comparisons_is_written_out() -> None:
    assert pairs(4, None) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert pairs(5, 2) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
    assert pairs(4, 1) == [(0, 2), (1, 3)]
    assert pairs(1, None) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"comparisons": 0}, "comparisons=0: expected a whole number of at least 1"),
        ({"comparisons": "all"}, "comparisons='all': expected a number"),
        ({"concurrency": 0}, "concurrency=0: expected a whole number"),
        ({"both_orders": "yes"}, "both_orders='yes': expected true or false; set .*both_orders=true"),
        ({"low": 1}, "leave out reward.settings.pairwise_judge.low"),
        ({"attempts": 0}, "attempts=0"),
    ],
)
def test_settings_are_checked_before_the_run(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_built_in("pairwise_judge", {"url": "u", "model": "m", **settings})


def test_a_reply_of_spaces_costs_work_in_proportion_to_its_length() -> None:
    reply = "Verdict:" + " *" * 20_000 + "x\n" + "Verdict: A" + " *" * 20_000 + "x"
    judge = PairwiseJudge(url="u", model="m")

    def read() -> None:
        with pytest.raises(RewardError):
            judge._read(reply)

    assert cpu_s(read) < 0.5
