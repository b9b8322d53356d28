"""Rewards that compare the final answers of a group: agreement with its majority, and difference from the others.

| `answer` | final answer                                     | two are the same if                              |
|----------|--------------------------------------------------|--------------------------------------------------|
| `number` | last number, as `numeric` reads it               | they are equal, but for rounded decimals         |
| `text`   | the last turn                                    | they are equal, but for case and amount of space |
| `math`   | expression that math-verify reads (extra `math`) | they are equal as mathematics                    |

With `tag`, the answer is looked for in the last `<tag>` of the last turn.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.rewards.functions import mathematics
from lockstep.rewards.functions.numbers import Number, final_number
from lockstep.rewards.functions.tagged import between_tags
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout


@dataclass(frozen=True, kw_only=True)
class Consensus:
    """A reward that compares the answers of a group."""

    NAME: ClassVar[str] = "consensus"
    """Name of the reward function, under which `reward.settings` has its settings."""

    answer: str = "number"
    """Kind of the answer, see the module."""
    tag: str | None = None
    """Name of the tag around the answer; None: it is in the whole turn."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a value of a wrong type, an unknown kind, or math without math-verify."""
        if not isinstance(self.answer, str) or self.answer not in _ANSWERS:
            raise ConfigError(
                f"reward.settings.{self.NAME}.answer={self.answer!r}: expected one of {', '.join(_ANSWERS)}; set "
                f"reward.settings.{self.NAME}.answer=number"
            )
        if self.tag is not None and not isinstance(self.tag, str):
            raise ConfigError(
                f"reward.settings.{self.NAME}.tag={self.tag!r}: expected a text; set reward.settings.{self.NAME}.tag="
                "answer"
            )
        if self.answer == "math" and importlib.util.find_spec("math_verify") is None:
            raise ConfigError(f"reward.settings.{self.NAME}.answer=math needs math-verify; {mathematics.INSTALL}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """Return the reward of each rollout of a group: 0 without an answer; None for a rollout alone."""
        if len(rollouts) == 1:
            return [None]
        kinds = self._kinds(rollouts)
        votes = Counter(kind for kind in kinds if kind is not None)
        return [0.0 if kind is None else self.reward(votes, kind, len(rollouts)) for kind in kinds]

    def reward(self, votes: Mapping[int, int], kind: int, size: int) -> float:
        """Return the reward of an answer. votes: number of rollouts by answer. size: of the group, at least 2."""
        raise NotImplementedError

    def _kinds(self, rollouts: Sequence[Rollout]) -> list[int | None]:
        """Return a number for each rollout, equal for equal answers; None without an answer."""
        read, is_same = _ANSWERS[self.answer]
        texts = [rollout.answer for rollout in rollouts]
        answers = [read(text if self.tag is None else between_tags(text, self.tag) or "") for text in texts]
        kinds: list[int | None] = []
        for answer in answers:
            known_kinds = [kind for kind in dict.fromkeys(kinds) if kind is not None] if answer is not None else []
            new = None if answer is None else len(kinds)
            kinds.append(next((kind for kind in known_kinds if is_same(answers[kind], answer)), new))
        return kinds


@dataclass(frozen=True, kw_only=True)
class MajorityVote(Consensus):
    """Reward `majority_vote`: 1 for the most frequent answer of the group, each of them if there are several, else 0.

    Source: TTRL (Zuo et al. 2025, arXiv:2504.16084), section 2. It takes one of several most frequent answers; here all
    earn 1, so that an undecided group does not prefer one.
    """

    NAME = "majority_vote"

    def reward(self, votes: Mapping[int, int], kind: int, size: int) -> float:
        return float(votes[kind] == max(votes.values()))


@dataclass(frozen=True, kw_only=True)
class Novelty(Consensus):
    """Reward `novelty`: the share of the others of the group whose answer is different or missing."""

    NAME = "novelty"

    def reward(self, votes: Mapping[int, int], kind: int, size: int) -> float:
        return (size - votes[kind]) / (size - 1)


def _plain(text: str) -> str | None:
    return " ".join(text.casefold().split()) or None


_ANSWERS: Mapping[str, tuple[Callable[[str], Any], Callable[[Any, Any], bool]]] = {
    "number": (final_number, Number.equals),
    "text": (_plain, lambda left, right: left == right),
    "math": (lambda text: mathematics.read(text) or None, mathematics.is_equal),
}
"""By name: the answer in a text, None without one; and whether two answers are the same."""
