"""Metrics of a run: `metrics.jsonl`, written and read back, and trackers such as W&B if enabled. Rank 0 only.

The step axis is the optimizer update. A failing logger (network, quota, full disk) never ends a run: each one warns
once, and all failures are counted in `health/logger_errors`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.system.plain_files import plain_lines, write_whole
from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.observe.trackers.tracker import Lineage, Medium, Session, Tracker

if TYPE_CHECKING:
    from lockstep.trainer.observe.trackers.wandb_run import WandbRun

log = logging.getLogger(__name__)

MAX_NUMBER = 1e100
"""Largest number that counts as finite: far beyond float32, and its squares and sums do not overflow."""
MAX_UPDATE = 2**53
BATCH = "rollout/batch"
"""Metric with the number of rollout batches so far."""
RUN_SECONDS = "time/run"
"""Metric with the age of the process that wrote the line [s]."""


class MetricsLog:
    """Writer of one JSON object per step, mirrored to the trackers."""

    def __init__(
        self, path: Path, config: LoggerConfig, *, run_config: Mapping[str, Any], lineage: Lineage | None = None
    ) -> None:
        """path: of the file. run_config: configuration for trackers. lineage: None for a new run."""
        self._path = path
        self._errors = 0
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        """Guards the two above: trackers in threads fail, too."""
        self._trackers: dict[str, Tracker] = {}
        self._wandb: WandbRun | None = None
        lineage = lineage or Lineage()
        self.wandb_id = lineage.run_id if lineage.is_same_run else None
        """Id for checkpoints, kept even if W&B cannot be reached now."""
        if config.wandb != "off":
            from lockstep.trainer.observe.trackers.wandb_run import WandbRun  # other runs do not load it

            with self.tolerating(WandbRun.label):
                self._wandb = WandbRun(config, directory=path.parent, run_config=run_config, lineage=lineage)
                self._trackers[WandbRun.label] = self._wandb
                self.wandb_id = self._wandb.id
        session = Session(
            settings=config, directory=path.parent, run_config=run_config, resumed_at=lineage.continued_update
        )
        self._places: dict[str, str] = {}
        if config.trackers:
            from lockstep.trainer.observe.trackers.background import KINDS, Background  # other runs do not load it

            for kind in map(KINDS.__getitem__, config.trackers):
                self._trackers[kind.label] = Background(kind, session, self.tolerating)
                self._places[kind.label] = str(kind.place(config, path.parent))

    @property
    def url(self) -> str | None:
        """Page of the run on W&B, if it is online."""
        return None if self._wandb is None else self._wandb.url

    @property
    def places(self) -> dict[str, str]:
        """Location of each tracker's data, with the command that shows them, by the tracker's name."""
        wandb = self._wandb
        return {**({wandb.label: str(wandb.place)} if wandb is not None and wandb.place else {}), **self._places}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step; the file has the time, too. Non-finite numbers become null, because JSON has none."""
        if self._errors:
            metrics = {**metrics, "health/logger_errors": float(self._errors)}
        values = {**metrics, RUN_SECONDS: run_seconds(), "time/unix": time.time()}
        line = {"step": step, **{k: (v if math.isfinite(v) else None) for k, v in sorted(values.items())}}
        with self.tolerating(str(self._path)), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for label, tracker in self._trackers.items():
            with self.tolerating(label):
                tracker.log(step, metrics)

    def media(self, step: int, make: Callable[[], Mapping[str, Medium]]) -> None:
        """Log tables, pages and histograms to the trackers that show them; `make` runs only if a tracker is on."""
        if not self._trackers:
            return
        media: Mapping[str, Medium] = {}
        with self.tolerating("making tables, pages and histograms"):
            media = make()
        for label, tracker in self._trackers.items():
            if own_media := {name: medium for name, medium in media.items() if isinstance(medium, tracker.shows)}:
                with self.tolerating(label):
                    tracker.log(step, own_media)

    def truncate_after(self, *, update: int, batch: int) -> None:
        """Drop the lines after a resumed batch. A batch that trained nothing has the update of the one before it, so
        lines are compared by batch, and by update only if an older version wrote them without it."""
        if not self._path.exists():
            return
        lines = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                values = json.loads(line)
                if values[BATCH] <= batch if BATCH in values else values["step"] <= update:
                    lines.append(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # torn by a kill or a full disk; a damaged log must not stop a resume
        write_whole(self._path, "".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        """Close the trackers, with the run as failed if an exception is propagating."""
        has_failed = sys.exc_info()[0] is not None
        for label, tracker in self._trackers.items():
            with self.tolerating(label):
                tracker.finish(failed=has_failed)

    @contextmanager
    def tolerating(self, what: str) -> Iterator[None]:
        """Suppress errors of the block: warn at the first of each `what`, and count all."""
        try:
            yield
        except Exception as error:  # one of the three places that tolerate faults, each with a counter
            with self._lock:
                self._errors += 1
                is_first = what not in self._warned
                self._warned.add(what)
            if is_first:
                log.warning(
                    "%s failed (%s: %s); the run goes on, further failures are counted in health/logger_errors",
                    what,
                    type(error).__name__,
                    error,
                )


_before_run = 0.0


def begin_run() -> None:
    """Let the time of a run begin now, in a program that did other things before."""
    global _before_run
    _before_run = _process_seconds()


def run_seconds() -> float:
    """Return the age of the run in this process [s]: that of the process, which a command starts for it."""
    return _process_seconds() - _before_run


def _process_seconds() -> float:
    start_s = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_s


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all lines of metrics.jsonl as `metrics_lines` does."""
    return list(metrics_lines(path))


def metrics_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl: one object per step; `step` is the update, and non-finite metrics are None.

    Ignores a torn last line, which a killed or active run may leave. Raises `ConfigError` without the file, `DataError`
    with the line number if an earlier line is damaged.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; name a run directory, for example runs/latest")
    damage: DataError | None = None
    try:
        for number, text in enumerate(plain_lines(path), start=1):
            if damage is not None:
                raise damage
            try:
                line = checked_line(json.loads(text))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                damage = DataError(
                    f"{path}:{number} is not a line of metrics: {error}; delete that line to see the others"
                )
            else:
                yield line
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def checked_line(values: Any) -> dict[str, float | None]:
    """Return the metrics of a line, non-finite ones as None. Raises ValueError, KeyError or TypeError."""
    if not isinstance(values, dict):
        raise TypeError(f"expected an object, found {type(values).__name__}")
    for name, value in values.items():
        if value is not None and type(value) not in (int, float):
            raise TypeError(f"{name} is {value!r:.80}, expected a number")
        if type(value) is int and abs(value) > sys.float_info.max:
            raise ValueError(f"{name} is an integer beyond floats")
    step = values["step"]
    if step is None or not 0 <= step <= MAX_UPDATE or step != int(step):
        raise ValueError(f"step is {step!r:.80}, expected the number of an update")
    return {name: None if value is None or not abs(value) <= MAX_NUMBER else value for name, value in values.items()}
