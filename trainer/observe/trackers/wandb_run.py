"""A run in Weights & Biases: axis, groups, configuration, lineage.

The W&B step is the optimizer update, so `?_step=N` names an update. A resumed run keeps its id: repeated updates equal
the logged ones, and W&B keeps the first. A run that starts from a checkpoint of another one is a fork: a new id that
branches off at the checkpoint's update.

Errors propagate; `MetricsLog` tolerates them around every call.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.observe.trackers.image_table import ImageTable
from lockstep.trainer.observe.trackers.tracker import Histogram, Lineage, Medium, Page, Place, Table, Values
from lockstep.trainer.observe.trackers.view import short_path

log = logging.getLogger(__name__)

AXIS = "update"
SUMMARIES = {
    "reward/mean": "max",
    "eval/reward_mean": "max",
    "rollout/token_match_rate": "min",
    "rollout_correction/kl": "last",
    "rollout_correction/k3_kl": "max",
    "rollout_correction/ess": "min",
    "health/alarms": "max",
}
"""Summary of a metric in the table of runs; by default the last value."""
TEXTS = "lockstep.summary"
"""Group of entry points, each a function of the run's directory and settings that returns texts of the summary by
name. They are set after the first step, and at the end."""


class WandbRun:
    """W&B run, open from start to end of a training run. Every method may raise what W&B raises.

    W&B's service takes the calls in a process of its own, so they need no thread here.
    """

    label = "W&B"
    shows = (Table, Histogram, Page)

    def __init__(
        self, settings: LoggerConfig, *, directory: Path, run_config: Mapping[str, Any], lineage: Lineage
    ) -> None:
        """directory: of the run; W&B keeps its files in `wandb/` there."""
        os.environ.setdefault("WANDB_SILENT", "true")  # the console is for the rows of the run
        import wandb  # here: importing it reads its settings and starts a service

        self._directory, self._config = directory, run_config
        self._has_texts = False
        self.id = lineage.run_id if lineage.run_id and lineage.is_same_run else secrets.token_hex(4)
        arguments: dict[str, Any] = {
            "project": settings.project,
            "entity": settings.entity,
            "group": settings.group,
            "name": directory.name,
            "id": self.id,
            "mode": settings.wandb_mode,
            "dir": str(directory),
            "config": {**run_config, "forked_from": lineage.parent},
            # W&B's own metadata contains the command line with secrets; `run_config` has the provenance.
            "settings": wandb.Settings(console="off", x_disable_meta=True),
        }
        run = None
        if lineage.parent is not None:
            try:
                run = wandb.init(fork_from=lineage.parent, **arguments)
            except (wandb.Error, ValueError) as error:
                log.warning("W&B cannot fork %s (%s); logging as an independent run", lineage.parent, error)
        self._run = run or wandb.init(resume="allow", **arguments)
        self.url: str | None = self._run.url or None  # an offline run has none
        self._run.define_metric(AXIS, hidden=True)
        self._run.define_metric("*", step_metric=AXIS)
        for name, summary in SUMMARIES.items():
            self._run.define_metric(name, step_metric=AXIS, summary=summary)

    @property
    def place(self) -> Place | None:
        """Page of the run, or its files and their upload; None for a disabled run."""
        if self.url is not None:
            return Place(data=self.url, view="")
        if self._run.settings.mode != "offline":
            return None
        files = short_path(self._directory / "wandb")
        return Place(data=files, view=f"wandb sync {shlex.quote(files)}/offline-run-*")

    def log(self, update: int, values: Values) -> None:
        """Log numbers and media of an update. Several calls for one update are one row."""
        self._run.log({AXIS: update, **{name: _converted(value) for name, value in values.items()}}, step=update)
        if not self._has_texts:
            self._has_texts = True  # also if it fails, so that a fault is counted once
            self._set_texts()

    def finish(self, *, failed: bool) -> None:
        try:
            if self._has_texts:
                self._set_texts()
        finally:
            self._run.finish(exit_code=1 if failed else 0)

    def _set_texts(self) -> None:
        for function in entry_points(group=TEXTS):
            self._run.summary.update(function.load()(self._directory, self._config))


def _converted(value: float | Medium) -> Any:
    import wandb

    match value:
        case ImageTable():
            strips = [
                strip and wandb.Image(strip.image, caption=strip.caption, file_type="jpg") for strip in value.strips
            ]
            return wandb.Table(
                columns=[*value.columns, "images"],
                data=[[*row, strip] for row, strip in zip(value.rows, strips, strict=True)],
            )
        case Table():
            return wandb.Table(columns=list(value.columns), data=[list(row) for row in value.rows])
        case Histogram():
            return wandb.Histogram(np_histogram=(value.counts, value.edges))
        case Page():
            return wandb.Html(value.html, inject=False)
    return value
