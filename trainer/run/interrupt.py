"""Ctrl-C and SIGTERM end a run after the current update; a second signal exits at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

ECHO_S = 2.0
"""Window in which a second signal counts as a repetition: a scheduler signals the whole process group, and the launcher
then passes its own signal on to the ranks [s]."""


class Interrupt:
    """Flag set by a signal and read between updates. Create it in the main thread."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    @property
    def requested(self) -> bool:
        return self._first_s is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
            _say("finishing this update, then saving (Ctrl-C again: exit at once)")
        elif now - self._first_s > ECHO_S:
            _say("exited at once; set resume=auto to continue from the last checkpoint")
            os._exit(130)


def _say(message: str) -> None:
    # Not with print: the signal may have interrupted one, and its buffer is not reentrant.
    os.write(sys.stderr.fileno(), f"\nlockstep: {message}\n".encode())
