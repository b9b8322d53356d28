"""Reward from a language model as a judge that gives one score.

reward.functions=[llm_judge] reward.settings.llm_judge.url=http://127.0.0.1:8000/v1 ...model=<name>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rewards.functions.judge_server import NUMBER, JudgeServer
from rollout.errors import RewardError
from rollout.records import Rollout

# Possessive: two runs of spaces side by side would take quadratic time on a reply of spaces.
_SCORE = re.compile(rf"score\s*+:\s*+\**+\s*+({NUMBER.pattern})", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class LlmJudge(JudgeServer):
    """Reward `llm_judge`: the judge's score, scaled from low .. high to 0 .. 1."""

    NAME = "llm_judge"

    criteria: str = "Judge whether the answer is correct and complete."

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
        return self.scaled(scores[-1], of="its last 'Score'")
