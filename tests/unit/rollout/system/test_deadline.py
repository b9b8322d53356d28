"""Calls of user functions with a deadline: results, errors, and threads that outlive it."""

from __future__ import annotations

import asyncio
import functools
import threading
import time

import pytest

from lockstep.rollout.system import deadline
from lockstep.rollout.system.deadline import DeadlineExceeded, TooManyAbandoned, call_with_deadline


async def test_sync_and_async_functions_return_their_value():
    async def double(value: int) -> int:
        return 2 * value

    assert (await call_with_deadline(double, 3, timeout_s=5)).value == 6
    assert (await call_with_deadline(lambda value: 2 * value, 3, timeout_s=5)).value == 6


async def test_an_async_object_is_awaited_also_with_bound_arguments():
    class Double:
        async def __call__(self, value: int, *, plus: int) -> int:
            return 2 * value + plus

    assert (await call_with_deadline(functools.partial(Double(), plus=1), 3, timeout_s=5)).value == 7


@pytest.mark.parametrize("error", [KeyError, SystemExit, TimeoutError, asyncio.CancelledError])
async def test_an_error_of_the_function_is_returned_as_a_value(error: type[BaseException]):
    def fails() -> None:
        raise error("broken")

    async def fails_async() -> None:
        raise error("broken")

    for function in (fails, fails_async):
        assert type((await call_with_deadline(function, timeout_s=5)).error) is error


async def test_the_caller_resumes_at_the_deadline():
    release = threading.Event()
    started = time.monotonic()
    for function in (release.wait, lambda: release.wait(), asyncio.Event().wait):
        assert isinstance((await call_with_deadline(function, timeout_s=0.05)).error, DeadlineExceeded)
    assert time.monotonic() - started < 20  # it would wait without an end
    release.set()


async def test_sync_calls_are_refused_while_too_many_hang_and_accepted_once_they_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deadline, "MAX_ABANDONED", 2)
    monkeypatch.setattr(deadline, "_abandoned", set())
    release = threading.Event()
    await call_with_deadline(release.wait, timeout_s=0.05)
    canceled = asyncio.ensure_future(call_with_deadline(release.wait, timeout_s=30))
    await asyncio.sleep(0.05)
    canceled.cancel()  # abandons its thread, too
    with pytest.raises(asyncio.CancelledError):
        await canceled
    assert isinstance((await call_with_deadline(int, timeout_s=5)).error, TooManyAbandoned)
    hanging = list(deadline._abandoned)
    release.set()
    for thread in hanging:
        thread.join(timeout=5)
    assert (await call_with_deadline(int, timeout_s=5)).value == 0


async def test_threads_that_return_in_time_are_not_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deadline, "MAX_ABANDONED", 1)
    monkeypatch.setattr(deadline, "_abandoned", set())
    calls = [call_with_deadline(time.sleep, 0.01, timeout_s=5) for _ in range(20)]
    assert {finished.error for finished in await asyncio.gather(*calls)} == {None}
    assert deadline._abandoned == set()
