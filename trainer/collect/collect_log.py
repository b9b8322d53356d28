"""Log of rollouts made ahead, `asynchrony.jsonl`: what the clock decided, without which a run cannot be followed.

One line per rollout batch, which rank 0 writes when the batch is complete. What is trained depends on time in two ways
alone: which groups have arrived whenever rank 0 looks, and which weights sampled each token. The log holds the first,
saved rollouts the second; decisions follow from them, and are written so that a replay can compare its own
(`lab/run_replay/`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.rollout.errors import DataError
from lockstep.rollout.system.plain_files import plain_lines, write_whole

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One look of rank 0 at the groups. Groups are named by their places in the data."""

    arrived: Sequence[tuple[int, int]]
    """Groups that were complete, in order of arrival, each with the version of its oldest token."""
    dropped: Sequence[int]
    """Groups that ended untrained, as too old."""
    silent: Sequence[int]
    """Groups without spread that ended untrained, under dynamic sampling."""
    begun: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """One rollout batch."""

    step: int
    """Number of batches before it."""
    version: int
    """Updates before it."""
    begins: str | None
    """Event before it that ended all groups in flight: "start" of a process, or "engine", which was lost; None."""
    is_alone: bool
    """False in a run on several ranks."""
    rounds: Sequence[Round]
    batch: Sequence[int]
    """Groups that are trained, in this order."""

    @property
    def delivered(self) -> list[int]:
        """Groups whose rollouts the step gave to training, reports and curriculum."""
        return [*self.batch, *(place for one in self.rounds for place in one.silent)]


class CollectLog:
    """Writer of the log, on rank 0. A file that cannot be written is given up with a warning; the run goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_open = self._is_given_up = False

    def append(self, collection: Collection) -> None:
        """Write a line. Before the first one, drop lines of later batches and torn ones, which a killed run left."""
        if self._is_given_up:
            return
        try:
            if not self._is_open:
                kept = [json.dumps(asdict(one)) for one in _readable(self._path) if one.step < collection.step]
                write_whole(self._path, "".join(f"{line}\n" for line in kept).encode())
                self._is_open = True
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(collection)) + "\n")
        except OSError as error:
            self._is_given_up = True
            log.warning("%s cannot be written (%s); the run goes on, and cannot be replayed", self._path, error)


def read_log(path: Path) -> list[Collection]:
    """Return the lines of a log, but for a torn last one. Raises `DataError`."""
    collections: list[Collection] = []
    damage: DataError | None = None
    try:
        for number, text in enumerate(plain_lines(path), start=1):
            if damage is not None:
                raise damage
            try:
                collections.append(_collection(json.loads(text)))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                damage = DataError(f"{path}:{number} is not a line of the log of rollouts made ahead: {error}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return collections


def _readable(path: Path) -> Iterator[Collection]:
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            yield _collection(json.loads(text))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # torn by a kill; a damaged log must not stop a resume


def _collection(values: dict[str, Any]) -> Collection:
    rounds = [
        Round(
            arrived=[(int(place), int(oldest)) for place, oldest in one["arrived"]],
            **{name: [int(place) for place in one[name]] for name in ("dropped", "silent", "begun")},
        )
        for one in values["rounds"]
    ]
    numbers = {name: int(values[name]) for name in ("step", "version")}
    if values["begins"] not in (None, "start", "engine"):
        raise ValueError(f"begins is {values['begins']!r:.80}")
    batch = [int(place) for place in values["batch"]]
    return Collection(
        **numbers, begins=values["begins"], is_alone=bool(values["is_alone"]), rounds=rounds, batch=batch
    )
