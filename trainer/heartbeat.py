"""Whether this rank still moves, for those outside: a file per rank, and the stacks of all threads when it does not.

    heartbeat/rank-0.json    {"rank": 0, "pid": 4711, "update": 12, "stage": "step", "time": 1790000000.0}
    logs/stacks-rank-0.txt   written when a stage outlives the step deadline

Every rank has a deadline of its own, so a hang in a collective shows the stacks of all that wait and of the one that
does not come. The run is not ended: a slow step may be legitimate, and who runs it decides. `faulthandler` writes the
stacks from a thread in C, which needs no interpreter lock.
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
from pathlib import Path
from typing import IO


class Heartbeat:
    """Written when a stage begins. One per process: the dump of stacks is a resource of the process."""

    def __init__(self, directory: Path, *, rank: int, step_timeout_s: float) -> None:
        """directory: of the run. step_timeout_s: stacks are written when a stage takes longer, and again after as long;
        0: never. Raises OSError if the directory is not writable."""
        self._file = directory / "heartbeat" / f"rank-{rank}.json"
        self._rank = rank
        self._step_timeout_s = step_timeout_s
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
        if self._step_timeout_s:
            faulthandler.dump_traceback_later(self._step_timeout_s, repeat=True, file=self._stacks)

    def close(self) -> None:
        """No deadline any more."""
        if self._step_timeout_s:
            faulthandler.cancel_dump_traceback_later()
        self._stacks.close()


class WallTime:
    """The time a run may take, for machines that are taken back at a known hour."""

    def __init__(self, max_hours: float) -> None:
        """max_hours: from now; 0: no limit."""
        self._end = time.monotonic() + 3600 * max_hours if max_hours else float("inf")

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end
