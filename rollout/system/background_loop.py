"""One asyncio loop in a daemon thread, shared by the engine and the episodes.

The trainer is synchronous, the engine and the episodes are not. vLLM's client binds its sockets to the
loop it is first used in, so everything that touches the engine must run in one and the same loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for synchronous code; usable from any thread but its own.

    `with BackgroundLoop() as loop: result = loop.run(coroutine())`
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lockstep-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Wait for the coroutine's result.

        Args:
            coroutine: cancelled if the wait ends early, by timeout or by Ctrl-C.
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: after `timeout` seconds.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("BackgroundLoop.run was called from its own loop, which would wait for itself; await it")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except (concurrent.futures.TimeoutError, KeyboardInterrupt):
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs and end the thread. Closing twice is allowed."""
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

    def __exit__(self, *_: object) -> None:
        self.close()
