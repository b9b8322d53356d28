"""Processes that keep cores busy, as another program of the machine would."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

SPIN = """
import os, sys
core, parent = int(sys.argv[1]), int(sys.argv[2])
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {core})
print("spinning", flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""A process that computes on one core until its parent ends, in whatever way."""


@contextlib.contextmanager
def busy_cores(cores: Sequence[int]) -> Iterator[None]:
    """Keep these cores busy, one process for each entry, and end the processes on every way out."""
    with contextlib.ExitStack() as stack:
        processes = []
        for core in cores:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", SPIN, str(core), str(os.getpid())], stdout=subprocess.PIPE
            )
            stack.callback(_end, process)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
