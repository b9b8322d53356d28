"""Event loop whose time is virtual: when nothing can run, its clock jumps to the next timer.

A wait of the simulation costs no time. The clock stands still while something real is awaited: an answer over HTTP, a
reward function in its thread, or a coroutine that the program's main thread has not asked for.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lockstep.rollout.system.background_loop import BackgroundLoop

T = TypeVar("T")

POLL_S, THREAD_POLL_S = 0.1, 0.001
"""Longest sleeps while the clock stands still [s]. A thread of a reward may end shortly after it has answered."""
REWARD_THREADS = "deadline:"
"""Beginning of their names (`rollout/system/deadline.py`)."""


class VirtualClock:
    """Time of one loop."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual time [s]."""
        self._strangers = set(threading.enumerate())
        """Threads older than the clock; a reward that never answered may leave one behind."""
        self._waiters = 0
        self._holds = 0

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Let the clock run in this block; in the loop's thread."""
        self._waiters += 1
        try:
            yield
        finally:
            self._waiters -= 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the clock in this block, because something real is awaited; in the loop's thread."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def stands_s(self) -> float:
        """Return the longest real sleep before the clock is asked again [s]; 0: it may jump."""
        if self._holds or not self._waiters:
            return POLL_S
        threads = set(threading.enumerate()) - self._strangers
        calls = any(thread.name.startswith(REWARD_THREADS) for thread in threads)
        return THREAD_POLL_S if calls else 0.0


class _Selector(selectors.DefaultSelector):
    """Selector that moves the clock instead of waiting."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if sleep_s := self._clock.stands_s():
            return super().select(sleep_s)
        if timeout is None:
            return super().select(None)
        self._clock.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Selector(clock))
        self._virtual_clock = clock

    def time(self) -> float:
        return self._virtual_clock.now


class VirtualBackgroundLoop(BackgroundLoop):
    """`BackgroundLoop` with a virtual clock, which runs only while a thread waits in `run`."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._loop = VirtualLoop(self.clock)
        self._thread = threading.Thread(target=self._loop.run_forever, name="lockstep-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        async def with_clock() -> T:
            with self.clock.runs():
                return await coroutine

        return super().run(with_clock(), timeout)

    def run_real(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine while the clock stands still."""
        return super().run(coroutine)
