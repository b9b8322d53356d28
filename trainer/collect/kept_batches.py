"""Batches that a run keeps on disk until no checkpoint needs them: after a kill they are trained again as they were.

    checkpoint         batch 8            batch 9            kill
        │       collected, trained   collected, half trained │
        └─ resumed: batch 8 from its file, batch 9 from its file, batch 10 from the groups in flight at the end of 9

The file of a batch has what it gave to training, and the groups that were complete and waited. It belongs to the line
of the log that it repeats (`collect_log.py`); without that line it is of a course that the run has left. The calls of
groups that are sampled are in a file of their own. It is written before each batch, because the weight sync before it
has brought the tokens of calls that it interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout
from lockstep.rollout.rollout_lines import as_text, rollout_line, to_json
from lockstep.rollout.saved_rollouts import from_json
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
    calls: Mapping[str, Any]
    """Calls with their keys. A group that is missing begins again; one that is complete may be here, too."""


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
    ) -> None:
        """Write a batch, and remove those that no checkpoint needs. complete: groups that wait."""

        def write() -> None:
            _write(self._path(line.step), _lines(line, collected, complete))
            # The batch before a checkpoint has the groups that were in flight there.
            needed = min([line.step, *self._checkpointed()]) - 1
            for path in self._directory.batches.glob("*.jsonl"):
                if path.stem.isdecimal() and int(path.stem) < needed:
                    path.unlink()

        self._tolerating(write)

    def write_calls(self, calls: Mapping[int, Calls]) -> None:
        """Write the calls of all groups in flight, in place of earlier ones."""
        self._tolerating(lambda: _write(self._calls, map(_calls_line, calls.items())))

    def forget_calls(self) -> None:
        """Remove the calls: their groups begin again."""
        self._tolerating(lambda: self._calls.unlink(missing_ok=True))

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._directory.batches, ignore_errors=True)

    def _tolerating(self, write: Callable[[], object]) -> None:
        """Write, or let the run go on without after one warning."""
        if self._is_given_up:
            return
        try:
            write()
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
        """Return the number of batches from this one on that can be repeated, and say if the log has more."""
        count = 0
        while self._header(step + count) is not None:
            count += 1
        if others := sum(line.step >= step + count for line in self._log()):
            self.say(f"batches after the checkpoint that were not kept, and are collected again: {others}")
        return count

    def read(self, step: int) -> tuple[Collection, Collected]:
        """Return a batch that `count_from` counts. Raises `DataError` for a damaged file."""
        lines = _values(self._path(step))
        with _readable(str(self._path(step))):
            header = next(lines, {})
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
        calls: list[Any] = []
        with _readable("the groups in flight"):
            complete = {str(one["complete"]): one for one in _values(self._path(step)) if "complete" in one}
            if self._calls.exists():
                calls += _values(self._calls)
            return InFlight(complete, {str(one["place"]): one for one in calls})

    def _header(self, step: int) -> Mapping[str, Any] | None:
        """Return the first object of a file; None without a file of the batch in the log."""
        logged = next((line for line in self._log() if line.step == step), None)
        with suppress(*UNREADABLE, DataError):
            header = next(_values(self._path(step)), {})
            return header if line_of(header["line"]) == logged else None
        return None

    def _log(self) -> Iterator[Collection]:
        return read_log(self._directory.asynchrony)

    def _path(self, step: int) -> Path:
        return self._directory.batches / f"{step:06d}.jsonl"

    @property
    def _calls(self) -> Path:
        return self._directory.batches / "calls.jsonl"


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
    """Return the calls of a group of `InFlight`. Raises `DataError`."""
    with _readable("the calls of a group"):
        keys = [Key(seed, temperature) for seed, temperature in values["keys"]]
        return list(zip(keys, from_json(values["calls"]).calls, strict=True))


def _write(path: Path, lines: Iterable[str]) -> None:
    content = "".join(line + "\n" for line in lines).encode()
    write_whole(path, content + json.dumps({"sha256": hashlib.sha256(content).hexdigest()}).encode() + b"\n")


def _values(path: Path) -> Iterator[Any]:
    """Yield the objects of a file. Raises ValueError after the last one if the file is not what was written."""
    digest, last = hashlib.sha256(), None
    for text in plain_lines(path):
        last = json.loads(text)
        if "sha256" in last:
            break
        digest.update(text.encode())
        yield last
    if last is None or last.get("sha256") != digest.hexdigest():
        raise ValueError("it is not what was written")


def _lines(
    line: Collection, collected: Collected, complete: Mapping[int, tuple[Group, Sequence[Rollout]]]
) -> Iterable[str]:
    header = {"line": line.values, "greedy_rewards": collected.greedy_rewards, "metrics": collected.metrics}
    yield json.dumps(header, default=as_text)
    for rollout in collected.rollouts:
        yield f'{{"delivered": {rollout_line(rollout)}}}'
    for place, (group, greedy) in complete.items():
        rollouts, answers = (", ".join(map(rollout_line, some)) for some in (group, greedy))
        yield f'{{"complete": {place}, "rollouts": [{rollouts}], "greedy": [{answers}]}}'


def _calls_line(group: tuple[int, Calls]) -> str:
    place, calls = group
    together = Rollout(rollout_id=place, group_id=place, calls=tuple(call for _, call in calls))
    values = {"place": place, "keys": [key for key, _ in calls], "calls": to_json(together, shares_prompts=True)}
    return json.dumps(values, default=as_text)
