"""Detection of a server that stops answering while calls wait for it.

A stopped process, or a worker that hangs in a collective, keeps its connections open, so a request waits until its own
limit, which must allow for the longest completion. While requests wait, the server is therefore probed with a small
request that a healthy one answers within seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from lockstep.rollout.errors import EngineLostError, LockstepError

T = TypeVar("T")


class Liveness:
    """Watches one server while calls are guarded, in one event loop."""

    def __init__(self, probe: Callable[[], Awaitable[object]], *, name: str, every_s: float, silence_s: float) -> None:
        """probe: the small request; a failure counts as an answer, unless it took `silence_s`, the time without an
        answer after which the server counts as dead. every_s: time between an answer and the next probe."""
        self._probe = probe
        self._name = name
        self._every_s = every_s
        self._silence_s = silence_s
        self._num_guarded = 0
        self._num_suspended = 0
        self._watch: asyncio.Task[None] | None = None
        self._silence: asyncio.Future[str] | None = None

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call. Raises `EngineLostError` when the server falls silent or is given up, regardless of the call's
        own limit."""
        if self._watch is None:
            self._silence = asyncio.get_running_loop().create_future()
            self._watch = asyncio.create_task(self._probe_repeatedly())
        silence = self._silence
        assert silence is not None
        self._num_guarded += 1
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, silence}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineLostError(silence.result())
        finally:
            task.cancel()
            self._num_guarded -= 1
            if self._num_guarded == 0 and self._watch is not None:
                self._watch.cancel()
                self._watch = self._silence = None

    def give_up(self, reason: str) -> None:
        """End the calls that wait."""
        if self._silence is not None and not self._silence.done():
            self._silence.set_result(reason)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Ignore silence in the block: the server is busy with a call that has a deadline of its own."""
        self._num_suspended += 1
        try:
            yield
        finally:
            self._num_suspended -= 1

    async def _probe_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            probed_at = time.monotonic()
            with suppress(LockstepError):
                await self._probe()
            if time.monotonic() - probed_at >= self._silence_s and not self._num_suspended:
                self.give_up(
                    f"{self._name} has answered nothing for {self._silence_s:g} s while requests wait: it hangs or "
                    "is unreachable; read its log and restart it (raise rollout.silence_timeout_s if it is only slow)"
                )
                return
