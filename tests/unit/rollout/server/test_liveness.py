"""Detection of a silent server, with scripted answers to its probes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from lockstep.rollout.errors import EngineError, EngineLostError, EvidenceError
from lockstep.rollout.server.liveness import Liveness

SILENT_S = 0.2


class Server:
    """A server whose answers to probes are scripted."""

    def __init__(self) -> None:
        self.num_probes = 0
        self.reply: Callable[[], None] | None = lambda: None
        """None: no answer at all."""

    async def probe(self) -> None:
        self.num_probes += 1
        if self.reply is None:
            await asyncio.sleep(SILENT_S)
            raise EngineError("no answer in time")
        self.reply()

    def watched(self) -> Liveness:
        return Liveness(self.probe, name="the engine", every_s=0.02, silence_s=SILENT_S)


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def test_a_call_is_awaited_while_probes_are_answered():
    server = Server()
    assert await server.watched().guard(after(3 * SILENT_S)) == "done"
    assert server.num_probes > 3


async def test_silence_ends_every_waiting_call_and_a_later_call_is_watched_again():
    server = Server()
    server.reply = None
    liveness = server.watched()
    started = time.monotonic()
    waiting = [asyncio.ensure_future(liveness.guard(after(60.0))) for _ in range(3)]
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - started < 10 * SILENT_S
    assert [type(error) for error in ended] == [EngineLostError] * 3
    assert "answered nothing for 0.2 s" in str(ended[0])
    assert "rollout.silence_timeout_s" in str(ended[0])
    server.reply = lambda: None  # the process was stopped and continues
    assert await liveness.guard(after(2 * SILENT_S)) == "done"


@pytest.mark.parametrize("error", [EngineError, EvidenceError])
async def test_a_failed_probe_counts_as_an_answer_and_the_watch_continues(error: type[Exception]):
    server = Server()

    def fails() -> None:
        raise error("HTTP 500")

    server.reply = fails
    liveness = server.watched()
    call = asyncio.ensure_future(liveness.guard(after(60.0)))
    await asyncio.sleep(2 * SILENT_S)
    assert server.num_probes > 3
    assert not call.done()
    server.reply = None
    with pytest.raises(EngineError, match="answered nothing"):
        await call


async def test_silence_is_ignored_while_the_watch_is_suspended():
    server = Server()
    server.reply = None
    liveness = server.watched()
    with liveness.suspended():
        assert await liveness.guard(after(3 * SILENT_S)) == "done"
    with pytest.raises(EngineError, match="answered nothing"):
        await liveness.guard(after(60.0))


async def test_results_and_errors_of_a_call_pass_through_and_probing_ends():
    server = Server()
    liveness = server.watched()

    async def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await liveness.guard(fails())
    assert await liveness.guard(after(0.0)) == "done"
    before = server.num_probes
    await asyncio.sleep(0.1)
    assert server.num_probes == before
    assert len(asyncio.all_tasks()) == 1


async def test_canceling_the_caller_cancels_the_call():
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
