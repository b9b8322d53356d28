"""Ctrl-C and SIGTERM end a run after the update that is being made; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


class Interrupt:
    """Set by a signal, read between updates. Only the main thread of a process can have one."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A launcher that gets Ctrl-C sends SIGTERM after the terminal's SIGINT: that is not a second wish.
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            print("\nlockstep: ended at once; the last checkpoint is what is left", file=sys.stderr, flush=True)
            os._exit(130)
        if not self.requested:
            print(
                "\nlockstep: finishing this update, then saving (Ctrl-C again: end at once)",
                file=sys.stderr,
                flush=True,
            )
        self.requested = True
