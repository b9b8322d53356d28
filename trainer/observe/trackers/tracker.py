"""Interface of a tracker of experiments, and the records that pass through it."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from lockstep.trainer.config.groups.outputs_settings import LoggerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    counts: np.ndarray
    edges: np.ndarray
    """One more than counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    html: str


Medium = Table | Histogram | Page
Values = Mapping[str, float | Medium]


class Tracker(Protocol):
    """One run in a tracker. Every method may raise what the tracker raises."""

    @property
    def shows(self) -> tuple[type[Medium], ...]:
        """Media that the tracker can show; others are not passed to it."""
        ...

    def log(self, update: int, values: Values) -> None:
        """Log numbers and media of an update."""
        ...

    def finish(self, *, failed: bool) -> None:
        """Close the run after everything is written."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Origin of a run that was started from a checkpoint."""

    run_id: str | None = None
    """Id of the run that saved the checkpoint."""
    update: int = 0
    """Update of the checkpoint."""
    is_same_run: bool = True
    """True if the run continues in its own directory; False for a fork."""

    @property
    def continued_update(self) -> int | None:
        """Update from which a run continues in its own directory; None for a new run or a fork."""
        return self.update if self.is_same_run and self.update else None

    @property
    def parent(self) -> str | None:
        """Branch point of a fork, in W&B's form; None for other runs."""
        return None if self.run_id is None or self.is_same_run else f"{self.run_id}?_step={self.update}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Location of a tracker's data."""

    data: str
    """Directory or address, without secrets."""
    view: str
    """Shell command that shows the data; empty for an address."""
    store: str = "run directory"
    """Store that the data are in, wherever the run directory is moved to."""

    def __str__(self) -> str:
        return f"{self.view}  # data: {self.data}" if self.view else self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run in a tracker that a resumed run continues, kept beside the tracker's data."""

    store: str
    """`Place.store` at that time: a run is not continued in another one."""
    id: str | None = None
    """Id that the tracker knows the run by; None before the first start."""
    update: int = -1
    """Last update that was logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Arguments of every tracker."""

    settings: LoggerConfig
    directory: Path
    """Directory of the run."""
    run_config: Mapping[str, Any]
    """Settings and provenance without secrets."""
    resumed_at: int | None
    """Update of the checkpoint that the run continues from; None for a new run or a fork."""
    tracked: TrackedRun | None = None
    """Set by `Background`, which reads it."""

    @property
    def id(self) -> str | None:
        """Id of the run to continue; None for a new one."""
        return None if self.tracked is None else self.tracked.id

    @property
    def name(self) -> str:
        return self.directory.resolve().name


class LocalTracker(ABC):
    """Tracker whose calls may block, and which `Background` therefore calls in a thread."""

    label: ClassVar[str]
    shows: ClassVar[tuple[type[Medium], ...]]
    """Media that the tracker can show."""
    keeps_first: ClassVar[bool] = True
    """True if logged updates cannot be replaced: updates that a resumed run repeats are left out, as W&B does."""

    id: str
    """Id for `TrackedRun`."""

    @abstractmethod
    def __init__(self, session: Session) -> None: ...

    @staticmethod
    @abstractmethod
    def place(settings: LoggerConfig, directory: Path) -> Place:
        """Return the location of the data. Imports nothing of the tracker."""

    @abstractmethod
    def log(self, update: int, values: Values) -> None:
        """Log numbers and media of an update."""

    @abstractmethod
    def finish(self, *, failed: bool) -> None:
        """Close the run after everything is written."""


def tracker_directory(directory: Path, name: str) -> Path:
    """Return the directory for files of a tracker in the directory of a run."""
    return directory / "trackers" / name


def read_tracked(path: Path, store: str) -> TrackedRun:
    """Return the run that a file remembers; a new one if the file is missing, damaged, or about another store."""
    try:
        record = TrackedRun(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return TrackedRun(store=store)
    is_valid = record.store == store and isinstance(record.id, str) and type(record.update) is int
    return record if is_valid else TrackedRun(store=store)


def write_tracked(path: Path, tracked: TrackedRun, *, id: str, update: int) -> TrackedRun:
    """Remember the id and the last update of a run, and return the record."""
    tracked = replace(tracked, id=id, update=max(tracked.update, update))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(asdict(tracked)))
    temporary.replace(path)
    return tracked


def numbers(values: Values) -> dict[str, float]:
    """Return the finite numbers, which every tracker can draw."""
    return {name: value for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)}


def media(values: Values) -> dict[str, Medium]:
    return {name: value for name, value in values.items() if isinstance(value, Table | Histogram | Page)}
