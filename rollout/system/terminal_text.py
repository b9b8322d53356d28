"""Escaping of untrusted text for the terminal."""

from __future__ import annotations


def terminal_safe(text: str) -> str:
    """Return the text on one line with control characters escaped, so it cannot move the cursor or set colors."""
    return "".join(
        "⏎" if character == "\n" else character if character.isprintable() else f"\\x{ord(character):02x}"
        for character in text
    )
