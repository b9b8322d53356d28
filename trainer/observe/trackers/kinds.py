"""Trackers by the name of their setting."""

from __future__ import annotations

from lockstep.trainer.observe.trackers.mlflow_run import MlflowRun
from lockstep.trainer.observe.trackers.swanlab_run import SwanlabRun
from lockstep.trainer.observe.trackers.tensorboard_run import TensorBoardRun
from lockstep.trainer.observe.trackers.tracker import LocalTracker
from lockstep.trainer.observe.trackers.trackio_run import TrackioRun

KINDS: dict[str, type[LocalTracker]] = {
    "tensorboard": TensorBoardRun,
    "mlflow": MlflowRun,
    "trackio": TrackioRun,
    "swanlab": SwanlabRun,
}
