"""Text of models and data on a terminal: shown, never obeyed."""

from __future__ import annotations


def visible(text: str) -> str:
    """The text in one line, with control characters spelled out: it cannot move the cursor or colour the console."""
    return "".join(
        "⏎" if character == "\n" else character if character.isprintable() else f"\\x{ord(character):02x}"
        for character in text
    )
