"""Where a run's numbers go: `metrics.jsonl` always, Weights & Biases if asked for. Rank 0 only.

The step axis is the optimizer update. A logger that fails (network, quota, a full disk) never ends a run: it warns
once and is counted in `health/logger_errors`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config.schema import LoggerConfig
from trainer.observe.wandb_run import Lineage, WandbRun

log = logging.getLogger(__name__)

BATCH = "rollout/batch"
"""Metric: rollout batches made so far."""


class MetricsLog:
    """Appends one JSON object per step, and mirrors it to W&B."""

    def __init__(
        self, path: Path, config: LoggerConfig, *, run_config: Mapping[str, Any], lineage: Lineage | None = None
    ) -> None:
        """path: of the file. run_config: what W&B is told of the run. lineage: None for a run that starts anew."""
        self._path = path
        self._errors = 0
        self._wandb: WandbRun | None = None
        lineage = lineage or Lineage()
        self.wandb_id = lineage.run_id if lineage.is_same_run else None
        """Kept for checkpoints also where W&B cannot be reached now."""
        if config.wandb != "off":
            with self.tolerating("W&B"):
                self._wandb = WandbRun(config, directory=path.parent, run_config=run_config, lineage=lineage)
                self.wandb_id = self._wandb.id

    @property
    def url(self) -> str | None:
        """Where W&B shows the run."""
        return None if self._wandb is None else self._wandb.url

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step. Non-finite numbers become null in the file, which is JSON, not Python."""
        if self._errors:
            metrics = {**metrics, "health/logger_errors": float(self._errors)}
        line = {"step": step, **{k: (v if math.isfinite(v) else None) for k, v in sorted(metrics.items())}}
        with self.tolerating(str(self._path)), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._wandb is not None:
            with self.tolerating("W&B"):
                self._wandb.log(step, metrics)

    def media(self, step: int, make: Callable[[], Mapping[str, Any]]) -> None:
        """Tables, pages and histograms for W&B; made only if it is on."""
        if self._wandb is not None:
            with self.tolerating("W&B"):
                self._wandb.log(step, make())

    def truncate_after(self, *, update: int, batch: int) -> None:
        """Drop the lines of rollout batches after a resumed one: they will be written again.

        By batch, because one that trained nothing has the update of the one before it. Lines without a batch are of
        older versions and go by update.
        """
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                values = json.loads(line)
                if values[BATCH] <= batch if BATCH in values else values["step"] <= update:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # what a kill cut in half, or a disk that was full: a log keeps no run from going on
        temporary = self._path.with_suffix(".partial")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(self._path)  # so that a kill leaves the old file or the new one

    def close(self) -> None:
        if self._wandb is not None:
            with self.tolerating("W&B"):
                self._wandb.finish()

    @contextmanager
    def tolerating(self, what: str) -> Iterator[None]:
        """For work whose failure must not end the run: one warning for the whole run, and a count of all failures."""
        try:
            yield
        except Exception as error:  # one of the three places where faults are tolerated, with a counter
            self._errors += 1
            if self._errors == 1:
                log.warning(
                    "%s failed (%s: %s); the run goes on, further failures are counted in health/logger_errors",
                    what,
                    type(error).__name__,
                    error,
                )
