"""Whether this rank still moves, for those outside: a file per rank, and the stacks of all threads when it does not.

    heartbeat/rank-0.json    {"rank": 0, "pid": 4711, "update": 12, "stage": "step", "time": 1790000000.0}
    logs/stacks-rank-0.txt   written when a stage outlives the step deadline

Every rank has a deadline of its own, so a hang in a collective shows the stacks of all that wait and of the one that
does not come. Whether the run ends there is a setting: a slow step may be legitimate. `faulthandler` writes the stacks,
and ends the process, from a thread in C, which needs no interpreter lock. Ranks begin a stage together, so their
deadlines are over together, before a launcher that sees the first one end can end the others.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO


class Heartbeat:
    """Written when a stage begins. One per process: the dump of stacks is a resource of the process."""

    def __init__(self, directory: Path, *, rank: int, step_timeout_s: float, ends_run: bool = False) -> None:
        """directory: of the run. step_timeout_s: stacks are written when a stage takes longer, and again after as long;
        0: never. ends_run: this process ends then, with status 1. Raises OSError if the directory is not writable."""
        self._file = directory / "heartbeat" / f"rank-{rank}.json"
        self._rank = rank
        self._step_timeout_s = step_timeout_s
        self._ends_run = ends_run
        self._last_words: threading.Timer | None = None
        self._file.parent.mkdir(parents=True, exist_ok=True)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        self._stacks: IO[str] = (directory / "logs" / f"stacks-rank-{rank}.txt").open("a")

    def beat(self, stage: str, *, update: int) -> None:
        """A stage begins, and with it the deadline, anew. A disk that is full does not end a run."""
        line = {"rank": self._rank, "pid": os.getpid(), "update": update, "stage": stage, "time": time.time()}
        temporary = self._file.with_suffix(".partial")
        try:
            temporary.write_text(json.dumps(line) + "\n")
            temporary.replace(self._file)  # a reader sees the old line or the new one
        except OSError:
            # What a watcher then sees, a heartbeat that stands still, is what it should see.
            temporary.unlink(missing_ok=True)
        if not self._step_timeout_s:
            return
        if self._ends_run:
            self._announce(stage, update)
        faulthandler.dump_traceback_later(
            self._step_timeout_s, repeat=not self._ends_run, file=self._stacks, exit=self._ends_run
        )

    def close(self) -> None:
        """No deadline any more."""
        if self._last_words is not None:
            self._last_words.cancel()
        if self._step_timeout_s:
            faulthandler.cancel_dump_traceback_later()
        self._stacks.close()

    def _announce(self, stage: str, update: int) -> None:
        """A sentence just before the end. It comes from a thread in Python, so a hang that holds the interpreter lock
        is without it; the stacks and the end come all the same."""
        if self._last_words is not None:
            self._last_words.cancel()
        sentence = (
            f"lockstep: rank {self._rank}: {stage} of update {update} has taken {self._step_timeout_s:g} s, so the run "
            f"ends; every rank leaves its stacks in {self._stacks.name}. Raise step_timeout_s if it was only slow, or "
            "set resume=auto to go on from the last checkpoint"
        )
        in_s = self._step_timeout_s - min(1.0, 0.1 * self._step_timeout_s)
        self._last_words = threading.Timer(in_s, print, (sentence,), {"file": sys.stderr, "flush": True})
        self._last_words.daemon = True
        self._last_words.start()


class WallTime:
    """The time a run may take, for machines that are taken back at a known hour."""

    def __init__(self, max_hours: float) -> None:
        """max_hours: from now; 0: no limit."""
        self._end = time.monotonic() + 3600 * max_hours if max_hours else float("inf")

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end
