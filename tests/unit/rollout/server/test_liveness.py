"""The watch over a server that may fall silent, with questions that are answered as told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from rollout.errors import EngineError, EvidenceError
from rollout.server.liveness import Liveness

SILENT_S = 0.2


class Server:
    """Answers questions until it is told otherwise."""

    def __init__(self) -> None:
        self.asked = 0
        self.reply: Callable[[], None] | None = lambda: None
        """None: no answer at all."""

    async def ask(self) -> None:
        self.asked += 1
        if self.reply is None:
            await asyncio.sleep(SILENT_S)
            raise EngineError("no answer in time")
        self.reply()

    def watched(self) -> Liveness:
        return Liveness(self.ask, name="the engine", every_s=0.02, silent_for_s=SILENT_S)


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def test_a_call_is_waited_for_as_long_as_questions_are_answered():
    server = Server()
    assert await server.watched().guard(after(3 * SILENT_S)) == "done"
    assert server.asked > 3


async def test_silence_ends_every_waiting_call_and_those_that_come_later():
    server = Server()
    server.reply = None
    liveness = server.watched()
    started = time.monotonic()
    waiting = [asyncio.ensure_future(liveness.guard(after(60.0))) for _ in range(3)]
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - started < 10 * SILENT_S
    assert [type(error) for error in ended] == [EngineError] * 3
    assert "answered nothing for 0.2 s" in str(ended[0])
    assert "rollout.silence_timeout_s" in str(ended[0])
    server.reply = lambda: None  # it was stopped, and goes on
    assert await liveness.guard(after(2 * SILENT_S)) == "done"


@pytest.mark.parametrize("error", [EngineError, EvidenceError])
async def test_a_failure_is_an_answer_and_the_watch_goes_on(error: type[Exception]):
    server = Server()

    def fails() -> None:
        raise error("HTTP 500")

    server.reply = fails
    liveness = server.watched()
    call = asyncio.ensure_future(liveness.guard(after(60.0)))
    await asyncio.sleep(2 * SILENT_S)
    assert server.asked > 3
    assert not call.done()
    server.reply = None
    with pytest.raises(EngineError, match="answered nothing"):
        await call


async def test_nothing_is_expected_of_a_server_that_is_excused():
    server = Server()
    server.reply = None
    liveness = server.watched()
    with liveness.excused():
        assert await liveness.guard(after(3 * SILENT_S)) == "done"
    with pytest.raises(EngineError, match="answered nothing"):
        await liveness.guard(after(60.0))


async def test_results_and_errors_of_a_call_pass_through_and_nothing_is_asked_afterwards():
    server = Server()
    liveness = server.watched()

    async def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await liveness.guard(fails())
    assert await liveness.guard(after(0.0)) == "done"
    asked = server.asked
    await asyncio.sleep(0.1)
    assert server.asked == asked
    assert len(asyncio.all_tasks()) == 1


async def test_who_gives_up_a_call_ends_it():
    ended = asyncio.Event()

    async def call() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.ensure_future(Server().watched().guard(call()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), timeout=1.0)
