"""Safe text: text of models, servers, files and exceptions, for errors, logs, pages and the terminal.

Safe text can be encoded, has no control characters, and is limited in length. Errors of Lockstep, rollouts and reward
verdicts clean their text when they are made, so no later reader has to.
"""

from __future__ import annotations

import re
import sys

MAX_CHARS = 20_000
"""Maximum length of the text of an error: enough for a traceback."""


def safe_text(text: str, limit: int = MAX_CHARS) -> str:
    """Return the text with surrogates and control characters spelled out; line breaks and tabs stay.

    A text longer than `limit` loses its middle.
    """
    if len(text) > limit:
        text = _shortened(text, limit)
    if not text.isprintable():
        text = "".join(character if character in "\n\t" else _printable(character) for character in text)
    return _shortened(text, limit)


def terminal_safe(text: str) -> str:
    """Return the text on one line with control characters spelled out, so it cannot move the cursor or set colors."""
    return "".join("⏎" if character == "\n" else _printable(character) for character in text)


def error_text(error: BaseException) -> str:
    """Return the message of an exception as safe text. Never raises, though `__str__` of a user's class may."""
    try:
        return safe_text(str(error))
    except Exception:
        return "(its message cannot be printed)"


def without_addresses(text: str) -> str:
    """Return the text of an error without objects and their addresses, which differ between processes."""
    return re.sub(r" <[^<>]* object at 0x[0-9a-f]+>", "", text)


def print_error(error: object) -> None:
    """Print an error to stderr, each of its lines after `lockstep: `."""
    for line in safe_text(str(error)).splitlines():
        print(f"lockstep: {line}", file=sys.stderr)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    gap = "\n[... shortened ...]\n"
    half = (limit - len(gap)) // 2
    return text[:half] + gap + text[-half:]
