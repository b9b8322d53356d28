"""Wall-clock time of the stages of a step, as metrics `time/<stage>` [s].

A stage ends when the device has run the kernels that it launched. Else they would count as the next stage that waits.
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
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._on_stage(name)
        started = time.perf_counter()
        try:
            with record_function(f"lockstep/{name}"):  # for `profile=true`; costs microseconds without it
                yield
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self._seconds.items()} | {
            "time/step": time.perf_counter() - self._started
        }
