"""Where a fixed-length response is taken to end, for the eyes of the score only (P5).

The response is sampled past every stop token and all of it is trained. The score sees it up to and with the first stop
token at or after a minimum position; without one, the score is replaced by a fixed low value.

Source: Ziegler et al. 2019, section 3.1.1; seed 003, "Rejection sampling".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """The first of `token_ids` at index `after` or later ends the response."""

    token_ids: frozenset[int]
    after: int = 0
    """First index (from 0) at which a stop token counts."""

    def __post_init__(self) -> None:
        if not self.token_ids or self.after < 0:
            raise ValueError(
                f"stop rule: found {len(self.token_ids)} stop tokens and after={self.after}; "
                "expected at least one stop token and an index from 0"
            )

    def end(self, ids: Sequence[int]) -> int | None:
        """Tokens up to and with the stop token, or None if there is none."""
        return next((i + 1 for i in range(self.after, len(ids)) if ids[i] in self.token_ids), None)

    def truncate(self, ids: Sequence[int]) -> list[int]:
        """The response as the score sees it; all of it if there is no stop token."""
        return list(ids[: self.end(ids)])

    def accepts(self, ids: Sequence[int]) -> bool:
        return self.end(ids) is not None


def replace_rejected(scores: Sequence[float], is_accepted: Sequence[bool], *, rejected: float) -> list[float]:
    """Scores with those of rejected responses *replaced*, whatever they were: a penalty that is added would let a high
    score buy itself out.

    Raises ValueError for lengths that differ.
    """
    return [score if ok else rejected for score, ok in zip(scores, is_accepted, strict=True)]
