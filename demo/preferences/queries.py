"""Selection of queries from running text: whole sentences within a length limit.

Source: "The N Implementation Details of RLHF with PPO" (Hugging Face blog, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def select_query(tokens: Sequence[T], *, start: T | None, end: T | None, length: int) -> list[T] | None:
    """Return the part of a text behind the first `start` and up to the last `end` within `length` tokens.

    Args:
        tokens: ids or words.
        start: None: begin with the first token.
        end: None: cut at `length`.
        length: longest query [tokens].

    Returns:
        The query, or None, for a text to skip, if it lacks `start`, has no token behind it, or has no `end` in the
        window. (The historical code keeps a text whole whose only `start` is its last token, by accident.)
    """
    rest = list(tokens)
    if start is not None:
        if start not in rest:
            return None
        rest = rest[rest.index(start) + 1 :]
    window = rest[:length]
    if end is not None:
        if end not in window:
            return None
        window = window[: len(window) - window[::-1].index(end)]
    return window or None
