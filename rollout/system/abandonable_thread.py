"""Work on a thread that can be abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


def in_daemon_thread(act: Callable[[], T]) -> Future[T]:
    """Start `act` and return at once.

    A collective whose peer is gone cannot be interrupted, only left behind: the caller stops waiting for the future,
    and the thread does not keep the process alive (those of `concurrent.futures` do).
    """
    future: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # the current device belongs to a thread
            future.set_result(act())
        except BaseException as error:  # carried to whoever waits, whatever it is
            future.set_exception(error)

    threading.Thread(target=run, name="lockstep-abandonable", daemon=True).start()
    return future
