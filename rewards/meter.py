"""Measures that reward functions take of themselves: costs, latencies, parts of a score.

A function calls `add` or `average`; the reward set that called it reports them as metrics. Columns are values for the
rollouts of the call, which are saved with them. Calls from elsewhere measure nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

METRIC = "metric/"
"""Beginning of the names of metrics that functions log, in contrast to measures of judges."""


@dataclass(slots=True)
class Meter:
    """Totals and means by name, and columns, of one call or of several."""

    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Totals, and numerators of the means."""
    counts: Counter[str] = field(default_factory=Counter)
    """Denominators of the means."""
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Values for each rollout of a call."""
    num_updates: int = 0
    """Optimizer updates of the run; 0: unknown."""

    def merge(self, sums: Mapping[str, float], counts: Mapping[str, int]) -> None:
        """Add the measures of another meter. Copies them first: a call that was given up may still measure."""
        for name, amount in dict(sums).items():
            self.sums[name] += amount
        self.counts.update(dict(counts))

    def read(self) -> dict[str, float]:
        """Return the totals and means by name."""
        return {name: total / self.counts.get(name, 1) for name, total in self.sums.items()}


_METER: ContextVar[Meter | None] = ContextVar("meter of reward functions", default=None)


@contextmanager
def measuring(meter: Meter) -> Iterator[Meter]:
    """Collect in `meter` what functions measure that are called, or whose tasks start, within the context."""
    token = _METER.set(meter)
    try:
        yield meter
    finally:
        _METER.reset(token)


def current() -> Meter:
    """Return the meter of the running call; outside of calls one that is not read."""
    return _METER.get() or Meter()


def add(name: str, amount: float) -> None:
    """Add an amount to a total."""
    current().sums[name] += amount


def average(name: str, value: float) -> None:
    """Add a value to a mean."""
    meter = current()
    meter.sums[name] += value
    meter.counts[name] += 1
