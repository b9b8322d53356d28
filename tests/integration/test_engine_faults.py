"""Servers that are killed, stopped or left by their trainer at any moment: an error in time with the server's address.

The loop of fifty starts a real server for each round and kills it by its pid:

    python -m pytest tests/integration/test_engine_faults.py -m "slow or not slow"
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError, SyncError
from tests.fixtures.forked_servers import ForkedServers
from tests.fixtures.models import perturb
from tests.fixtures.remote import Trained, trained
from tests.fixtures.sent import on_bucket
from tests.fixtures.servers import EngineServer, send

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROUNDS = 5
DEADLINE_S = 12.0
SILENCE_S = 3.0
LIMIT_S = 1.5 * DEADLINE_S
"""Limit from the fault to the error; most take less than 5 s."""
ADAPTED = (2, 3)
"""Rounds in which LoRA adapters are sent to the server, in place of weights."""
PROMPT = (5, 99, 300, 12)
LONG_PROMPT = tuple(range(10, 180))

Strike = Callable[[], None]
Moment = Callable[[Trained, Strike, pytest.MonkeyPatch], None]


def before_a_sync(remote: Trained, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    strike()
    remote.push()


def while_requests_drain(remote: Trained, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    task = remote.loop.run(start(sample(remote)))
    remote.loop.run(start(later(strike)))
    try:
        remote.push()
    finally:
        with pytest.raises(EngineError):
            remote.loop.run(asyncio.wait_for(task, LIMIT_S))


def while_weights_travel(remote: Trained, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    on_bucket(monkeypatch, 2, strike)
    remote.push()


def while_weights_are_loaded(remote: Trained, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = remote.engine.finish_weight_update

    async def struck(label: str) -> None:
        task = asyncio.ensure_future(finish(label))
        await asyncio.sleep(0.005)
        strike()
        await task

    monkeypatch.setattr(remote.engine, "finish_weight_update", struck)
    remote.push()


def after_a_sync(remote: Trained, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.push()
    strike()
    remote.generate(PROMPT)


def in_mid_generation(remote: Trained, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.loop.run(start(later(strike)))
    remote.loop.run(sample(remote), timeout=LIMIT_S)


def before_a_trainer_connects(remote: Trained, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may answer until it notices the death of its engine, but no sync succeeds."""
    strike()
    with trained(remote.servers, deadline_s=DEADLINE_S, start_timeout_s=2.0) as next_trainer:
        next_trainer.push()


async def start(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(coroutine)


async def later(strike: Strike) -> None:
    await asyncio.sleep(0.1)
    strike()


async def sample(remote: Trained) -> None:
    requests = [Sampling(max_tokens=300, ignore_eos=True, seed=seed) for seed in range(16)]
    await asyncio.gather(*(remote.engine.generate(PROMPT, request) for request in requests))


KILLED: tuple[Moment, ...] = (
    before_a_sync,
    while_requests_drain,
    while_weights_travel,
    while_weights_are_loaded,
    after_a_sync,
    in_mid_generation,
    before_a_trainer_connects,
)
STOPPED: tuple[Moment, ...] = (while_weights_travel, in_mid_generation)


def faults() -> Iterator[Any]:
    for number in range(ROUNDS):
        for word, moments in ((signal.SIGKILL, KILLED), (signal.SIGSTOP, STOPPED)):
            for moment in moments:
                yield pytest.param(word, moment, number, id=f"{word.name}-{moment.__name__}-{number}")


@pytest.fixture
def remote(request: pytest.FixtureRequest, forked_servers: ForkedServers, tmp_path: Path) -> Iterator[Trained]:
    params, rank, started = request.node.callspec.params, 0, forked_servers
    if "moment" in params and params["number"] in ADAPTED:
        rank = 3
        started = ForkedServers(forked_servers.model, tmp_path, lora_rank=rank)
    with (
        started.running() as servers,
        trained(servers, deadline_s=DEADLINE_S, silence_timeout_s=SILENCE_S, lora_rank=rank) as connected,
    ):
        connected.push()
        yield connected


def strike_at(server: EngineServer, word: signal.Signals, *, engine_only: bool) -> None:
    for pid in server.engine_pids if engine_only else server.pids:
        send(pid, word)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "moment", "number"), list(faults()))
def test_a_server_that_fails_is_an_error_with_its_address(
    remote: Trained, monkeypatch: pytest.MonkeyPatch, word: signal.Signals, moment: Moment, number: int
):
    server = remote.servers[0]
    struck_at: list[float] = []

    def strike() -> None:
        struck_at.append(time.monotonic())
        strike_at(server, word, engine_only=number % 2 == 1)

    with pytest.raises((EngineError, SyncError)) as raised:
        moment(remote, strike, monkeypatch)
    assert time.monotonic() - struck_at[0] < LIMIT_S
    assert server.url in str(raised.value), raised.value


@pytest.mark.slow
@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_trainer_that_dies_in_mid_bucket_leaves_the_old_weights_and_the_next_one_goes_on(
    remote: Trained, forked_servers: ForkedServers, number: int
):
    before = remote.generate(LONG_PROMPT)
    forked_servers.send_and_die(remote.servers[0].url)
    remote.loop.run(remote.engine.resume())
    after = remote.generate(LONG_PROMPT)
    assert (after.sampled_ids, after.version_spans) == (before.sampled_ids, before.version_spans)
    with trained(remote.servers) as next_trainer:
        perturb(next_trainer.model, seed=number)
        next_trainer.push()
        assert next_trainer.mismatch(next_trainer.generate(LONG_PROMPT)) < 1e-4


@pytest.mark.parametrize(
    ("word", "victim", "engine_only"),
    [
        pytest.param(signal.SIGKILL, 0, True, id="its engine killed"),
        pytest.param(signal.SIGKILL, 1, False, id="killed"),
        pytest.param(signal.SIGSTOP, 1, True, id="its engine stopped", marks=pytest.mark.slow),
    ],
)
def test_a_sync_names_the_one_of_two_servers_that_failed_and_leaves_the_other_fit(
    forked_servers: ForkedServers, monkeypatch: pytest.MonkeyPatch, word: signal.Signals, victim: int, engine_only: bool
):
    with forked_servers.running(2) as servers:
        survivor = servers[1 - victim]
        with trained(servers, deadline_s=DEADLINE_S) as both:
            both.push()
            with pytest.raises(SyncError) as raised:
                while_weights_travel(
                    both, lambda: strike_at(servers[victim], word, engine_only=engine_only), monkeypatch
                )
            said, _, cause = str(raised.value).partition("no longer answers:")
            assert servers[victim].url in said, raised.value
            assert survivor.url not in said, raised.value
            assert cause
        monkeypatch.undo()
        with trained([survivor]) as alone:
            perturb(alone.model, seed=1)
            alone.push()
            assert alone.mismatch(alone.generate(LONG_PROMPT)) < 1e-4
