"""Calls of user functions, sync or async, with a deadline.

Covered: the caller resumes by the deadline; an exception of the function (also `SystemExit`) is returned as a value.

Not covered: nothing is killed. An async function that ignores its cancellation stays in the loop. A sync function runs
in a daemon thread, which Python cannot stop: after its deadline it keeps using memory and CPU. With `MAX_ABANDONED`
such threads alive, further sync calls are refused. A function that holds the GIL in C code, exhausts memory or calls
`os._exit` takes the process down.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

# A sleeping thread costs 8 MB of address space and little else; a few dozen that hang are a bug to report.
MAX_ABANDONED = 64

GRACE_S = 1.0
"""Time for an async function, canceled at its deadline, to clean up before it is left alone [s]."""

_abandoned: set[threading.Thread] = set()
"""Threads that outlived their deadline."""


class DeadlineExceeded(Exception):
    """The function did not return in time."""


class TooManyAbandoned(Exception):
    """`MAX_ABANDONED` earlier calls still run; the function was not called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Result of a call: a value, or the error raised instead."""

    value: Any = None
    error: BaseException | None = None


async def call_with_deadline(function: Callable[..., Any], /, *args: Any, timeout_s: float, **kwargs: Any) -> Finished:
    """Call `function(*args, **kwargs)`; sync functions run in a thread, async ones in this loop.

    Returns the value or the error; `DeadlineExceeded` after `timeout_s` seconds. Cancelling the caller cancels an async
    function and abandons a sync one.
    """
    with uncounted():
        if is_async(function):
            return await _call_async(function, args, kwargs, timeout_s)
        return await _call_in_thread(function, args, kwargs, timeout_s)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True if calling it gives a coroutine: `async def`, or an object whose `__call__` is `async def`.

    Also with arguments that are bound by `functools.partial`.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _call_async(function: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> Finished:
    async def caught() -> Finished:
        try:
            return Finished(value=await function(*args, **kwargs))
        except BaseException as error:  # also what would end the loop, as SystemExit in a task does
            return Finished(error=error)

    task = asyncio.create_task(caught())  # of its own: a function may ignore that it is canceled
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        return task.result() if task.done() else Finished(error=DeadlineExceeded(f"no answer in {timeout_s:g} s"))
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)


async def _call_in_thread(function: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> Finished:
    _abandoned.difference_update([thread for thread in list(_abandoned) if not thread.is_alive()])
    if len(_abandoned) >= MAX_ABANDONED:
        return Finished(error=TooManyAbandoned(f"{len(_abandoned)} earlier calls never returned and still run"))
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Finished] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Finished) -> None:
        if not future.done():
            future.set_result(result)

    def work() -> None:
        try:
            result = Finished(value=context.run(function, *args, **kwargs))
        except BaseException as error:  # the caller decides how to treat SystemExit
            result = Finished(error=error)
        with suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(deliver, result)

    # A daemon thread per call (about 0.1 ms), not an executor: executor threads are joined at exit, so one that hangs
    # would keep a finished run from ending.
    thread = threading.Thread(target=work, name=f"deadline:{function_name(function)}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the system allows no further thread
        return Finished(error=error)
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except TimeoutError:
        return Finished(error=DeadlineExceeded(f"no answer in {timeout_s:g} s"))
    finally:
        if future.cancelled():  # by the deadline or by the caller
            _abandoned.add(thread)


def function_name(function: Callable[..., Any]) -> str:
    """Return a readable name: a function's own, or the class of a callable object."""
    return function.__name__ if inspect.isroutine(function) else type(function).__name__


class Clock:
    """Limit on the time that one call takes by itself, without its waits under `uncounted`."""

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        """give_up: called if the function ignores its cancellation."""
        self._limit_s = self._left_s = limit_s
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        """The caller, while the function runs and has time left."""
        self._num_waits = 0

    async def run(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Await `function()` in the task of the caller. Raises `DeadlineExceeded`."""
        task = self._task = asyncio.current_task()
        assert task is not None
        canceled_before = task.cancelling()
        token = _clock.set(self)
        self._start()
        try:
            return await function()
        finally:
            _clock.reset(token)
            self._stop()
            has_expired, self._task = self._task is None, None
            if has_expired and task.uncancel() <= canceled_before:
                raise DeadlineExceeded(f"no answer in {self._limit_s:g} s")

    def wait(self) -> None:
        self._num_waits += 1
        if self._num_waits == 1 and self._task is not None and self._timer is not None:
            self._left_s = self._timer.when() - self._loop.time()
            self._stop()

    def resume(self) -> None:
        self._num_waits -= 1
        if not self._num_waits and self._task is not None:
            self._start()

    def _start(self) -> None:
        self._timer = self._loop.call_later(self._left_s, self._expire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        assert self._task is not None
        self._task.cancel()
        self._task = None
        self._timer = self._loop.call_later(GRACE_S, self._give_up)


_clock: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("clock", default=None)


@contextmanager
def uncounted() -> Iterator[None]:
    """Stop the clock of the call that runs: it waits for the engine, for a place, or for what has its own deadline."""
    clock = _clock.get()
    if clock is not None:
        clock.wait()
    try:
        yield
    finally:
        if clock is not None:
            clock.resume()
