"""Notices a server that answers nothing any more, while calls wait for it.

A process that is stopped, or a worker that hangs in a collective, keeps its connections open: a request to it waits
as long as its own limit, which must allow for the longest completion. So while requests wait, a small question is
asked in between, whose answer may be expected in seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from rollout.errors import EngineError, LockstepError

T = TypeVar("T")


class Liveness:
    """Watches one server while calls are guarded. All in one event loop."""

    def __init__(self, ask: Callable[[], Awaitable[object]], *, name: str, every_s: float, silent_for_s: float) -> None:
        """
        Args:
            ask: the small question. That it fails is an answer, unless it took `silent_for_s` to fail.
            name: of the server, for the message.
            every_s: time between an answer and the next question.
            silent_for_s: without an answer for so long, the server is taken for dead.
        """
        self._ask = ask
        self._name = name
        self._every_s = every_s
        self._silent_for_s = silent_for_s
        self._num_guarded = 0
        self._num_excused = 0
        self._watch: asyncio.Task[None] | None = None
        self._silence: asyncio.Future[None] | None = None

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call. Raises `EngineError` when the server falls silent, whatever the call itself waits for."""
        if self._watch is None:
            self._silence = asyncio.get_running_loop().create_future()
            self._watch = asyncio.create_task(self._ask_again_and_again(self._silence))
        silence = self._silence
        assert silence is not None
        self._num_guarded += 1
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, silence}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineError(
                f"{self._name} has answered nothing for {self._silent_for_s:g} s while requests wait: it hangs or "
                "cannot be reached; look at its log, start it anew, and resume from the last checkpoint "
                "(raise rollout.silence_timeout_s if it is only slow)"
            )
        finally:
            task.cancel()
            self._num_guarded -= 1
            if self._num_guarded == 0 and self._watch is not None:
                self._watch.cancel()
                self._watch = self._silence = None

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Nothing is expected of the server meanwhile: it is busy with something that has a deadline of its own."""
        self._num_excused += 1
        try:
            yield
        finally:
            self._num_excused -= 1

    async def _ask_again_and_again(self, silence: asyncio.Future[None]) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            asked_at = time.monotonic()
            with suppress(LockstepError):
                await self._ask()
            if time.monotonic() - asked_at >= self._silent_for_s and not self._num_excused:
                silence.set_result(None)
                return
