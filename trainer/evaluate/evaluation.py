"""Record of an evaluation. A run that does not evaluate loads this module alone of trainer/evaluate/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.rollout.records import Rollout

if TYPE_CHECKING:
    from lockstep.trainer.evaluate.results import SetResult
    from lockstep.trainer.evaluate.tasks import TaskRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of one model on all held-out data."""

    results: tuple[SetResult, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    tasks: TaskRun | None = None
    """Results of the tasks of lm-eval, if there are any."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Metrics of held-out demonstrations, where these are evaluated in place of rollouts."""

    @property
    def metrics(self) -> dict[str, float]:
        values = {name: value for result in self.results for name, value in result.metrics().items()} | dict(
            self.losses
        )
        if self.tasks is not None:
            values |= {name: value for metric in self.tasks.metrics for name, value in metric.metrics().items()}
            values |= self.tasks.facts()
        return values
