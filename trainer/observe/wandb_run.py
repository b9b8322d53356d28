"""One run in Weights & Biases: its axis, groups, configuration, and its place among other runs.

The step of W&B is the optimizer update, so that `?_step=N` names an update. A run that is resumed goes on under its id:
updates that are made again are equal to those that are there, and W&B keeps the first ones. A run that starts from a
checkpoint of another one is a fork of it: a new id that branches off at the checkpoint's update.

Nothing here is tolerant of faults: `MetricsLog` is, around every call.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import LoggerConfig

log = logging.getLogger(__name__)

AXIS = "update"
GROUPS = (
    *("reward", "rollout", "rollout_correction", "policy", "value", "ppo", "objective", "optim", "sync"),
    *("perf", "time", "eval", "environment", "data", "health"),
)
"""Prefixes of metrics; W&B draws a section for each."""
SUMMARIES = {
    "reward/mean": "max",
    "eval/reward_mean": "max",
    "rollout/token_match_rate": "min",
    "rollout_correction/kl": "last",
    "rollout_correction/k3_kl": "max",
    "rollout_correction/ess": "min",
    "health/alarms": "max",
}
"""What the table of runs shows of a metric; of others, the last value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a run comes from, if it was started from a checkpoint."""

    run_id: str | None = None
    """Of the run that saved the checkpoint."""
    update: int = 0
    """Of the checkpoint."""
    is_same_run: bool = True
    """Whether it goes on in its own directory; else it is a fork."""

    @property
    def parent(self) -> str | None:
        """The moment at which a fork branches off, in W&B's form; None for other runs."""
        return None if self.run_id is None or self.is_same_run else f"{self.run_id}?_step={self.update}"


class WandbRun:
    """Open from the start to the end of a run. Every method may raise whatever W&B raises."""

    def __init__(
        self, settings: LoggerConfig, *, directory: Path, run_config: Mapping[str, Any], lineage: Lineage
    ) -> None:
        """directory: of the run; W&B keeps its files in `wandb/` there."""
        os.environ.setdefault("WANDB_SILENT", "true")  # the console belongs to the rows of the run
        import wandb  # here: it reads its settings and starts a service

        self.id = lineage.run_id if lineage.run_id and lineage.is_same_run else secrets.token_hex(4)
        arguments: dict[str, Any] = {
            "project": settings.project,
            "entity": settings.entity,
            "group": settings.group,
            "name": directory.name,
            "id": self.id,
            "mode": settings.wandb,
            "dir": str(directory),
            "config": {**run_config, "forked_from": lineage.parent},
            # W&B's own facts about the process hold its command line, secrets and all; `run_config` has the provenance.
            "settings": wandb.Settings(console="off", x_disable_meta=True),
        }
        if lineage.parent is None:
            self._run = wandb.init(resume="allow", **arguments)
        else:
            try:
                self._run = wandb.init(fork_from=lineage.parent, **arguments)
            except (wandb.Error, ValueError) as error:
                log.warning("W&B cannot fork %s (%s); this run stands there by itself", lineage.parent, error)
                self._run = wandb.init(resume="allow", **arguments)
        self.url: str | None = self._run.url if settings.wandb == "online" else None
        self._run.define_metric(AXIS, hidden=True)
        for group in GROUPS:
            self._run.define_metric(f"{group}/*", step_metric=AXIS)
        for name, summary in SUMMARIES.items():
            self._run.define_metric(name, step_metric=AXIS, summary=summary)

    def log(self, update: int, values: Mapping[str, Any]) -> None:
        """Numbers and media of an update. Several calls for one update are one row."""
        self._run.log({AXIS: update, **values}, step=update)

    def finish(self) -> None:
        """Failed, if it is called while an exception is on its way."""
        self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)
