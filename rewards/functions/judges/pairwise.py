"""Reward from a language model as a judge that compares pairs of the answers of a group.

reward.functions=[pairwise_judge] reward.settings.pairwise_judge.url=http://127.0.0.1:8000/v1 ...model=<name>

The order of the answers in a request biases judges (Zheng et al. 2023, arXiv:2306.05685, section 3.3), so each pair is
judged in both orders, and their mean counts.

No strengths are fitted (Bradley-Terry): if all pairs are compared, they rank a group as its win rates do, and those of
an answer that wins or loses each comparison are infinite.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.rewards.functions.judges.judge_server import JudgeServer, answer_texts
from lockstep.rewards.meter import average
from lockstep.rollout.errors import RewardError
from lockstep.rollout.records import Rollout

_MARKS = r"[\s*_\"'`(\[]*+"  # possessive, as in scored.py
_VERDICT = re.compile(
    rf"verdict[\s*_]*+[:=]{_MARKS}(?:answer\b{_MARKS})?+(a|b|tie)[ \t*_\"'`)\].]*+$", re.IGNORECASE | re.MULTILINE
)
_FIRST = {"a": 1.0, "b": 0.0, "tie": 0.5}
"""Points of the first answer of a request, by the judge's verdict."""


@dataclass(frozen=True, kw_only=True)
class PairwiseJudge(JudgeServer):
    """Reward `pairwise_judge`: the mean of a rollout's points in its comparisons; a win is 1, a tie ½, a loss 0."""

    NAME = "pairwise_judge"

    criteria: str = "Judge which answer is more correct and complete."
    both_orders: bool = True
    """Ask for each pair twice, each answer first once, and take the mean."""
    comparisons: int | None = None
    """Others of the group with which a rollout is compared; null: all."""
    concurrency: int = 16
    """Maximum number of requests at once; groups are judged one after the other."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for values of a wrong type or out of range."""
        super().__post_init__()
        if not isinstance(self.both_orders, bool):
            self.refuse("both_orders", "true or false", "both_orders=true")
        self.check_counts("concurrency", *(() if self.comparisons is None else ("comparisons",)))

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[float | RewardError | None]:
        """Return the mean points of each rollout of a group, from 0 to 1.

        None for a rollout alone. A comparison without a valid verdict counts for neither rollout; one whose comparisons
        are fewer than half valid gets the error.

        Measures `failed_fraction` of comparisons, `tie_fraction` of valid ones, and `first_fraction` of the verdicts
        without ties: how often the answer that comes first wins.

        Raises as `ask` and `texts_of`, but `RewardError`.
        """
        slots = asyncio.Semaphore(int(self.concurrency))
        comparisons = pairs(len(rollouts), None if self.comparisons is None else int(self.comparisons))
        results = await asyncio.gather(*(self._compare(rollouts, pair, slots) for pair in comparisons))
        points: list[list[float]] = [[] for _ in rollouts]
        errors: list[list[RewardError]] = [[] for _ in rollouts]
        for (first, second), result in zip(comparisons, results, strict=True):
            average("failed_fraction", isinstance(result, RewardError))
            if isinstance(result, RewardError):
                errors[first].append(result)
                errors[second].append(result)
                continue
            average("tie_fraction", result == 0.5)
            points[first].append(result)
            points[second].append(1.0 - result)
        return [_mean(own, own_errors) for own, own_errors in zip(points, errors, strict=True)]

    async def _compare(
        self, rollouts: Sequence[Rollout], pair: tuple[int, int], slots: asyncio.Semaphore
    ) -> float | RewardError:
        """Return the points of the first rollout of a pair, or why there are none."""
        first, second = (rollouts[index] for index in pair)
        if answer_texts(first) == answer_texts(second):
            return 0.5
        is_swapped = bool(sum(pair) % 2)  # with one order, each rollout comes first in about half of its comparisons
        orders = (False, True) if self.both_orders else (is_swapped,)
        try:
            points = [await self._points(first, second, slots, is_swapped=is_swapped) for is_swapped in orders]
        except RewardError as error:
            return error
        return sum(points) / len(points)

    async def _points(self, first: Rollout, second: Rollout, slots: asyncio.Semaphore, *, is_swapped: bool) -> float:
        """Return the points of the first rollout from one request. Raises as `ask` and `texts_of`."""
        left, right = (second, first) if is_swapped else (first, second)
        texts = self.texts_of(first, answer_texts(left, "Answer A") | answer_texts(right, "Answer B"))
        async with slots:
            points = await self.ask(
                f"You compare two answers to a question. {self.criteria}",
                "End your reply with one line: Verdict: A, Verdict: B, or Verdict: tie",
                texts,
                self._read,
                self.images_of(first),
            )
        if points != 0.5:
            average("first_fraction", points)
        return 1.0 - points if is_swapped else points

    def _read(self, reply: str) -> float:
        """Return the points of answer A by the last verdict. Raises `RewardError` without one."""
        verdicts = _VERDICT.findall(reply)
        if not verdicts:
            raise RewardError(
                f"judge {self.url}: no line 'Verdict: A', 'Verdict: B' or 'Verdict: tie' in its reply, which ends "
                f"{reply[-80:]!r}"
            )
        return _FIRST[verdicts[-1].lower()]


def pairs(count: int, comparisons: int | None) -> list[tuple[int, int]]:
    """Return the pairs of a group that are compared: all, or each with as many others, its next ones in a circle.

    Where no such choice exists (an odd number for each of an odd group), each has one more. Rollouts of a group come in
    no order, so their neighbors are a random choice, and the same when a run is resumed.
    """
    if comparisons is None or comparisons >= count - 1:
        return [(first, second) for first in range(count) for second in range(first + 1, count)]
    half = count // 2 if comparisons % 2 and count % 2 == 0 else None
    steps = range(1, (comparisons + (half is None)) // 2 + 1)
    index_pairs = [(start, (start + step) % count) for step in steps for start in range(count)]
    opposite = [(start, start + half) for start in range(half)] if half is not None else []
    return [*index_pairs, *opposite]


def _mean(points: Sequence[float], errors: Sequence[RewardError]) -> float | RewardError | None:
    if not points and not errors:
        return None
    if len(errors) > len(points):
        return RewardError(f"{len(errors)} of {len(points) + len(errors)} comparisons failed, the last: {errors[-1]}")
    return sum(points) / len(points)
