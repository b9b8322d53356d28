"""Words of a command line: options of Hydra, names of settings files, and what is left."""

from __future__ import annotations

from collections.abc import Sequence

OPTIONS = {
    **dict.fromkeys(("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"), 0),
    **dict.fromkeys(("--shell-completion", "-sc"), 0),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"), 1),
    **dict.fromkeys(("--config-dir", "-cd", "--experimental-rerun", "--info", "-i"), 1),
}
"""Options of Hydra, with the number of their words."""
SUFFIXES = (".yaml", ".yml")
"""Ends of the names of settings files."""


def settings_files(words: Sequence[str]) -> list[str]:
    """Return the words of a command line that name settings files."""
    return [
        word
        for previous, word in zip(["", *words], words, strict=False)
        if word.lower().endswith(SUFFIXES)
        and "=" not in word
        and not word.startswith(("-", "~"))
        and not OPTIONS.get(previous)
    ]


def without_file(words: Sequence[str]) -> list[str]:
    """Return the words of a command line that are left for Hydra."""
    files = settings_files(words)
    return [word for word in words if word not in files]
