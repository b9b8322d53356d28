"""Turns of two trainer processes: each makes one update on request, and then waits.

So both are warm, other load affects both, and neither computes while the other is timed. A process whose benchmark
ends early, or is killed, ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
from torch import distributed, get_num_threads, set_num_threads  # not by torch's name, which vLLM replaces on a CPU

GO, DONE = "BENCHMARK_GO_FD", "BENCHMARK_DONE_FD"
FINISH = "finish"
"""Answer to a report after which the trainer goes on to its end alone."""
END_S = 600.0
"""Time for a trainer to end after its last turn: it may save its model [s]."""


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

    def begin(self) -> None:
        """Leave out what came before: call it after the startup."""
        self._started = time.perf_counter()

    def over(self, **facts: float) -> None:
        """Report the update, and wait for the next turn; call it on every rank. facts: may replace `seconds`."""
        wait_for_all_ranks()
        if self.is_heard:
            seconds = time.perf_counter() - self._started
            print(json.dumps({"seconds": seconds, "threads": get_num_threads(), **facts}), file=self._done, flush=True)
            answer = self._go.readline().split()
            if not answer:
                raise SystemExit("the benchmark has ended")
            if answer[0].isdigit():
                set_num_threads(int(answer[0]))
        wait_for_all_ranks()
        self.begin()


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

    def turn(self, threads: int | None = None) -> dict[str, Any]:
        """Request one update; return its report, with `seconds` by the trainer and `cpu_s` of all its processes.

        threads: compute threads of the trainer's process from now on; None: unchanged.
        """
        before = self._cpu_seconds()
        print(threads or "go", file=self._go, flush=True)
        answer = self._answer()
        return {**answer, "cpu_s": self._cpu_seconds() - before}

    def _cpu_seconds(self) -> float:
        """Return the CPU time of the process and its children (an engine), which other load disturbs least."""
        family = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (family, *family.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def close(self) -> None:
        """Let the process go on to its end and wait for it; kill it if it does not end."""
        try:
            print(FINISH, file=self._go, flush=True)
            self._go.close()
            self._process.wait(timeout=END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()

    def kill(self) -> None:
        """End the process and its children at once."""
        try:
            trainer = psutil.Process(self._process.pid)
            family = [*trainer.children(recursive=True), trainer]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close after the last turn; kill after an error."""
        if kind is None:
            self.close()
        else:
            self.kill()

    def _answer(self) -> dict[str, Any]:
        line = self._done.readline()
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise RuntimeError(f"the trainer ended with status {self._process.wait()}; the end of {self.log}:\n{tail}")
        return json.loads(line)
