"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib


def closest(word: str, words: list[str] | tuple[str, ...]) -> str:
    """Return " (did you mean 'x'?)" for a similar word, else an empty text."""
    match = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
