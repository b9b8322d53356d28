"""Whether an optimizer step is made: not with a loss or gradient that is not finite, and if asked not on a spike.

    sums of the step, norm of the gradient ─► judge ─► make it, or skip it (and dump its batch)

The judgement follows from numbers that are the same on every rank, before the step. A skipped update changes nothing:
no parameter, no moment, no version. Several of them in a row end the run, because then it is not one bad batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from rollout.errors import TrainingError
from trainer.config.schema import OptimizerConfig

MIN_NORMS = 8
"""Updates before a median says what is usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """On one optimizer step."""

    reason: str | None
    """What is wrong with it, as a sentence; None: nothing."""
    is_skipped: bool


class UpdateGuard:
    """Judges optimizer steps, and remembers how the last ones were."""

    def __init__(self, settings: OptimizerConfig) -> None:
        self._settings = settings
        self.norms: deque[float] = deque(maxlen=settings.spike_window)
        """Of the last updates that were made."""
        self.skipped = 0
        """Since the beginning of the run."""
        self.in_a_row = 0

    def judge(self, sums: Mapping[str, float], grad_norm: float) -> Judgement:
        """Count and judge a step before it is made.

        sums: over the whole step, by name. grad_norm: of the whole gradient before clipping.
        """
        judgement = self._judge(sums, grad_norm)
        if judgement.is_skipped:
            self.skipped += 1
            self.in_a_row += 1
        else:
            self.in_a_row = 0
            self.norms.append(grad_norm)
        return judgement

    def end_if_hopeless(self, update: int, last: Judgement) -> None:
        """Raises `TrainingError` after so many skipped updates in a row that the next one is not worth a try."""
        if self.in_a_row >= self._settings.max_skipped_updates:
            raise TrainingError(
                f"update {update} was skipped {self.in_a_row} times in a row, the last time because {last.reason}. "
                "The weights are those of the last good update; look at the batches in dumps/ of the run directory "
                "(scripts/replay.py), then set resume=auto with a lower optimizer.lr, or raise "
                "optimizer.max_skipped_updates"
            )

    def _judge(self, sums: Mapping[str, float], grad_norm: float) -> Judgement:
        broken = [name for name, value in sums.items() if not math.isfinite(value)]
        if broken:
            return Judgement(reason=f"{', '.join(broken)} summed over the step is not finite", is_skipped=True)
        if not math.isfinite(grad_norm):
            return Judgement(reason="the gradient norm is not finite", is_skipped=True)
        if self._settings.spike != "off" and len(self.norms) >= MIN_NORMS:
            usual = median(self.norms)
            if grad_norm > self._settings.spike_factor * usual:
                reason = (
                    f"the gradient norm is {grad_norm:.4g}, more than {self._settings.spike_factor:g} times the median "
                    f"of the last {len(self.norms)} updates, {usual:.4g}"
                )
                return Judgement(reason=reason, is_skipped=self._settings.spike == "skip")
        return Judgement(reason=None, is_skipped=False)
