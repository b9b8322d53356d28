"""Traces of some steps by torch's profiler, on every rank (`profile=true`).

    profile/rank-0.json.gz   trace, for https://ui.perfetto.dev or chrome://tracing
    profile/rank-0.txt       operators by self time, the most expensive first

The stages of a step (rollout, score, update, sync) appear in the trace as `lockstep/<stage>`. Not covered: the engine,
which computes in its own processes; the trace shows the trainer waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TABLE_ROWS = 25
SHOWN_ROWS = 8
STAGE = "lockstep/"
"""Prefix of the names of stages (trainer/stopwatch.py)."""
WARM_UP_STEPS = 1
"""Steps not traced: the first one compiles, allocates and fills caches."""


class StepProfiler:
    """Tracer of the steps after the first one. Costs nothing before and after."""

    def __init__(self, directory: Path, *, rank: int, steps: int, say: Callable[[str], None]) -> None:
        """directory: created on writing. steps: number of steps to trace; 0: none. say: prints the result."""
        self._directory = directory
        self._rank = rank
        self._steps = steps
        self._say = say
        self._seen = 0
        self._profile: profile | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one step of training."""
        self._seen += 1
        if self._steps and self._seen == 1 + WARM_UP_STEPS:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        yield
        if self._profile is not None and self._seen == self._steps + WARM_UP_STEPS:
            self.close()

    def close(self) -> None:
        """Write an open trace. A run that ends early leaves the steps traced so far."""
        profiler, self._profile = self._profile, None
        if profiler is None:
            return
        profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        trace = self._directory / f"rank-{self._rank}.json.gz"
        profiler.export_chrome_trace(str(trace))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        averages = profiler.key_averages()
        table = averages.table(sort_by=order, row_limit=TABLE_ROWS, max_name_column_width=60)
        (self._directory / f"rank-{self._rank}.txt").write_text(table + "\n")
        self._say("\n".join([f"profile        {trace}", *_top(averages)]))


def _top(averages: Iterable[Any]) -> Iterator[str]:
    """Yield a line for each of the most expensive operators, without stages."""
    operators = [
        (e.self_device_time_total or e.self_cpu_time_total, e) for e in averages if not e.key.startswith(STAGE)
    ]
    total = sum(time for time, _ in operators)
    for time, event in sorted(operators, key=lambda item: -item[0])[:SHOWN_ROWS]:
        yield f"    {event.key[:48]:<48} {time / 1000:9.1f} ms {time / total:6.1%} {event.count:8,} calls"
