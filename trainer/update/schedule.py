"""Functions of the number of an update, which need no saved state: learning rate, and periodic actions."""

from __future__ import annotations

import math

from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig


def learning_rate(update: int, settings: OptimizerConfig, *, total_updates: int) -> float:
    """Return the learning rate of update 0, 1, ... of `total_updates`.

    It rises linearly over `warmup_updates`, of which the first already moves, then stays (`constant`), or falls along a
    line (`linear`) or a half cosine (`cosine`) to `final_lr_fraction x peak_lr`, reached one update after the last. So
    with a fall to zero the last update still moves, as in lm-human-preferences and in transformers.

    Raises ValueError for another schedule.
    """
    peak, warmup, final = settings.peak_lr, settings.warmup_updates, settings.final_lr_fraction
    if update < warmup:
        return peak * (update + 1) / warmup
    if settings.schedule == "constant":
        return peak
    return peak * (final + (1 - final) * _falling(settings.schedule, update - warmup, total_updates - warmup))


def component_weight(update: int, *, first: float, last: float, schedule: str, total_updates: int) -> float:
    """Return the weight of a component of the loss in update 0, 1, ... of `total_updates`.

    It stays `first` (`constant`), or goes from there along a line (`linear`) or a half cosine (`cosine`) to `last`,
    reached one update after the last one. Raises ValueError for another schedule.
    """
    return last + (first - last) * _falling(schedule, update, total_updates)


def _falling(schedule: str, update: int, total_updates: int) -> float:
    """Return 1 in update 0, falling to 0; always 1 for `constant`."""
    progress = min(1.0, update / max(1, total_updates))
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"schedule {schedule!r}; expected constant, linear or cosine")


def is_due(every: int, *, before: int, after: int) -> bool:
    """True if the updates after `before`, which may be several or none, reached a multiple of `every`; never for 0."""
    return every > 0 and after // every > before // every
