"""Exit of a process whose parent is gone, so that ranks and engines never outlive what started them."""

from __future__ import annotations

import multiprocessing.connection
import os
import sys
import threading
import time

POLL_S = 0.5


def exit_when_orphaned(*, sentinel: int | None = None, message: str = "") -> None:
    """Watch the parent in a thread, and exit with status 1 when it ends, without waiting for anything.

    Args:
        sentinel: of a parent from `multiprocessing`, which tells at once; the parent's pid is watched as well, in case
            a forked sibling holds the sentinel open.
        message: written to stderr before the exit.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            if sentinel is None:
                time.sleep(POLL_S)
            elif multiprocessing.connection.wait([sentinel], timeout=POLL_S):
                break
        try:
            if message:
                os.write(sys.stderr.fileno(), f"\nlockstep: {message}\n".encode())
        finally:  # stderr may be a pipe to the parent
            os._exit(1)  # a clean exit would wait for threads blocked in collectives

    threading.Thread(target=watch, name="lockstep-orphan-guard", daemon=True).start()
