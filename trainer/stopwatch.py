"""Wall-clock time of the stages of a step, as metrics `time/<stage>` [s].

A stage ends when the device has run the kernels that it launched. Else they would count as the next stage that waits.
The time of a stage inside of another counts only as its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


class Stopwatch:
    """Accumulator of the time of each stage."""

    def __init__(self, on_stage: Callable[[str], None] = lambda name: None) -> None:
        """on_stage: called with its name when a stage begins."""
        self._on_stage = on_stage
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        """Names of the stages that have begun; the clock counts for the last one."""
        self._since = self._start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._on_stage(name)
        self._count(waits=bool(self._open))
        self._open.append(name)
        has_failed = True
        try:
            with record_function(f"lockstep/{name}"):  # for `profile=true`; costs microseconds without it
                yield
            has_failed = False
        finally:
            self._count(waits=not has_failed)  # a device in error may never answer
            self._open.pop()

    def _count(self, *, waits: bool) -> None:
        """Count the time since the last change of stage for the one that was open. waits: for the device's kernels."""
        if waits and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] = self.seconds(self._open[-1]) + now - self._since
        self._since = now

    def seconds(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self._seconds.items()} | {
            "time/step": time.perf_counter() - self._start
        }
