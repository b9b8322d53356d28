"""Metrics of a run: `metrics.jsonl`, written and read back, and Weights & Biases if enabled. Rank 0 only.

The step axis is the optimizer update. A failing logger (network, quota, full disk) never ends a run: it warns once and
is counted in `health/logger_errors`.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError, DataError
from rollout.system.plain_files import plain_lines
from trainer.config.schema import LoggerConfig
from trainer.observe.wandb_run import Lineage, WandbRun

log = logging.getLogger(__name__)

MAX_NUMBER = 1e100
"""Largest number that counts as finite: far beyond float32, and its squares and sums do not overflow."""
MAX_UPDATE = 2**53
BATCH = "rollout/batch"
"""Metric with the number of rollout batches so far."""


class MetricsLog:
    """Writer of one JSON object per step, mirrored to W&B."""

    def __init__(
        self, path: Path, config: LoggerConfig, *, run_config: Mapping[str, Any], lineage: Lineage | None = None
    ) -> None:
        """path: of the file. run_config: configuration for W&B. lineage: None for a new run."""
        self._path = path
        self._errors = 0
        self._wandb: WandbRun | None = None
        lineage = lineage or Lineage()
        self.wandb_id = lineage.run_id if lineage.is_same_run else None
        """Id for checkpoints, kept even if W&B cannot be reached now."""
        if config.wandb != "off":
            with self.tolerating("W&B"):
                self._wandb = WandbRun(config, directory=path.parent, run_config=run_config, lineage=lineage)
                self.wandb_id = self._wandb.id

    @property
    def url(self) -> str | None:
        """Page of the run on W&B, if it is online."""
        return None if self._wandb is None else self._wandb.url

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step. Non-finite numbers become null, because JSON has none."""
        if self._errors:
            metrics = {**metrics, "health/logger_errors": float(self._errors)}
        line = {"step": step, **{k: (v if math.isfinite(v) else None) for k, v in sorted(metrics.items())}}
        with self.tolerating(str(self._path)), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._wandb is not None:
            with self.tolerating("W&B"):
                self._wandb.log(step, metrics)

    def media(self, step: int, make: Callable[[], Mapping[str, Any]]) -> None:
        """Log tables, pages and histograms to W&B; `make` runs only if W&B is on."""
        if self._wandb is not None:
            with self.tolerating("W&B"):
                self._wandb.log(step, make())

    def truncate_after(self, *, update: int, batch: int) -> None:
        """Drop the lines after a resumed batch. A batch that trained nothing has the update of the one before it, so
        lines are compared by batch, and by update only if an older version wrote them without it."""
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                values = json.loads(line)
                if values[BATCH] <= batch if BATCH in values else values["step"] <= update:
                    kept.append(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # torn by a kill or a full disk; a damaged log must not stop a resume
        temporary = self._path.with_suffix(".partial")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(self._path)  # atomic: a kill leaves the old file or the new one

    def close(self) -> None:
        if self._wandb is not None:
            with self.tolerating("W&B"):
                self._wandb.finish()

    @contextmanager
    def tolerating(self, what: str) -> Iterator[None]:
        """Suppress errors of the block: warn at the first of the run, and count all."""
        try:
            yield
        except Exception as error:  # one of the three places that tolerate faults, each with a counter
            self._errors += 1
            if self._errors == 1:
                log.warning(
                    "%s failed (%s: %s); the run goes on, further failures are counted in health/logger_errors",
                    what,
                    type(error).__name__,
                    error,
                )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl: one object per step, in which `step` is the update and non-finite metrics are None.

    Ignores a torn last line, which a killed or active run may leave. Raises `ConfigError` without the file, `DataError`
    with the line number if an earlier line is damaged.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; name a run directory, for example runs/latest")
    lines: list[dict[str, Any]] = []
    damaged: DataError | None = None
    try:
        for number, text in enumerate(plain_lines(path), start=1):
            if damaged is not None:
                raise damaged
            try:
                lines.append(_line(json.loads(text)))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                damaged = DataError(
                    f"{path}:{number} is not a line of metrics: {error}; delete that line to see the others"
                )
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return lines


def _line(values: Any) -> dict[str, float | None]:
    """Validate a line. Raises ValueError, KeyError or TypeError."""
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
