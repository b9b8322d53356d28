"""The weights of a teacher that is a moving average of the policy, kept in an engine of its own.

update ─► average on every rank (trainer/distributed/weight_average.py) ─► weight sync ─► teacher's engine
"""

from __future__ import annotations

import math

from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.distributed.weight_average import WeightAverage


class AveragedTeacher:
    """The average, and its weight sync."""

    def __init__(self, average: WeightAverage, sync: WeightSync) -> None:
        """sync: of the trained module to the teacher's engine."""
        self.average = average
        self._sync = sync
        self.measured: dict[str, float] = {}
        """`teacher/canary_abs_diff` of the last sync with a canary."""

    def advance(self) -> None:
        """Move the average towards the policy, once per step that changed it."""
        self.average.advance()

    def push(self, version: int) -> None:
        """Send the average to the teacher's engine and verify it there; a collective.

        version: of the policy that it averages last. Raises `SyncError` on all ranks.
        """
        with self.average.installed():
            report = self._sync.push(version)
        if not math.isnan(report.canary_abs_diff):
            self.measured["teacher/canary_abs_diff"] = report.canary_abs_diff
