"""Daemon threads whose result the caller may stop waiting for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


def run_in_abandonable_thread(function: Callable[[], T]) -> Future[T]:
    """Start `function` in a daemon thread and return its future.

    For collectives, which cannot be interrupted when a peer is gone. Unlike threads of `concurrent.futures`, the thread
    does not keep the process alive.
    """
    future: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # the current device is per thread
            future.set_result(function())
        except BaseException as error:  # raised again where the future is read
            future.set_exception(error)

    threading.Thread(target=run, name="lockstep-abandonable", daemon=True).start()
    return future
