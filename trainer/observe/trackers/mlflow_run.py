"""A run in MLflow: on the server of MLFLOW_TRACKING_URI, or in a database in the run directory.

Follows MLflow's own MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. Its client has the run's id in every call, so
MLflow's global active run stays the user's.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.config.redaction import redact_text
from lockstep.trainer.observe.trackers.tracker import (
    LocalTracker,
    Page,
    Place,
    Session,
    Table,
    Values,
    media,
    numbers,
    tracker_directory,
)
from lockstep.trainer.observe.trackers.view import short_path

FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in names; none of Lockstep's own metrics has one."""
MAX_PARAM = 6000
"""Maximum length of a parameter; the whole configuration is the artifact config.json."""
PARAMS_PER_CALL = 100


class MlflowRun(LocalTracker):
    label = "MLflow"
    shows = (Table, Page)

    @staticmethod
    def place(settings: LoggerConfig, directory: Path) -> Place:
        if uri := os.environ.get("MLFLOW_TRACKING_URI"):
            uri = redact_text(uri)
            is_server = uri.startswith(("http://", "https://", "databricks"))
            return Place(
                data=uri, store=uri, view="" if is_server else shlex.join(["mlflow", "ui", "--backend-store-uri", uri])
            )
        data = tracker_directory(directory, "mlflow")
        return Place(
            data=short_path(data),
            view=shlex.join(["mlflow", "ui", "--backend-store-uri", f"sqlite:///{short_path(data)}/mlflow.db"]),
        )

    def __init__(self, session: Session) -> None:
        from mlflow import MlflowClient  # type: ignore[import-not-found]  # here: an optional package, seconds to import

        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            data = tracker_directory(session.directory, "mlflow").resolve()
            data.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{data}/mlflow.db", data.as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        if session.id is not None:
            self.id = session.id
            self._client.set_terminated(self.id, "RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", session.settings.project)
        record = self._client.get_experiment_by_name(experiment)
        number = record.experiment_id if record else self._client.create_experiment(experiment, artifacts)
        tags = {} if session.settings.group is None else {"group": session.settings.group}
        self.id = self._client.create_run(number, run_name=session.name, tags=tags).info.run_id
        self._configuration(session.run_config)

    def _configuration(self, run_config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param  # type: ignore[import-not-found]

        params = [Param(_allowed(name), str(value)) for name, value in _leaves(run_config)]
        params = [param for param in params if len(param.value) <= MAX_PARAM]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self.id, params=params[start : start + PARAMS_PER_CALL])
        self._client.log_dict(self.id, dict(run_config), "config.json")

    def log(self, update: int, values: Values) -> None:
        from mlflow.entities import Metric  # type: ignore[import-not-found]

        now = int(time.time() * 1000)
        metrics = [Metric(_allowed(name), number, now, update) for name, number in numbers(values).items()]
        if metrics:
            self._client.log_batch(self.id, metrics=metrics)
        for name, medium in media(values).items():
            file = f"{_allowed(name)}/update-{update:06d}"
            if isinstance(medium, Page):
                self._client.log_text(self.id, medium.html, f"{file}.html")
            elif isinstance(medium, Table):
                rows = {"columns": list(medium.columns), "data": [list(row) for row in medium.rows]}
                self._client.log_dict(self.id, rows, f"{file}.json")

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def _allowed(name: str) -> str:
    return FORBIDDEN.sub("_", name)


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
