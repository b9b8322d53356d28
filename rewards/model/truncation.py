"""End of a fixed-length response, for the score only.

The policy samples past every stop token, and all of it is trained. The score sees the response up to and including the
first stop token at or after a minimum position; without one, a fixed low value replaces the score.

Source: Ziegler et al. 2019 (arXiv 1909.08593), section 3.1.1; "The N Implementation Details of RLHF with PPO" (Hugging
Face blog, 2023), "Rejection sampling".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Rule that the first of `token_ids` at index `after` or later ends the response."""

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
        """Return the number of tokens up to and including the stop token, or None without one."""
        return next((i + 1 for i in range(self.after, len(ids)) if ids[i] in self.token_ids), None)

    def truncate(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens up to and including the stop token; all of them without one."""
        return list(ids[: self.end(ids)])

    def accepts(self, ids: Sequence[int]) -> bool:
        """True if the response has a stop token that counts."""
        return self.end(ids) is not None
