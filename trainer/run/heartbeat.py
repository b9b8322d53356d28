"""Liveness of a rank: a heartbeat file, stack traces of a hanging stage, and the wall-clock limit.

    heartbeat/rank-0.json    {"rank": 0, "pid": 4711, "update": 12, "stage": "step", "time": 1790000000.0}
    logs/stacks-rank-0.txt   written when a stage exceeds the step timeout

Every rank has its own deadline, so a hang in a collective shows the stacks of the waiting ranks and of the missing
one. A setting decides if the run then ends, since a slow step may be legitimate. `faulthandler` writes the stacks, and
exits, from a C thread that needs no interpreter lock. Ranks begin a stage together, so their deadlines expire together,
before a launcher that sees the first exit can kill the others.
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
    """Writer of the heartbeat file. One per process, because faulthandler has one timer per process."""

    def __init__(self, directory: Path, *, rank: int, step_timeout_s: float, ends_run: bool = False) -> None:
        """directory: of the run. step_timeout_s: a longer stage writes stacks, repeatedly; 0: never. ends_run: exit
        with status 1 at the first time. Raises OSError if the directory is not writable."""
        self._file = directory / "heartbeat" / f"rank-{rank}.json"
        self._rank = rank
        self._step_timeout_s = step_timeout_s
        self._ends_run = ends_run
        self._announcement: threading.Timer | None = None
        self._file.parent.mkdir(parents=True, exist_ok=True)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        self._stacks: IO[str] = (directory / "logs" / f"stacks-rank-{rank}.txt").open("a")

    def beat(self, stage: str, *, update: int) -> None:
        """Record the start of a stage and restart its deadline. A full disk does not end the run."""
        line = {"rank": self._rank, "pid": os.getpid(), "update": update, "stage": stage, "time": time.time()}
        temporary = self._file.with_suffix(".partial")
        try:
            temporary.write_text(json.dumps(line) + "\n")
            temporary.replace(self._file)  # atomic: a reader sees the old line or the new one
        except OSError:
            temporary.unlink(missing_ok=True)
        if not self._step_timeout_s:
            return
        if self._ends_run:
            self._announce(stage, update)
        faulthandler.dump_traceback_later(
            self._step_timeout_s, repeat=not self._ends_run, file=self._stacks, exit=self._ends_run
        )

    def close(self) -> None:
        """Cancel the deadline."""
        if self._announcement is not None:
            self._announcement.cancel()
        if self._step_timeout_s:
            faulthandler.cancel_dump_traceback_later()
        self._stacks.close()

    def _announce(self, stage: str, update: int) -> None:
        """Schedule a message just before the exit. A hang that holds the interpreter lock suppresses it, because a
        Python thread prints it; stacks and exit still happen."""
        if self._announcement is not None:
            self._announcement.cancel()
        message = (
            f"lockstep: rank {self._rank}: {stage} of update {update} has taken {self._step_timeout_s:g} s, so the run "
            f"ends; every rank writes its stacks to {self._stacks.name}. Raise step_timeout_s if the stage was only "
            "slow, or set resume=auto to continue from the last checkpoint"
        )
        in_s = self._step_timeout_s - min(1.0, 0.1 * self._step_timeout_s)
        self._announcement = threading.Timer(in_s, print, (message,), {"file": sys.stderr, "flush": True})
        self._announcement.daemon = True
        self._announcement.start()


class WallTime:
    """Wall-clock limit of a run, for machines with an allocation that ends."""

    def __init__(self, max_hours: float) -> None:
        """max_hours: counted from now; 0: no limit."""
        self._end = time.monotonic() + 3600 * max_hours if max_hours else float("inf")

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end
