"""Trackers by the name of their setting."""

from __future__ import annotations

from trainer.observe.trackers.mlflow_run import MlflowRun
from trainer.observe.trackers.swanlab_run import SwanlabRun
from trainer.observe.trackers.tensorboard_run import TensorBoardRun
from trainer.observe.trackers.tracker import LocalTracker
from trainer.observe.trackers.trackio_run import TrackioRun

KINDS: dict[str, type[LocalTracker]] = {
    "tensorboard": TensorBoardRun,
    "mlflow": MlflowRun,
    "trackio": TrackioRun,
    "swanlab": SwanlabRun,
}
