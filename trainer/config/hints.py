"""Suggestions for misspelled names, and for names of other trainers (`groups/other_names.py`)."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN_CHARS = 80
"""Longest value in an error."""


def brief(value: object) -> str:
    """Return a value as a text, without the end of a long one."""
    text = str(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def closest(word: str, words: Sequence[str]) -> str:
    """Return " (did you mean 'x'?)" for a similar word or another trainer's name for it, else an empty text."""
    from lockstep.trainer.config.groups.other_names import closest_name

    name = closest_name(word, words)
    return f" (did you mean {name!r}?)" if name else ""
