"""Rewards from a language model as a judge that scores one answer on a scale.

reward.functions=[llm_judge] reward.settings.llm_judge.url=http://127.0.0.1:8000/v1 ...model=<name>
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lockstep.rewards.functions.judges.judge_server import JudgeServer, answer_texts
from lockstep.rewards.functions.numbers import first_number
from lockstep.rollout.errors import RewardError
from lockstep.rollout.records import Rollout

# Possessive: two runs of spaces side by side would take quadratic time on a reply of spaces.
_SCORE = re.compile(r"(?<![^\W_])score[\s*_]*+:[\s*_]*+([^\n]*\d[^\n]*)", re.IGNORECASE)
_SHARE = re.compile(r"(\W*+[\d.]++)\s*+(?:/|out of\b)\s*+([\d.]++)")
"""`8/10`, `8 out of 10`: 8 if 10 is the highest score."""


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ScoringJudge(JudgeServer):
    """A judge with a scale of scores."""

    low: float = 0.0
    high: float = 10.0
    """Lowest and highest score, which are the rewards 0 and 1."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for values of a wrong type or out of range."""
        super().__post_init__()
        self.check_numbers("low", "high")
        if not self.low < self.high:
            self.refuse("high", f"a number above low={self.low:g}", f"high={self.low + 10:g}")

    def scaled(self, score: str, *, of: str) -> float:
        """Return a score, a text that begins with a number, scaled from low .. high to 0 .. 1. Raises `RewardError`.

        of: what is scored, for the error.
        """
        number = None if _SHARE.match(score) else first_number(score)
        if number is None or not self.low <= number.value <= self.high:
            raise RewardError(
                f"judge {self.url}: {of} has {score[:80]!r}, expected a number from {self.low:g} to {self.high:g}"
            )
        return (float(number.value) - self.low) / (self.high - self.low)

    async def ask_about(self, rollout: Rollout, task: str, reply: str, read: Callable[[str], T]) -> T:
        """Ask about the final answer of a rollout. Raises as `ask` and `texts_of`."""
        texts = self.texts_of(rollout, answer_texts(rollout))
        return await self.ask(task, reply, texts, read, self.images_of(rollout))


@dataclass(frozen=True, kw_only=True)
class LlmJudge(ScoringJudge):
    """Reward `llm_judge`: the judge's score, scaled from low .. high to 0 .. 1."""

    NAME = "llm_judge"

    criteria: str = "Judge whether the answer is correct and complete."

    async def __call__(self, rollout: Rollout) -> float:
        """Return the scaled score. Raises as `ask_about`."""
        return await self.ask_about(
            rollout,
            f"You grade an answer to a question. {self.criteria}",
            f"End your reply with one line: Score: <a number from {self.low:g} to {self.high:g}>",
            self._read,
        )

    def _read(self, reply: str) -> float:
        scores = _SCORE.findall(reply)
        if not scores:
            raise RewardError(f"judge {self.url}: no line 'Score: <number>' in its reply, which ends {reply[-80:]!r}")
        share = _SHARE.match(scores[-1])
        is_of_high = share is not None and share[2].rstrip(".") == f"{self.high:g}"
        return self.scaled(share[1] if share is not None and is_of_high else scores[-1], of="its last 'Score'")
