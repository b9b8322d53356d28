"""An asyncio event loop in a daemon thread, shared by engines and episodes.

vLLM's client binds its sockets to the loop of its first call, so everything that uses the engine must run in one loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
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
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> BackgroundLoop:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is not KeyboardInterrupt:  # after which the process ends, and a start of an engine blocks the loop
            self.close()
