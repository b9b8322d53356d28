"""Runs in a folder, and the row of each in the table: from the end of its metrics, before all of them are read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.lab.watch.metric_columns import MetricColumns
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.safe_text import safe_text
from lockstep.rollout.system.plain_files import opened_plain
from lockstep.trainer.config.saved_config import read_saved
from lockstep.trainer.observe.alarms import AlarmThresholds, alarms, notes
from lockstep.trainer.observe.metrics_log import checked_line

TAIL_BYTES = 2**18
"""End of metrics.jsonl that the row is made of: some dozen lines."""
MAX_NAME = 120
QUIET_S = 120.0
"""Age of the newest line from which a run without a lock is taken for stopped, unless its steps are long."""
QUIET_STEPS = 5


class WatchedRun:
    """A run directory that is only read, and never beyond its own files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]
        """Name in addresses; names of directories may hold anything."""
        self.name = safe_text(path.name, MAX_NAME)
        self.columns = MetricColumns(path / "metrics.jsonl")
        self.changed_at = 0
        """Value of the table's clock at which its columns changed."""
        self._stamps: dict[str, tuple[int, int, int] | None] = {}
        self._lines: list[dict[str, float | None]] = []
        self._settings: Mapping[str, Any] | None = None
        self._problem = ""

    def inside(self, *names: str) -> Path:
        """Return the path of a file of the run. Raises OSError if a link leads elsewhere."""
        path = self.path.joinpath(*names)
        if path.parent.resolve() != path.parent or path.is_symlink():
            raise OSError(f"{names[-1]} is a link")
        return path

    def setting(self, name: str) -> Any:
        """Return the value of `group.name`; None if it is not known, also as long as config.yaml has not been read."""
        value: Any = self._settings or {}
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def refresh(self, deadline: float) -> bool:
        """Read the end of the metrics, and the settings until `deadline`; return whether those are known."""
        if self._has_changed("metrics.jsonl"):
            self._lines = list(self._tail())
        if (self._settings is None or self._has_changed("config.yaml")) and time.monotonic() < deadline:
            self._settings, self._problem = {}, ""
            self._has_changed("config.yaml")
            try:
                self._settings = OmegaConf.to_container(read_saved(self.inside("config.yaml")))  # type: ignore[assignment]
            except (ConfigError, OSError) as error:
                self._problem = safe_text(str(error), 300)
        return self._settings is not None

    def _has_changed(self, name: str) -> bool:
        stamp = None
        with suppress(OSError):
            status = self.inside(name).stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        has_changed = self._stamps.get(name, ()) != stamp
        self._stamps[name] = stamp
        return has_changed

    def _tail(self) -> Iterator[dict[str, float | None]]:
        try:
            with opened_plain(self.inside("metrics.jsonl")) as file:
                start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
                file.seek(start)
                lines = file.read(TAIL_BYTES).split(b"\n")[:-1]  # the last one is being written
        except OSError:
            return
        for line in lines[1:] if start else lines:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                yield checked_line(json.loads(line))

    def row(self, locked: set[int], now: float) -> dict[str, Any]:
        """Return its row of the table. locked: inodes of locked files."""
        last = self._lines[-1] if self._lines else {}
        stamp = self._stamps.get("metrics.jsonl") or self._stamps.get("config.yaml")
        written_at = last.get("time/unix") or (stamp[2] / 1e9 if stamp else now)
        age_s = max(0.0, now - written_at)
        update, total = last.get("step"), self.setting("updates")
        sentences, good = self._messages(last)
        if total is not None and update is not None and update >= total:
            state = "finished"
        elif self._is_locked(locked) or age_s < max(QUIET_S, QUIET_STEPS * (last.get("time/step") or 0.0)):
            state = "running"
        else:
            state = "stopped"
        return {
            "id": self.id,
            "name": self.name,
            "state": state,
            "update": update,
            "updates": total if isinstance(total, int) else None,
            "reward": self._newest("reward/mean"),
            "heldOut": self._newest("eval/reward_mean"),
            "speed": self._newest("perf/tokens_per_s"),
            "alarms": sentences,
            "notes": good,
            "age": age_s,
            "damaged": self.columns.num_damaged,
        }

    @property
    def metric_names(self) -> set[str]:
        return {name for line in self._lines for name in line} | set(self.columns.names)

    def _newest(self, name: str) -> float | None:
        return next((value for line in reversed(self._lines) if (value := line.get(name)) is not None), None)

    def _messages(self, last: Mapping[str, float | None]) -> tuple[list[str], list[str]]:
        """Return the alarms and the notes of the newest line."""
        if self._problem:
            return [self._problem], []
        metrics = {name: math.nan if value is None else value for name, value in last.items()}
        try:
            thresholds = AlarmThresholds.of(self.setting)
        except ConfigError as error:
            return [safe_text(str(error), 300)], []
        return alarms(metrics, thresholds), notes(metrics, thresholds)

    def _is_locked(self, locked: set[int]) -> bool:
        with suppress(OSError):
            return self.inside(".lock").stat().st_ino in locked
        return False


class RunTable:
    """The runs of a folder, or the one run that the folder is."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.runs: dict[str, WatchedRun] = {}
        """By id, in the order of names."""
        self.clock = time.time_ns() // 1_000_000
        """Counts changes of columns, from a number that no earlier server has reached."""

    def find(self) -> None:
        """Look for new runs and forget deleted ones. Links are left out: runs/latest is another name of a run."""
        paths = [self.root] if _is_run(self.root) else sorted(filter(_is_run, self.root.iterdir()))
        runs = {run.path: run for run in self.runs.values()}
        self.runs = {run.id: run for run in (runs.get(path) or WatchedRun(path) for path in paths)}

    def rows(self, deadline: float) -> dict[str, Any]:
        """Return the table; `isComplete` is false as long as settings are left to read."""
        with suppress(OSError):
            self.find()
        locked, now = _locked_files(), time.time()
        newest_first = sorted(self.runs.values(), key=_modified_at, reverse=True)
        num_known = sum(run.refresh(deadline) for run in newest_first)
        return {
            "root": safe_text(str(self.root), 4 * MAX_NAME),
            "runs": [run.row(locked, now) for run in newest_first],
            "isComplete": num_known == len(newest_first),
        }

    def refresh_columns(self, runs: list[WatchedRun], deadline: float) -> float:
        """Read the columns of runs until `deadline`, at least one chunk in all; return the share that is read."""
        for run in runs:
            with suppress(OSError):  # deleted meanwhile, or without a step yet
                run.inside("metrics.jsonl")
                if run.columns.refresh(deadline):
                    self.clock += 1
                    run.changed_at = self.clock
        return sum(run.columns.read_share for run in runs) / max(1, len(runs))


def _is_run(path: Path) -> bool:
    return not path.is_symlink() and any((path / name).is_file() for name in ("metrics.jsonl", "config.yaml"))


def _modified_at(run: WatchedRun) -> float:
    with suppress(OSError):
        return run.columns.path.stat().st_mtime
    return 0.0


def _locked_files() -> set[int]:
    """Return the inodes of files that programs of this machine hold locked, as a run does with its `.lock`."""
    with suppress(OSError):
        words = Path("/proc/locks").read_text().split()  # a file is <major>:<minor>:<inode>
        return {int(word.rpartition(":")[2]) for word in words if word.count(":") == 2}
    return set()
