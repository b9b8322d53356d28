"""Measures that reward functions take of themselves: costs, latencies, parts of a score.

A function in this process calls `add` or `average`; the reward set that called it reports them as metrics. Calls from
elsewhere measure nothing, and functions in worker processes cannot measure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class Meter:
    """Totals and means by name."""

    totals: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Numerators of the means."""
    counts: Counter[str] = field(default_factory=Counter)
    """Denominators of the means."""

    def merge(self, other: Meter) -> None:
        """Add the measures of another meter to these."""
        for name, total in other.totals.items():
            self.totals[name] += total
        for name, total in other.sums.items():
            self.sums[name] += total
        self.counts.update(other.counts)

    def read(self) -> dict[str, float]:
        """Return the totals and means by name."""
        return dict(self.totals) | {name: self.sums[name] / count for name, count in self.counts.items()}


_METER: ContextVar[Meter | None] = ContextVar("meter of reward functions", default=None)


@contextmanager
def measuring(meter: Meter) -> Iterator[None]:
    """Collect in `meter` what functions measure that are called, or whose tasks start, within the context."""
    token = _METER.set(meter)
    try:
        yield
    finally:
        _METER.reset(token)


def add(name: str, amount: float) -> None:
    """Add an amount to a total."""
    if (meter := _METER.get()) is not None:
        meter.totals[name] += amount


def average(name: str, value: float) -> None:
    """Add a value to a mean."""
    if (meter := _METER.get()) is not None:
        meter.sums[name] += value
        meter.counts[name] += 1
