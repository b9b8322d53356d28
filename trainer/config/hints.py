"""The word that somebody may have meant."""

from __future__ import annotations

import difflib


def closest(word: str, words: list[str] | tuple[str, ...]) -> str:
    """' (did you mean x?)' or nothing."""
    match = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
