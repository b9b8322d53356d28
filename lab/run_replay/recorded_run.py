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

Groups = Mapping[int, Sequence[Rollout]]
"""Rollouts by the place of their group."""


class RecordedRun:
    """Batches of a run, from its beginning to the last one that was trained."""

    def __init__(self, run: Path) -> None:
        """Raises `ConfigError` if the run cannot be followed from its beginning, `DataError` for damaged files."""
        self.directory = RunDirectory(run)
        if not self.directory.asynchrony.is_file():
            raise ConfigError(
                f"{self.directory.asynchrony} does not exist: --run follows a run with rollouts made ahead "
                "(rollout.max_staleness of 1 or more); a run without them is a function of its seed: start it again, "
                "or replay one update of it with --step"
            )
        lines = read_log(self.directory.asynchrony)
        self.metrics: dict[int, Mapping[str, Any]] = {}
        """Lines of metrics by the number of batches before them."""
        for line in read_metrics(self.directory.metrics):
            if line.get(BATCH) is not None:
                self.metrics.setdefault(int(line[BATCH]) - 1, line)
        self.collections: list[Collection] = []
        for number, line in enumerate(lines):
            if line.step not in self.metrics and number == len(lines) - 1:
                break  # killed before the step was reported
            if line.step != number or number not in self.metrics:
                begins = "begins with" if not number else f"lacks batch {number + 1} before"
                raise ConfigError(
                    f"the log of {run} {begins} batch {line.step + 1}: a fork, or a run whose files could not be "
                    "written, cannot be followed; name a run that is whole from its first batch"
                )
            self.collections.append(line)
        if not self.collections:
            raise ConfigError(f"{run} has no whole batch to replay")
        missing = [path for path in map(self.rollouts_path, range(len(self.collections))) if not path.is_file()]
        if missing:
            raise ConfigError(
                f"{missing[0]} and {len(missing) - 1} more files of rollouts are missing, without which it is unknown "
                "which weights sampled which tokens; record with logger.save_rollouts=true"
            )
        self._processes = list(accumulate(line.begins == "start" for line in self.collections))
        """Number of the process that made each batch."""
        self._delivered = {
            (self._processes[number], place): number
            for number, line in enumerate(self.collections)
            for place in line.delivered
        }
        self._read: dict[int, Groups] = {}

    def rollouts_path(self, number: int) -> Path:
        """Return the file with the rollouts of a batch."""
        update = self.metrics[number]["step"]
        suffix = f"-untrained-{number + 1}" if update == self.collections[number].version else ""
        return self.directory.rollouts / f"step-{update:06d}{suffix}.jsonl"

    def groups(self, number: int) -> Groups:
        """Return the rollouts of a batch. Those of the last few batches are kept."""
        if number not in self._read:
            for old in [one for one in self._read if one < min(number, *self._read) or len(self._read) > 8]:
                del self._read[old]
            rollouts = read_rollouts(self.rollouts_path(number))
            self._read[number] = {place: list(group) for place, group in groupby(rollouts, lambda one: one.group_id)}
        return self._read[number]

    def group(self, place: int, *, begun_in: int) -> Sequence[Rollout] | None:
        """Return the rollouts of a group; None if its process ended or dropped it untrained."""
        number = self._delivered.get((self._processes[begun_in], place))
        if number is None:
            return None
        if place not in self.groups(number):
            raise DataError(f"{self.rollouts_path(number)} has no rollouts of group {place}")
        return self.groups(number)[place]
