"""Guard of optimizer steps: skip non-finite losses and gradients, and on request spikes of the gradient norm.

    sums of the step, norm of the gradient ─► judge ─► make the step, or skip it (and dump its batch)

The verdict uses only numbers that are equal on all ranks, before the step. A skipped update changes nothing: no
parameter, no moment, no version. Several in a row end the run, because then the cause is not one bad batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig

MIN_NORMS = 8
"""Number of updates from which the median norm is used."""


@dataclass(frozen=True, slots=True)
class Judgment:
    """Verdict on one optimizer step."""

    reason: str | None = None
    """Defect of the step; None if it has none."""
    is_skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempted optimizer step."""

    update: int
    """Number of the attempted update; the weights are those of the one before."""
    number: int
    """0 if the step was made; else the number of skipped steps in a row, including this one."""
    rollouts: tuple[int, ...] = ()
    """Indices of the rollouts in the batch."""
    lr: float
    is_first: bool = True
    """True for the first optimizer step on its batch."""
    reason: str
    sums: Mapping[str, float]
    """Sums over the step of loss and metrics."""
    grad_norm: float

    @property
    def name(self) -> str:
        return f"update-{self.update:06d}" + (f"-try-{self.number}" if self.number else "")


class UpdateGuard:
    """Judge of optimizer steps, with the norms of the last ones."""

    def __init__(self, settings: OptimizerConfig) -> None:
        self._settings = settings
        self.norms: deque[float] = deque(maxlen=settings.spike_window)
        """Gradient norms of the last updates that were made."""
        self.skipped = 0
        """Number of skipped updates since the start of the run."""
        self.in_a_row = 0

    def judge(self, sums: Mapping[str, float], grad_norm: float) -> Judgment:
        """Judge a step before it is made, and count it.

        sums: over the whole step, by name. grad_norm: of the whole gradient before clipping.
        """
        judgment = self._judge(sums, grad_norm)
        if judgment.is_skipped:
            self.skipped += 1
            self.in_a_row += 1
        else:
            self.in_a_row = 0
            self.norms.append(grad_norm)
        return judgment

    def forget_norms(self) -> None:
        """Start the baseline of spikes again, for updates that train other parameters than the last ones."""
        self.norms.clear()

    def raise_after_repeated_skips(self, update: int, last: Judgment) -> None:
        """Raise `TrainingError` after `optimizer.max_skipped_updates` skipped updates in a row."""
        if self.in_a_row >= self._settings.max_skipped_updates:
            raise TrainingError(
                f"update {update} was skipped {self.in_a_row} times in a row, the last time because {last.reason}. "
                "The weights are those of the last good update; look at the batches in dumps/ of the run directory "
                "(lockstep replay), then set resume=auto with a lower optimizer.lr, or raise "
                "optimizer.max_skipped_updates"
            )

    def _judge(self, sums: Mapping[str, float], grad_norm: float) -> Judgment:
        broken = [name for name, value in sums.items() if not math.isfinite(value)]
        if broken:
            return Judgment(f"{', '.join(broken)} summed over the step is not finite", is_skipped=True)
        if not math.isfinite(grad_norm):
            return Judgment("the gradient norm is not finite", is_skipped=True)
        factor, usual = self._settings.spike_factor, median(self.norms or [math.nan])
        if self._settings.spike == "off" or len(self.norms) < MIN_NORMS or grad_norm <= factor * usual:
            return Judgment()
        return Judgment(
            f"the gradient norm is {grad_norm:.4g}, more than {factor:g} times the median of the last "
            f"{len(self.norms)} updates, {usual:.4g}",
            is_skipped=self._settings.spike == "skip",
        )
