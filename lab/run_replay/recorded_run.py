"""A run with rollouts made ahead, as its directory records it: log, metrics, saved rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout
from lockstep.rollout.saved_rollouts import read_rollouts
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.collect.collect_log import Collection, read_log
from lockstep.trainer.observe.metrics_log import BATCH, read_metrics

READ_AT_ONCE = 8
"""Files of rollouts that are kept in memory."""


class RecordedRun:
    """Batches of a run, from its first to the last one that was reported."""

    def __init__(self, run: Path) -> None:
        """Raises `ConfigError` if the run cannot be followed from its beginning, `DataError` for damaged files."""
        self.directory = RunDirectory(run)
        if not self.directory.asynchrony.is_file():
            raise ConfigError(
                f"{self.directory.asynchrony} does not exist: --run follows a run with rollouts made ahead "
                "(rollout.max_staleness of 1 or more); a run without them is a function of its seed: start it again, "
                "or replay one update of it with --step"
            )
        lines = [line for line in read_metrics(self.directory.metrics) if line.get(BATCH) is not None]
        self.metrics: dict[int, Mapping[str, Any]] = {int(line[BATCH]) - 1: line for line in lines}
        """Lines of metrics by the number of batches before them."""
        # A killed run may have logged a batch that it did not report.
        self.collections: list[Collection] = [
            line for line in read_log(self.directory.asynchrony) if line.step in self.metrics
        ]
        if not self.collections or [line.step for line in self.collections] != list(range(len(self.metrics))):
            raise ConfigError(
                f"{self.directory.asynchrony} has {len(self.collections)} whole batches and metrics.jsonl "
                f"{len(self.metrics)}, expected the same from the first on: a fork, or a run whose files are "
                "damaged, cannot be followed; name a run that is whole"
            )
        paths = [self._rollouts_path(number) for number in range(len(self.collections))]
        if missing := [path for path in paths if not path.is_file()]:
            raise ConfigError(
                f"{len(missing)} files of rollouts are missing, the first {missing[0]}, without which it is unknown "
                "which weights sampled which tokens; record with logger.save_rollouts=true"
            )
        self._processes = list(accumulate(line.begins is not None for line in self.collections))
        """Number of the process that made each batch, or of its engine."""
        self._delivered = {
            (process, place): number
            for number, (process, line) in enumerate(zip(self._processes, self.collections, strict=True))
            for place in line.delivered
        }
        self._read: dict[int, dict[int, Sequence[Rollout]]] = {}

    def group(self, place: int, *, begun_in: int) -> Sequence[Rollout] | None:
        """Return the rollouts of a group that a batch began; None if it was dropped, or its process ended before."""
        number = self._delivered.get((self._processes[begun_in], place))
        if number is None:
            return None
        if number not in self._read:
            while len(self._read) >= READ_AT_ONCE:
                del self._read[min(self._read)]
            rollouts = read_rollouts(self._rollouts_path(number))
            self._read[number] = {place: list(group) for place, group in groupby(rollouts, lambda one: one.group_id)}
        if place not in self._read[number]:
            raise DataError(f"{self._rollouts_path(number)} has no rollouts of group {place}")
        return self._read[number][place]

    def _rollouts_path(self, number: int) -> Path:
        update = int(self.metrics[number]["step"])
        suffix = f"-untrained-{number + 1}" if update == self.collections[number].version else ""
        return self.directory.rollouts / f"step-{update:06d}{suffix}.jsonl"
