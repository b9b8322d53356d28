"""Progress of long work as lines, for log files and pipes: stage, time in it, rollouts or requests so far.

A thread prints them, because a stage such as the update keeps the main thread busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from lockstep.rollout.records import Rollout

EVERY_S = 30.0
"""Time between two lines of one piece of work [s]; shorter work prints none."""


class ProgressLines:
    """Printer of lines from `with` until its end. Its methods may be called from any thread."""

    def __init__(self, say: Callable[[str], None] | None, *, work: str, total: int) -> None:
        """say: None to print nothing. work: name at the start of a line. total: expected number of rollouts."""
        self._unit = "rollouts"
        self._say = say
        self._work = work
        self._total = total
        self._stage, self._since = "", time.monotonic()
        self._count = self._tokens = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def stage(self, name: str) -> None:
        """Record that a stage begins now."""
        self._stage, self._since = name, time.monotonic()

    def requests(self, stage: str, total: int) -> None:
        """Record that a stage of this many requests begins now; further counts are of requests."""
        self._unit, self._total, self._count, self._tokens = "requests", total, 0, 0
        self.stage(stage)

    def rollout(self, rollout: Rollout) -> None:
        """Record that a rollout has arrived."""
        self.answer(rollout.num_sampled)

    def answer(self, num_sampled: int) -> None:
        """Record that a request was answered with this many sampled tokens."""
        self._count += 1
        self._tokens += num_sampled

    def __enter__(self) -> ProgressLines:
        if self._say is not None:
            self._thread = threading.Thread(
                target=self._print, args=(self._say,), name="lockstep-progress", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _print(self, say: Callable[[str], None]) -> None:
        while not self._ended.wait(EVERY_S):
            stage = f"{self._stage} for " if self._stage else ""
            total = max(self._total, self._count)  # dynamic sampling may request more than one batch
            counts = f"{self._count:,} of {total:,} {self._unit}, {self._tokens:,} tokens sampled"
            say(f"... {self._work}: {stage}{time.monotonic() - self._since:.0f} s; {counts}")
