"""How long the compute threads of torch wait for work before they sleep, on a CPU.

Every parallel operation starts and joins the threads of libgomp, and a thread that waits occupies its core. libgomp's
default is to wait for milliseconds. If another process needs a core, the waiting threads keep theirs, the thread that
they wait for has none, and an operation of 0.1 ms takes a scheduler's time slice: an update took 3 times as long with
one of two cores taken. With a short wait it took 1.8 times as long, and as long as before on an idle machine
(`benchmarks/busy_core.py`). Waiting not at all (`OMP_WAIT_POLICY=passive`) costs a third on an idle machine.
"""

from __future__ import annotations

import os

SPIN_COUNT = 1000
"""Rounds of waiting: tens of microseconds."""
CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables by which users choose the wait themselves."""


def waiting() -> dict[str, str]:
    """Return the environment variables that set the wait; none if users have chosen it."""
    return {} if any(name in os.environ for name in CHOICES) else {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


def wait_briefly() -> None:
    """Set the wait for this process and its children, unless the environment does; before torch is imported."""
    os.environ.update(waiting())
