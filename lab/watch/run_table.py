"""Runs in a folder, and the row of each in the table: from the end of its metrics, before all of them are read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
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
HELD_OUT = "eval/reward_mean"
QUIET_S = 120.0
"""Age of the newest line from which a run without a lock is taken for stopped, unless its steps are long."""
QUIET_STEPS = 5


class WatchedRun:
    """A run directory that is only read, and never beyond its own files."""

    def __init__(self, path: Path, name: Path) -> None:
        """name: path below the folder that holds all runs of the table."""
        self.path = path
        self.id = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
        """Name in addresses; names of directories may hold anything."""
        self.name = safe_text(str(name), MAX_NAME)
        self.columns = MetricColumns(path / "metrics.jsonl")
        self.changed_at = 0
        """Value of the table's clock at which its columns changed."""
        self._stamps: dict[str, tuple[int, int, int] | None] = {}
        self._last: dict[str, float | None] = {}
        self._held_out: float | None = None
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
            self._read_end()
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

    def _read_end(self) -> None:
        """Read the newest line, and the newest held-out reward within the end of the file."""
        self._last, self._held_out = {}, None
        lines: list[bytes] = []
        with suppress(OSError), opened_plain(self.inside("metrics.jsonl")) as file:
            start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(start)
            lines = file.read(TAIL_BYTES).split(b"\n")[start > 0 : -1]  # without torn ones
        for line in reversed(lines):
            if not self._last or HELD_OUT.encode() in line:
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    values = checked_line(json.loads(line))
                    self._last = self._last or values
                    self._held_out = values.get(HELD_OUT)
            if self._held_out is not None:
                break

    def row(self, locked: set[int], now: float) -> dict[str, Any]:
        """Return its row of the table. locked: inodes of locked files."""
        last = self._last
        stamp = self._stamps.get("metrics.jsonl") or self._stamps.get("config.yaml")
        written_at = last.get("time/unix") or (stamp[2] / 1e9 if stamp else now)
        age_s = max(0.0, now - written_at)
        update, total = last.get("step"), self.setting("updates")
        sentences, good = self._messages(last)
        if total is not None and update is not None and update >= total:
            state = "finished"
        elif self._is_locked(locked) or age_s < max(QUIET_S, QUIET_STEPS * (last.get("time/step") or 0.0)):
            state = "running"
        elif self._settings is None:
            state = ""
        else:
            state = "stopped"
        return {
            "id": self.id,
            "name": self.name,
            "state": state,
            "update": update,
            "updates": total if isinstance(total, int) else None,
            "reward": last.get("reward/mean"),
            "heldOut": self._held_out,
            "speed": last.get("perf/tokens_per_s"),
            "alarms": sentences,
            "notes": good,
            "age": age_s,
            "damaged": self.columns.num_damaged,
        }

    @property
    def metric_names(self) -> set[str]:
        return {*self._last, *self.columns.names}

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
    """The runs of folders; a folder may be a run itself."""

    def __init__(self, *roots: Path) -> None:
        self.roots = [root.resolve() for root in roots]
        self._base = Path(os.path.commonpath([root.parent if _is_run(root) else root for root in self.roots]))
        self.runs: dict[str, WatchedRun] = {}
        """By id, in the order of names."""
        self.clock = time.time_ns() // 1_000_000
        """Counts changes of columns, from a number that no earlier server has reached."""

    def find(self) -> None:
        """Look for new runs and forget deleted ones. Links are left out: runs/latest is another name of a run."""
        paths = [
            path
            for root in self.roots
            for path in ([root] if _is_run(root) else sorted(filter(_is_run, root.iterdir())))
        ]
        watched = {run.path: run for run in self.runs.values()}
        runs = (watched.get(path) or WatchedRun(path, path.relative_to(self._base)) for path in paths)
        self.runs = {run.id: run for run in runs}

    def rows(self, deadline: float) -> dict[str, Any]:
        """Return the table; `isComplete` is false as long as settings are left to read."""
        with suppress(OSError):
            self.find()
        locked, now = _locked_files(), time.time()
        newest_first = sorted(self.runs.values(), key=_modified_at, reverse=True)
        num_known = sum(run.refresh(deadline) for run in newest_first)
        return {
            "root": safe_text(str(self.roots[0] if len(self.roots) == 1 else self._base), 4 * MAX_NAME),
            "runs": [run.row(locked, now) for run in newest_first],
            "isComplete": num_known == len(newest_first),
        }

    def refresh_columns(self, runs: Sequence[WatchedRun], deadline: float) -> float:
        """Read the columns of runs until `deadline`: first a sample of each long one, then all in their order. Return
        the share that is read."""
        for run in runs:
            if not run.columns.is_begun and time.monotonic() < deadline:
                self._refresh(run, -math.inf)
        if all(run.columns.is_begun for run in runs):
            for run in runs:
                self._refresh(run, deadline)
        return sum(run.columns.read_share for run in runs) / max(1, len(runs))

    def _refresh(self, run: WatchedRun, deadline: float) -> None:
        try:
            run.inside("metrics.jsonl")
            has_changed = run.columns.refresh(deadline)
        except OSError:  # deleted, or without a step yet
            run.columns.read_share, has_changed = 1.0, False
        run.columns.is_begun = True
        if has_changed:
            self.clock += 1
            run.changed_at = self.clock


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
