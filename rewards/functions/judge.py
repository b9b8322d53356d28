"""Reward from a language model as a judge that gives one score.

reward.functions=[llm_judge] reward.settings.llm_judge.url=http://127.0.0.1:8000/v1 ...model=<name>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rewards.functions.judge_server import JudgeServer
from rollout.errors import ConfigError, RewardError
from rollout.records import Rollout

# Possessive: two runs of spaces side by side would take quadratic time on a reply of spaces.
_SCORE = re.compile(r"score\s*+:\s*+\**+\s*+([-+]?\d+(?:\.\d+)?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class LlmJudge(JudgeServer):
    """Reward `llm_judge`: the judge's score, scaled from low .. high to 0 .. 1."""

    criteria: str = "Judge whether the answer is correct and complete."
    low: float = 0.0
    high: float = 10.0

    def __post_init__(self) -> None:
        """Raises `ConfigError` for values out of range."""
        super().__post_init__()
        if not self.low < self.high:
            raise ConfigError(f"llm_judge: found low={self.low} and high={self.high}; expected low < high")

    async def __call__(self, rollout: Rollout) -> float:
        """Return the scaled score. Raises as `JudgeServer.ask`."""
        return await self.ask(
            f"You grade an answer to a question. {self.criteria}",
            f"End your reply with one line: Score: <a number from {self.low:g} to {self.high:g}>",
            rollout,
            self._read,
        )

    def _read(self, reply: str) -> float:
        scores = _SCORE.findall(reply)
        if not scores:
            raise RewardError(f"judge {self.url}: no line 'Score: <number>' in its reply, which ends {reply[-80:]!r}")
        score = float(scores[-1])
        if not self.low <= score <= self.high:
            raise RewardError(f"judge {self.url}: score {score:g} is not between {self.low:g} and {self.high:g}")
        return (score - self.low) / (self.high - self.low)
