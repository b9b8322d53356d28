"""Batches that a run keeps on disk until no checkpoint needs them: after a kill they are trained again as they were.

    checkpoint         batch 8            batch 9            kill
        │       collected, trained   collected, half trained │
        └─ resumed: batch 8 from its file, batch 9 from its file, batch 10 from the groups in flight at the end of 9

A file has what a batch gave to training, and the groups in flight when it was complete: those that wait with their
rewards, those that are sampled with their calls so far. It belongs to the line of the log that it repeats
(`collect_log.py`); without that line it is of a course that the run has left.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout
from lockstep.rollout.saved_rollouts import as_text, from_json, to_json
from lockstep.rollout.system.plain_files import plain_lines, write_whole
from lockstep.trainer.checkpoint.checkpoint import MANIFEST
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.collect.call_journal import Calls, Key
from lockstep.trainer.collect.collect_log import Collection, line_of, read_log
from lockstep.trainer.collect.groups import Collected, Group

log = logging.getLogger(__name__)

UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)


class InFlight(NamedTuple):
    """Groups in flight at the end of a batch, by place, as JSON."""

    complete: Mapping[str, Any]
    """Scored rollouts, and the greedy answer if there is one."""
    unfinished: Mapping[str, Any]
    """Calls so far, with their keys."""


class KeptBatches:
    """The files of a run, written and read by rank 0."""

    def __init__(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        """say: told once what a resumed run repeats."""
        self._directory, self.say = directory, say
        self._is_given_up = False

    # Written by a run

    def write(
        self,
        line: Collection,
        collected: Collected,
        complete: Mapping[int, tuple[Group, Sequence[Rollout]]],
        unfinished: Mapping[int, Calls],
    ) -> None:
        """Write a batch, and remove those that no checkpoint needs. On failure the run goes on, after one warning."""
        if self._is_given_up:
            return
        try:
            texts = (json.dumps(one, default=as_text) + "\n" for one in _lines(line, collected, complete, unfinished))
            write_whole(self._path(line.step), "".join(texts).encode())
            # The batch before a checkpoint has the groups that were in flight there.
            needed = min([line.step, *self._checkpointed()]) - 1
            for path in self._directory.batches.glob("*.jsonl"):
                if path.stem.isdecimal() and int(path.stem) < needed:
                    path.unlink()
        except OSError as error:
            self._is_given_up = True
            log.warning(
                "%s cannot be written (%s); the run goes on, and resumes without rollouts in flight",
                self._directory.batches,
                error,
            )

    def _checkpointed(self) -> Iterator[int]:
        """Yield the number of batches before each checkpoint."""
        for path in self._directory.checkpoints.glob(f"step-*/{MANIFEST}"):
            with suppress(*UNREADABLE):
                yield int(json.loads(path.read_text())["state"]["step"])

    # Read by a resumed one

    def in_flight_before(self, step: int) -> list[tuple[int, int]]:
        """Return place and version of beginning of the groups that were in flight before a batch, by the log."""
        begun: dict[int, int] = {}
        for line in self._log():
            if line.step < step:
                if line.begins is not None:
                    begun.clear()
                for one in line.rounds:
                    for place in (*one.dropped, *one.silent):
                        begun.pop(place, None)
                    begun |= dict.fromkeys(one.begun, line.version)
                for place in line.batch:
                    begun.pop(place, None)
        return list(begun.items())

    def count_from(self, step: int) -> int:
        """Return the number of batches from this one on that can be repeated."""
        count = 0
        while self._header(step + count) is not None:
            count += 1
        return count

    def read(self, step: int) -> tuple[Collection, Collected]:
        """Return a batch that `count_from` counts. Raises `DataError` for a damaged file."""
        lines = self._values(step)
        with _readable(str(self._path(step))):
            header = next(lines)
            line = line_of(header["line"])
            rollouts = [from_json(one["delivered"]) for one in lines if "delivered" in one]
            groups: dict[int, list[Rollout]] = {}
            for rollout in rollouts:
                groups.setdefault(rollout.group_id, []).append(rollout)
            collected = Collected(
                rollouts=tuple(rollouts),
                trained=tuple(rollout for place in line.batch for rollout in groups.get(place, ())),
                greedy_rewards={int(place): float(reward) for place, reward in header["greedy_rewards"].items()},
                metrics={str(name): float(value) for name, value in header["metrics"].items()},
            )
            if set(groups) != set(line.delivered):
                raise ValueError(f"it has the groups {sorted(groups)}, expected {sorted(line.delivered)}")
        return line, collected

    def in_flight_after(self, step: int) -> InFlight | None:
        """Return the groups in flight at the end of a batch; None if they were not kept."""
        if self._header(step) is None:
            return None
        with _readable(str(self._path(step))):
            lines = list(self._values(step))
            complete = {str(one["complete"]): one for one in lines if "complete" in one}
            unfinished = {str(one["unfinished"]): one for one in lines if "unfinished" in one}
        return InFlight(complete, unfinished)

    def _header(self, step: int) -> Mapping[str, Any] | None:
        """Return the first object of a file; None without a file of the batch in the log."""
        logged = next((line for line in self._log() if line.step == step), None)
        with suppress(*UNREADABLE, DataError):
            header = next(self._values(step))
            return header if line_of(header["line"]) == logged else None
        return None

    def _log(self) -> Iterator[Collection]:
        return read_log(self._directory.asynchrony)

    def _values(self, step: int) -> Iterator[Any]:
        for text in plain_lines(self._path(step)):
            yield json.loads(text)

    def _path(self, step: int) -> Path:
        return self._directory.batches / f"{step:06d}.jsonl"


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Turn errors of damaged content into `DataError`."""
    try:
        yield
    except UNREADABLE as error:
        raise DataError(
            f"{what} in the folder batches of the run cannot be read ({type(error).__name__}: {error}); remove the "
            "folder: rollouts after the checkpoint are then sampled again"
        ) from error


def complete_of(values: Any) -> tuple[list[Rollout], list[Rollout]]:
    """Return a complete group of `InFlight`, and its greedy answer. Raises `DataError`."""
    with _readable("a complete group"):
        return [from_json(one) for one in values["rollouts"]], [from_json(one) for one in values["greedy"]]


def calls_of(values: Any) -> Calls:
    """Return the calls of an unfinished group of `InFlight`. Raises `DataError`."""
    with _readable("the calls of a group"):
        keys = [Key(seed, temperature) for seed, temperature in values["keys"]]
        return list(zip(keys, from_json(values["calls"]).calls, strict=True))


def _lines(
    line: Collection,
    collected: Collected,
    complete: Mapping[int, tuple[Group, Sequence[Rollout]]],
    unfinished: Mapping[int, Calls],
) -> Iterable[Mapping[str, Any]]:
    yield {"line": line.values, "greedy_rewards": collected.greedy_rewards, "metrics": collected.metrics}
    for rollout in collected.rollouts:
        yield {"delivered": to_json(rollout, shares_prompts=True)}
    for place, (group, greedy) in complete.items():
        yield {
            "complete": place,
            "rollouts": [to_json(one, shares_prompts=True) for one in group],
            "greedy": [to_json(one) for one in greedy],
        }
    for place, calls in unfinished.items():
        together = Rollout(rollout_id=place, group_id=place, calls=tuple(call for _, call in calls))
        yield {
            "unfinished": place,
            "keys": [key for key, _ in calls],
            "calls": to_json(together, shares_prompts=True),
        }
