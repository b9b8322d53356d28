"""Answers of slow calls, kept by request: equal requests, one after the other or at the same time, make one call."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from lockstep.rollout.errors import RewardError

MAX_CHARS = 2**14
"""Longest answer that is kept."""


class AnswerCache:
    """The answers to the last `size` different requests, for callers in any event loop.

    Failures are not kept. Callers that wait for a call share its `RewardError`; if that call ends without an answer in
    any other way, such as its deadline, one of them makes the next call.
    """

    def __init__(self, size: int) -> None:
        """size: maximum number of answers; 0: every request makes a call of its own."""
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        """Least recently used first."""
        self._pending: dict[bytes, Future[str | None]] = {}
        """Calls in progress; their result is None if they ended without an answer or a `RewardError`."""

    async def get(self, key: bytes, call: Callable[[], Awaitable[str]]) -> tuple[str, bool]:
        """Return the answer to a request, and whether it needed no call of its own. Raises what the call raises."""
        if self._size == 0:
            return await call(), False
        while True:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key], True
                pending = self._pending.get(key)
                if pending is None:
                    own = self._pending[key] = Future()
                    break
            # The shield keeps the deadline of one waiting caller from cancelling the future of all.
            answer = await asyncio.shield(asyncio.wrap_future(pending))
            if answer is not None:
                return answer, True
        return await self._lead(key, own, call), False

    async def _lead(self, key: bytes, own: Future[str | None], call: Callable[[], Awaitable[str]]) -> str:
        answer: str | None = None
        failure: RewardError | None = None
        try:
            answer = await call()
            return answer
        except RewardError as error:
            failure = error
            raise
        finally:
            with self._lock:
                del self._pending[key]
                if answer is not None and len(answer) <= MAX_CHARS:
                    self._kept[key] = answer
                    if len(self._kept) > self._size:
                        self._kept.popitem(last=False)
            if failure is not None:
                own.set_exception(failure)
            else:
                own.set_result(answer)
