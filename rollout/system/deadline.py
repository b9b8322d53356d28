"""Calls of user functions, sync or async, with a deadline.

Covered: the caller resumes by the deadline; an exception of the function (also `SystemExit`) is returned as a value.

Not covered: nothing is killed. A sync function runs in a daemon thread, which Python cannot stop: after its deadline it
keeps using memory and CPU. With `MAX_ABANDONED` such threads alive, further sync calls are refused. A function that
holds the GIL in C code, exhausts memory or calls `os._exit` takes the process down.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# A sleeping thread costs 8 MB of address space and little else; a few dozen that hang are a bug to report.
MAX_ABANDONED = 64

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
    if is_async(function):
        return await _call_async(function, args, kwargs, timeout_s)
    _abandoned.difference_update([thread for thread in list(_abandoned) if not thread.is_alive()])
    if len(_abandoned) >= MAX_ABANDONED:
        return Finished(error=TooManyAbandoned(f"{len(_abandoned)} earlier calls never returned and still run"))
    return await _call_in_thread(function, args, kwargs, timeout_s)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True if calling it gives a coroutine: `async def`, or an object whose `__call__` is `async def`.

    Also with arguments that are bound by `functools.partial`.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _call_async(function: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> Finished:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return Finished(value=await function(*args, **kwargs))
    except TimeoutError as error:
        return Finished(error=DeadlineExceeded(f"no answer in {timeout_s:g} s") if deadline.expired() else error)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the caller is canceled; otherwise the function raised it
            raise
        return Finished(error=error)
    except (Exception, SystemExit) as error:
        return Finished(error=error)


async def _call_in_thread(function: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> Finished:
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[Finished] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Finished) -> None:
        if not finished.done():
            finished.set_result(result)

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
            return await finished
    except TimeoutError:
        return Finished(error=DeadlineExceeded(f"no answer in {timeout_s:g} s"))
    finally:
        if finished.cancelled():  # by the deadline or by the caller
            _abandoned.add(thread)


def function_name(function: Callable[..., Any]) -> str:
    """Return a readable name: a function's own, or the class of a callable object."""
    return function.__name__ if inspect.isroutine(function) else type(function).__name__
