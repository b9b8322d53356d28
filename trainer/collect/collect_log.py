"""Log of rollouts made ahead, `asynchrony.jsonl`: what the clock decided, without which a run cannot be followed.

What is trained depends on time in two ways alone: which groups have arrived whenever rank 0 looks, and which weights
sampled each token. The log holds the first, saved rollouts the second. Decisions follow from them, and are written so
that a replay can compare its own (`lab/run_replay/`). Groups are named by their places in the data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.rollout.system.plain_files import plain_lines, write_whole

log = logging.getLogger(__name__)


class Round(NamedTuple):
    """One look of rank 0 at the groups."""

    arrived: Sequence[Sequence[int]]
    """(place, version of its oldest token) of the groups that were complete, in order of arrival."""
    dropped: Sequence[int]
    """Groups that ended untrained, as too old."""
    silent: Sequence[int]
    """Groups without spread that ended untrained, under dynamic sampling."""
    begun: Sequence[int]


class Collection(NamedTuple):
    """One rollout batch: a line of the log, written when the batch is complete."""

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
    def values(self) -> dict[str, Any]:
        """The line as JSON."""
        return self._asdict() | {"rounds": [one._asdict() for one in self.rounds]}

    @property
    def delivered(self) -> list[int]:
        """Groups whose rollouts the step gave to training, reports and curriculum."""
        return [*self.batch, *chain.from_iterable(one.silent for one in self.rounds)]


class CollectLog:
    """Writer of the log, on rank 0. A file that cannot be written is given up with a warning; the run goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_open = self._is_given_up = False

    def append(self, collection: Collection) -> None:
        """Write a line; before the first one of a process, drop lines of later batches and torn ones."""
        if self._is_given_up:
            return
        try:
            if not self._is_open:
                earlier_lines = [_text(one) for one in read_log(self._path) if one.step < collection.step]
                write_whole(self._path, "".join(earlier_lines).encode())
                self._is_open = True
            with self._path.open("a") as file:
                file.write(_text(collection))
        except OSError as error:
            self._is_given_up = True
            log.warning("%s cannot be written (%s); the run goes on, and cannot be replayed", self._path, error)


def read_log(path: Path) -> Iterator[Collection]:
    """Yield the lines of a log, but for those that a kill has torn; nothing without a file. Raises OSError."""
    for text in plain_lines(path) if path.exists() else ():
        try:
            yield line_of(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue


def line_of(values: Any) -> Collection:
    """Return the line of `Collection.values`. Raises ValueError, KeyError, TypeError or AttributeError."""
    line = Collection(**values | {"rounds": [Round(**one) for one in values["rounds"]]})
    numbers = [line.step, line.version, *line.delivered, *(place for one in line.rounds for place in one.begun)]
    if not all(type(number) is int for number in numbers):
        raise TypeError("expected integers")
    return line


def _text(line: Collection) -> str:
    return json.dumps(line.values) + "\n"
