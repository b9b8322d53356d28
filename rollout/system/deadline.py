"""Run somebody else's Python function, sync or async, and wait for it no longer than a deadline.

Covered: the caller always gets its turn back in time; whatever the function raises comes back as a value
(`SystemExit` included), so that one bad tool or reward cannot end the event loop it runs in.

Not covered: nothing is killed. A sync function runs in a daemon thread, and Python cannot stop a thread: one that
hangs is abandoned, goes on using memory and CPU, and dies with the process. After `MAX_ABANDONED` such threads
further sync calls are refused, so that a leak becomes an error instead of a slow death. A function that holds the GIL
in C code, exhausts memory or calls `os._exit` takes the process with it: only a process of its own contains that.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A thread costs 8 MB of address space and little else while it sleeps; a few dozen that hang are a bug to report.
MAX_ABANDONED = 64


class DeadlineExceeded(Exception):
    """The function did not return in time."""


class TooManyAbandoned(Exception):
    """So many calls hang in the background that no further one is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What came of a call: a value, or the error that was raised in its place."""

    value: Any = None
    error: BaseException | None = None


class _Abandoned:
    """Counts threads that outlived their deadline and still run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, change: int) -> None:
        with self._lock:
            self._count += change

    @property
    def count(self) -> int:
        return self._count


abandoned = _Abandoned()


async def call_with_deadline(function: Callable[..., Any], /, *args: Any, timeout_s: float, **kwargs: Any) -> Finished:
    """Call `function(*args, **kwargs)`; sync functions run in a thread, async ones in this loop.

    Returns the value or the error; `DeadlineExceeded` after `timeout_s` seconds. Cancelling the caller
    cancels an async function, and abandons a sync one.
    """
    if is_async(function):
        return await _call_async(function, args, kwargs, timeout_s)
    if abandoned.count >= MAX_ABANDONED:
        return Finished(error=TooManyAbandoned(f"{abandoned.count} earlier calls never returned and still run"))
    return await _call_in_thread(function, args, kwargs, timeout_s)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: `async def`, or an object whose `__call__` is `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _call_async(function: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> Finished:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return Finished(value=await function(*args, **kwargs))
    except TimeoutError as error:
        return Finished(error=DeadlineExceeded(f"no answer in {timeout_s:g} s") if deadline.expired() else error)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # we are being cancelled, not the function giving up by itself
            raise
        return Finished(error=error)
    except (Exception, SystemExit) as error:
        return Finished(error=error)


async def _call_in_thread(function: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> Finished:
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[Finished] = loop.create_future()
    context = contextvars.copy_context()
    lock = threading.Lock()
    state = {"returned": False, "abandoned": False}

    def deliver(result: Finished) -> None:
        if not finished.done():
            finished.set_result(result)

    def work() -> None:
        try:
            result = Finished(value=context.run(function, *args, **kwargs))
        except BaseException as error:  # the caller decides what a SystemExit of somebody's function means
            result = Finished(error=error)
        with lock:
            state["returned"] = True
            if state["abandoned"]:
                abandoned.add(-1)
                return
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result)

    # A daemon thread for each call (about 0.1 ms), not an executor: its threads are joined at exit, and one that hangs
    # would keep a finished run from ending.
    threading.Thread(target=work, name=f"deadline:{describe(function)}", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await finished
    except TimeoutError:
        return Finished(error=DeadlineExceeded(f"no answer in {timeout_s:g} s"))
    finally:
        with lock:
            if not state["returned"]:
                state["abandoned"] = True
                abandoned.add(1)


def describe(function: Callable[..., Any]) -> str:
    """A name for people: functions have one, callable objects are named by their class."""
    return function.__name__ if inspect.isroutine(function) else type(function).__name__
