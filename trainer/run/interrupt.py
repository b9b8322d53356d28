"""Ctrl-C and SIGTERM end a run after the update that is being made; a second signal ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

ECHO_S = 2.0
"""A signal so soon after the first is the first once more: a scheduler tells the whole process group, and then the
launcher tells its ranks what it was told itself."""


class Interrupt:
    """Set by a signal, read between updates. Only the main thread of a process can have one."""

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
            _say("finishing this update, then saving (Ctrl-C again: end at once)")
        elif now - self._first_s > ECHO_S:
            _say("ended at once; the last checkpoint is what is left")
            os._exit(130)


def _say(sentence: str) -> None:
    # Not by print: the signal may have come in the middle of one, and a buffer cannot be entered twice.
    os.write(sys.stderr.fileno(), f"\nlockstep: {sentence}\n".encode())
