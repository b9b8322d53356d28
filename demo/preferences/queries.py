"""Choosing queries from running text (P3): whole sentences, as long as fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def select_query(tokens: Sequence[T], *, start: T | None, end: T | None, length: int) -> list[T] | None:
    """The part of a text that begins behind the first `start` and ends with the last `end` within `length` tokens.

    Args:
        tokens: ids or words.
        start: None: from the first token on.
        end: None: cut at `length`, wherever that is.
        length: of the window, and so the longest query [tokens].

    Returns:
        The query, or None if the text lacks `start`, has nothing behind it, or has no `end` in the window: it is
        skipped. (The historical code keeps a text whose only `start` is its last token whole; that is an accident.)
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
