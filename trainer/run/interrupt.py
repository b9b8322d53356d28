"""Ctrl-C, SIGTERM and `stop` end a run after the current update; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

TERMINATED = 143
"""Exit status of a run that SIGTERM stopped. Schedulers send it, and take 0 for a complete run that they need not start
again. A user who presses Ctrl-C gets 0."""
ECHO_S = 2.0
"""Window in which a second signal counts as a repetition: a scheduler signals the whole process group, and the launcher
then passes its own signal on to the ranks [s]."""


class Interrupt:
    """Flag set by a signal and read between updates. Other threads than the main one get no signals."""

    def __init__(self, *, ends_process: bool = True) -> None:
        """ends_process: False in a program that goes on after the run, where a second signal is a KeyboardInterrupt."""
        self._ends_process = ends_process
        self._first_s: float | None = None
        self._first_number = 0
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._handle)

    @property
    def requested(self) -> bool:
        return self._first_s is not None

    @property
    def terminated(self) -> bool:
        """True if the first signal was SIGTERM."""
        return self._first_number == signal.SIGTERM

    def close(self) -> None:
        """Ignore signals from here on: everything is saved, and a launcher signals the ranks that it finds left."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_s is None:
            self._first_s, self._first_number = now, number
            _say("finishing this update, then saving (Ctrl-C again: exit at once)")
        elif not self._ends_process:
            raise KeyboardInterrupt
        elif now - self._first_s > ECHO_S:
            _say("exited at once; set resume=auto to continue from the last checkpoint")
            os._exit(130)


def _say(message: str) -> None:
    # Not with print: the signal may have interrupted one, and its buffer is not reentrant.
    os.write(2, f"\nlockstep: {message}\n".encode())
