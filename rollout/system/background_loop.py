"""Event loops that last: one in a daemon thread for engines and episodes, and those for coroutines of user functions.

vLLM's client binds its sockets to the loop of its first call, so everything that uses the engine must run in one loop.
Clients that users keep between calls do the same: `asyncio.run` for each call would leave them in a closed loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Event loop that runs coroutines for synchronous code; usable from any thread but its own.

    `with BackgroundLoop() as loop: result = loop.run(coroutine())`
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lockstep-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine and return its result.

        Raises `TimeoutError` after `timeout` seconds (None: no limit). On timeout or Ctrl-C the coroutine is canceled.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("BackgroundLoop.run was called from its own loop and would deadlock; use await")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except (concurrent.futures.TimeoutError, KeyboardInterrupt):
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine and return its future, for callers in another event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel all tasks and end the thread. Closing twice is allowed."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def __enter__(self) -> BackgroundLoop:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is not KeyboardInterrupt:  # after which the process ends, and a start of an engine blocks the loop
            self.close()


_creation = threading.Lock()


def shared_loop() -> BackgroundLoop:
    """Return the loop of this process for user functions."""
    with _creation:  # threads that ask at once would get a loop each
        return _shared_loop()


@functools.cache
def _shared_loop() -> BackgroundLoop:
    return BackgroundLoop()


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a user function and return its result, always in the same loop of the main or another thread.

    In the main thread it runs there, where it may set signal handlers, and tasks that it leaves behind are canceled.
    """
    if threading.current_thread() is threading.main_thread():
        runner = _main_runner()
        try:
            return runner.run(coroutine)
        finally:
            runner.run(_cancel_all())
    return _opened(shared_loop().run(_caught(coroutine)))


async def in_shared_loop(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run an async function of a user in `shared_loop`, for callers in another loop, which it cannot block."""
    return _opened(await asyncio.wrap_future(shared_loop().submit(_caught(function()))))


@functools.cache
def _main_runner() -> asyncio.Runner:
    return asyncio.Runner()


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


async def _caught(coroutine: Coroutine[Any, Any, T]) -> T | _Raised:
    try:
        return await coroutine
    except BaseException as error:  # SystemExit in a task would end the loop
        return _Raised(error)


def _opened(outcome: T | _Raised) -> T:
    if isinstance(outcome, _Raised):
        raise outcome.error
    return outcome


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
