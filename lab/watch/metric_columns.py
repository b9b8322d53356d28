"""Columns of a growing metrics.jsonl, kept in memory: only what was appended is read again.

A run that resumes replaces its file by a shorter one. Damaged lines are counted and skipped.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lockstep.rollout.system.plain_files import opened_plain
from lockstep.trainer.observe.metrics_log import MAX_UPDATE, RUN_SECONDS

CHUNK = 2**22
"""Bytes that are read at once. A longer line is damaged."""
MARK = 64
"""Bytes before the end of what was read that tell whether the file is still the same."""
PREVIEW_BYTES = 2**22
"""Size from which a file is sampled first."""
PREVIEW_LINES = 64
MAX_FLOAT = float(np.finfo(np.float32).max)
"""Largest number of a column; others count as not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Buckets of equal width on the x axis, whose edges are multiples of the width."""

    start: float
    width: float
    count: int

    @classmethod
    def over(cls, low: float, high: float, *, points: int, is_whole: bool) -> Grid:
        """Return at most `points` + 2 buckets over [low, high]; is_whole: widths are whole numbers."""
        width = 2.0 ** math.ceil(math.log2(max(high - low, 1e-9) / points))
        width = max(1.0, width) if is_whole else width
        start = math.floor(low / width) * width
        return cls(start=start, width=width, count=int((high - start) // width) + 1)

    @property
    def edges(self) -> np.ndarray:
        return self.start + self.width * np.arange(self.count + 1)


def bucketed(x: np.ndarray, y: np.ndarray, grid: Grid) -> np.ndarray:
    """Return (3, count) float32: mean, smallest and largest finite value of each bucket. NaN: the bucket has no line
    with the metric; infinity: the metric was not finite there. x must not fall."""
    values = np.full((3, grid.count), np.nan, np.float32)
    at = np.searchsorted(x, grid.edges)
    is_used = at[1:] > at[:-1]
    if not is_used.any():
        return values
    y, starts = y[: at[-1]].astype(np.float64), at[:-1][is_used]
    is_finite = np.isfinite(y)
    counts = np.add.reduceat(is_finite, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        sums = np.add.reduceat(np.where(is_finite, y, 0.0), starts) / counts
    sums[(counts == 0) & np.logical_or.reduceat(np.isinf(y), starts)] = np.inf
    values[0, is_used] = sums
    values[1, is_used] = np.fmin.reduceat(np.where(is_finite, y, np.nan), starts)
    values[2, is_used] = np.fmax.reduceat(np.where(is_finite, y, np.nan), starts)
    return values


class MetricColumns:
    """Metrics of a run by name, over steps or hours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_share = 0.0
        """Share of the file that has been read."""
        self.is_begun = False
        """True after the first look at the file."""
        self._reset()

    def _reset(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._mark = b""
        self._is_skipping = False
        self._places: dict[str, int] = {}
        self._layouts: dict[tuple[str, ...], np.ndarray] = {}
        self._values = np.full((0, 0), np.nan, np.float32)
        self._x = np.zeros((2, 0))
        self._run_seconds = self._seconds = 0.0
        self._preview: MetricColumns | None = None
        self.num_lines = 0
        self.num_damaged = 0

    @property
    def names(self) -> Iterable[str]:
        return self._source._places.keys()

    @property
    def _source(self) -> MetricColumns:
        return self if self._preview is None else self._preview

    def refresh(self, deadline: float) -> bool:
        """Read what was appended, or the whole file if it was replaced, until `deadline` of `time.monotonic`. Return
        whether the numbers of `series` changed. Raises OSError."""
        with opened_plain(self.path) as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            has_changed = self._is_other(file, identity, status.st_size)
            if has_changed:
                self._reset()
                self._identity = identity
                if status.st_size > PREVIEW_BYTES:
                    self._preview = _sampled(file, self.path, status.st_size)
            num_read = -1
            while num_read and time.monotonic() < deadline:
                file.seek(self._offset)
                num_read = self._take(file.read(CHUNK))
                has_changed |= num_read > 0 and self._preview is None
        self.read_share = self._offset / status.st_size if num_read else 1.0
        if self.read_share == 1.0 and self._preview is not None:
            self._preview, has_changed = None, True
        return has_changed

    def _is_other(self, file: BinaryIO, identity: tuple[int, int], size: int) -> bool:
        if self._identity != identity or size < self._offset:
            return True
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) != self._mark

    def _take(self, chunk: bytes) -> int:
        """Add the complete lines of a chunk and return the number of bytes that are done."""
        end = chunk.rfind(b"\n") + 1
        if not end:
            if len(chunk) < CHUNK:
                return 0  # a line that is being written
            end, self.num_damaged = len(chunk), self.num_damaged + (not self._is_skipping)
            self._is_skipping = True
        else:
            lines = chunk[:end].splitlines()
            self.add(lines[1:] if self._is_skipping else lines)
            self._is_skipping = False
        self._mark = chunk[max(0, end - MARK) : end]
        self._offset += end
        return end

    def add(self, lines: Sequence[bytes]) -> None:
        """Add lines of the file."""
        start, width = self.num_lines, self._values.shape[1]
        if start + len(lines) > width:
            self._grow(self._values.shape[0], max(width + width // 4, start + len(lines)))
        for line in lines:
            try:
                row = json.loads(line)
                step = row["step"]
                if type(step) not in (int, float) or not 0 <= step <= MAX_UPDATE:
                    raise ValueError("not the number of an update")
                numbers = np.array(list(row.values()), np.float64)  # None becomes NaN
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self.num_damaged += 1
                continue
            at = self.num_lines
            self._x[:, at] = step, self._hours(row)
            numbers[~(np.abs(numbers) <= MAX_FLOAT)] = np.inf
            keys = tuple(row)
            if keys not in self._layouts:
                places = [self._places.setdefault(key, len(self._places)) for key in keys]
                self._layouts[keys] = np.array(places)
                if len(self._places) > len(self._values):
                    self._grow(len(self._places) + 32, self._values.shape[1])
            self._values[self._layouts[keys], at] = numbers
            self.num_lines += 1

    def _grow(self, num_names: int, num_lines: int) -> None:
        values = np.full((num_names, num_lines), np.nan, np.float32)
        values[: self._values.shape[0], : self._values.shape[1]] = self._values
        x = np.zeros((2, num_lines))
        x[:, : self._x.shape[1]] = self._x
        self._values, self._x = values, x

    def _hours(self, row: dict[str, float | None]) -> float:
        """Return the hours that processes of the run have worked. The age of a process begins again with a resume."""
        seconds = row.get(RUN_SECONDS)
        if seconds is None:
            self._seconds += row.get("time/step") or 0.0
        else:
            self._seconds += seconds - self._run_seconds if seconds >= self._run_seconds else seconds
            self._run_seconds = seconds
        return self._seconds / 3600

    def extent(self, *, hours: bool) -> tuple[float, float] | None:
        """Return the ends of the x axis; None without lines."""
        source = self._source
        x = source._x[int(hours), : source.num_lines]
        return (float(x.min()), float(x.max())) if len(x) else None

    def series(self, name: str, grid: Grid, *, hours: bool) -> np.ndarray | None:
        """Return the buckets of a metric as `bucketed` does; None if the run has no such metric."""
        source = self._source
        place = source._places.get(name)
        if place is None:
            return None
        x, y = source._x[int(hours), : source.num_lines], source._values[place, : source.num_lines]
        if (np.diff(x) < 0).any():  # lines in another order than a run writes
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        return bucketed(x, y, grid)


def _sampled(file: BinaryIO, path: Path, size: int) -> MetricColumns:
    """Return columns of some lines from all parts of a large file, to draw until it has been read."""
    lines = []
    for place in range(PREVIEW_LINES):
        file.seek(size * place // PREVIEW_LINES)
        if place:
            file.readline(CHUNK)  # the rest of a line
        line = file.readline(CHUNK)
        if line.endswith(b"\n"):
            lines.append(line)
    columns = MetricColumns(path)
    columns.add(lines)
    return columns
