"""Words of a command line: options of Hydra, names of settings files, and what is left.

A program that calls `lockstep.train` has words of its own; those of the call take their place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

OPTIONS = {
    **dict.fromkeys(("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"), 0),
    **dict.fromkeys(("--shell-completion", "-sc"), 0),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"), 1),
    **dict.fromkeys(("--config-dir", "-cd", "--experimental-rerun", "--info", "-i"), 1),
}
"""Options of Hydra, with the number of their words."""
SUFFIXES = (".yaml", ".yml")
"""Ends of the names of settings files."""
_call: list[str] | None = None
"""Program and words of the call that runs in this process; None: those of its command line count."""


def command() -> list[str]:
    """Return the program and the words of this process."""
    return sys.argv if _call is None else _call


def is_call() -> bool:
    """Return True if a program called `lockstep.train`, so that no command line repeats the run."""
    return _call is not None


def typed_words() -> list[str]:
    """Return the words of this process."""
    return command()[1:]


@contextmanager
def called_with(words: Sequence[str]) -> Iterator[None]:
    """Let words take the place of the command line in the block. Raises `RuntimeError` inside of another such block."""
    global _call
    if _call is not None:
        raise RuntimeError("a run is being trained in this process; wait for its end, or call lockstep.stop()")
    _call = ["lockstep.train", *words]
    try:
        yield
    finally:
        _call = None


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
