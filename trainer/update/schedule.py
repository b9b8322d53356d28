"""Functions of the number of an update, which need no saved state: learning rate, and periodic actions."""

from __future__ import annotations

import math


def learning_rate(
    update: int, *, peak: float, schedule: str, warmup_updates: int, total_updates: int, final_fraction: float
) -> float:
    """Return the learning rate of update 0, 1, ... of `total_updates`.

    It rises linearly over `warmup_updates`, of which the first already moves, then stays (`constant`), or falls along a
    line (`linear`) or a half cosine (`cosine`) to `final_fraction x peak`, reached one update after the last. So with a
    fall to zero the last update still moves, as in lm-human-preferences and in transformers.

    Raises ValueError for another schedule.
    """
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    progress = min(1.0, (update - warmup_updates) / max(1, total_updates - warmup_updates))
    match schedule:
        case "linear":
            fraction = 1 - progress
        case "cosine":
            fraction = 0.5 * (1 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"schedule {schedule!r}; expected constant, linear or cosine")
    return peak * (final_fraction + (1 - final_fraction) * fraction)


def component_weight(update: int, *, first: float, last: float, schedule: str, total_updates: int) -> float:
    """Return the weight of a component of the loss in update 0, 1, ... of `total_updates`.

    It stays `first` (`constant`), or goes from there along a line (`linear`) or a half cosine (`cosine`) to `last`,
    reached one update after the last one. Raises ValueError for another schedule.
    """
    return last + (first - last) * learning_rate(
        update, peak=1.0, schedule=schedule, warmup_updates=0, total_updates=total_updates, final_fraction=0.0
    )


def is_due(every: int, *, before: int, after: int) -> bool:
    """True if the updates after `before`, which may be several or none, reached a multiple of `every`; never for 0."""
    return every > 0 and after // every > before // every
