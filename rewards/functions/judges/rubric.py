"""Reward from a language model as a judge that gives one score per criterion, in one call."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.rewards.functions.judges.scored import ScoringJudge
from lockstep.rewards.meter import average
from lockstep.rollout.errors import ConfigError, RewardError
from lockstep.rollout.records import Rollout

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class RubricJudge(ScoringJudge):
    """Reward `rubric_judge`: the weighted mean of the scores by criterion, scaled from low .. high to 0 .. 1."""

    NAME = "rubric_judge"

    criteria: Mapping[str, Mapping[str, Any]]
    """By name: `text`, a sentence for the judge, and `weight` (1 if it is left out)."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for values out of range, and for criteria in another form."""
        super().__post_init__()
        if not isinstance(self.criteria, Mapping) or not self.criteria:
            raise ConfigError(
                f"rubric_judge: found criteria={self.criteria!r}, expected a mapping; set "
                "'reward.settings.rubric_judge.criteria={clarity: {text: The answer is clear., weight: 1}}'"
            )
        for name, criterion in self.criteria.items():
            _check(name, criterion)

    async def __call__(self, rollout: Rollout) -> float:
        """Return the scaled mean, and measure each scaled score. Raises as `ask_about`."""
        criteria_text = "\n".join(f"{name}: {criterion['text']}" for name, criterion in self.criteria.items())
        scale = f"<a number from {self.low:g} to {self.high:g}>"
        form = "\n".join(f"{name}: {scale}" for name in self.criteria)
        scores = await self.ask_about(
            rollout,
            f"You grade an answer to a question by these criteria:\n{criteria_text}",
            f"End your reply with these lines, and begin no other line with the name of a criterion:\n{form}",
            self._read,
        )
        for name, score in scores.items():
            average(f"criterion/{name}", score)
        weights = {name: criterion.get("weight", 1.0) for name, criterion in self.criteria.items()}
        return sum(weights[name] * score for name, score in scores.items()) / sum(weights.values())

    def _read(self, reply: str) -> dict[str, float]:
        """Return the scaled scores by criterion. Raises `RewardError` unless each has exactly one, in range."""
        scores: dict[str, float] = {}
        for line in reply.splitlines():
            name, colon, value = (part.strip() for part in line.partition(":"))
            if not colon or name not in self.criteria:
                continue
            if name in scores:
                raise RewardError(f"judge {self.url}: two scores for {name!r} in its reply")
            scores[name] = self.scaled(value, of=repr(name))
        missing = [name for name in self.criteria if name not in scores]
        if missing:
            raise RewardError(f"judge {self.url}: no score for {missing[0]!r} in its reply, which ends {reply[-80:]!r}")
        return scores


def _check(name: Any, criterion: Any) -> None:
    key = f"reward.settings.rubric_judge.criteria.{name}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"rubric_judge: found criterion {name!r}, expected letters, digits and _, as in a metric")
    if not isinstance(criterion, Mapping) or not isinstance(criterion.get("text"), str) or not criterion["text"]:
        raise ConfigError(f"rubric_judge: criterion {name} has no text; set '{key}.text=<sentence>'")
    unknown = sorted(set(criterion) - {"text", "weight"})
    if unknown:
        raise ConfigError(f"rubric_judge: criterion {name} takes text and weight; leave out {key}.{unknown[0]}")
    weight = criterion.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(f"rubric_judge: found weight {weight!r}, expected a number above 0; set {key}.weight=1")
