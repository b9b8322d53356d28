"""Turns of two trainer processes: each makes one update on request, and then waits.

So both are warm, other load affects both, and neither computes while the other is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from torch import distributed

GO, DONE = "BENCHMARK_GO_FD", "BENCHMARK_DONE_FD"


class Turn:
    """The trainer's end. The first turn begins with the process, so it includes the startup.

    With several ranks only the first has pipes. The others wait with it; otherwise they would compute in the other
    trainer's turn.
    """

    def __init__(self) -> None:
        self.is_heard = GO in os.environ
        self._started = time.perf_counter()
        if self.is_heard:
            self._go = os.fdopen(int(os.environ[GO]))
            self._done = os.fdopen(int(os.environ[DONE]), "w")

    def over(self, **facts: float) -> None:
        """Report the update, and wait for the next turn; call it on every rank."""
        wait_for_all_ranks()
        if self.is_heard:
            seconds = time.perf_counter() - self._started
            print(json.dumps({"seconds": seconds, **facts}), file=self._done, flush=True)
            self._go.readline()
        wait_for_all_ranks()
        self._started = time.perf_counter()


def wait_for_all_ranks() -> None:
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()


class Opponent:
    """The benchmark's end: one trainer process."""

    def __init__(self, script: Path, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        go_read, go_write = os.pipe()
        done_read, done_write = os.pipe()
        self._go, self._done = os.fdopen(go_write, "w"), os.fdopen(done_read)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**os.environ, **environment, GO: str(go_read), DONE: str(done_write)},
                pass_fds=(go_read, done_write),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        os.close(go_read)
        os.close(done_write)

    def first_turn(self) -> dict[str, Any]:
        """Wait for the first update."""
        return self._answer()

    def turn(self) -> dict[str, Any]:
        """Request one update; return its report, with `seconds` by the trainer and `cpu_s` of all its processes."""
        before = self._cpu_seconds()
        print("go", file=self._go, flush=True)
        answer = self._answer()
        return {**answer, "cpu_s": self._cpu_seconds() - before}

    def _cpu_seconds(self) -> float:
        """Return the CPU time of the process and its children (an engine), which other load disturbs least."""
        family = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (family, *family.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def close(self) -> None:
        """Wait for the end of the process after its last turn; kill it if it does not end."""
        self._go.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._done.readline()
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise RuntimeError(f"the trainer ended with status {self._process.wait()}; the end of {self.log}:\n{tail}")
        return json.loads(line)
