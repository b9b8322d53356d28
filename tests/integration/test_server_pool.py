"""Servers of a run that die, hang, restart, join and leave: the sync goes on with the others, requests go elsewhere.

Real servers and real gloo groups, with one trainer process. `test_pool_runs.py` has whole runs.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.records import EngineCall
from lockstep.rollout.server.server_engine import ServerEngine
from lockstep.rollout.server.server_roster import ServerRoster
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import SyncReport, WeightSync
from tests.fixtures.forked_servers import ForkedServers
from tests.fixtures.models import VOCAB_SIZE, perturb, sampled_logprobs, tiny_qwen3
from tests.fixtures.sent import on_bucket
from tests.fixtures.servers import KEY, EngineServer, is_taken, send

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

DEADLINE_S = 12.0
SILENCE_S = 3.0
JOIN_S = 60.0
PROMPT = (5, 99, 300, 12)

Strike = Callable[[], None]


class Pool:
    """A trainer's side of several servers that leave and join."""

    def __init__(self, loop: BackgroundLoop, servers: list[EngineServer]) -> None:
        self.loop, self.servers = loop, servers
        self.urls = [server.url for server in servers]
        self.said: list[str] = []
        self.model = tiny_qwen3(tied=True)
        self.version = 0
        self.pool = EnginePool([self.connect(url) for url in self.urls])
        self.roster = ServerRoster(self.pool, addresses=lambda: self.urls, connect=self.connect, warn=self.said.append)
        self.sync = WeightSync(
            module=self.model,
            engines=self.roster,
            score_canary=lambda ids: sampled_logprobs(self.model, tuple(ids[:1]), tuple(ids[1:])),
            deadline_s=DEADLINE_S,
            silence_s=SILENCE_S,
            bucket_bytes=2**18,
        )

    def connect(self, url: str) -> ServerEngine:
        return ServerEngine(
            url,
            loop=self.loop,
            vocab_size=VOCAB_SIZE,
            api_key=KEY,
            start_timeout_s=2.0,
            silence_timeout_s=SILENCE_S,
        )

    def push(self) -> SyncReport:
        self.version += 1
        perturb(self.model, seed=self.version)
        return self.sync.push(self.version)

    def push_until(self, serving: int) -> None:
        """Push until this number of servers serves."""
        give_up_at = time.monotonic() + JOIN_S
        while len(self.pool.members) != serving:
            assert time.monotonic() < give_up_at, (self.names, self.said)
            time.sleep(0.2)
            if self.roster.has_engine:
                self.push()

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.pool.members]

    def strike(self, index: int, number: signal.Signals) -> None:
        for pid in sorted(self.servers[index].pids):
            send(pid, number)

    def sample(self, count: int = 16, *, during: Strike = lambda: None) -> list[EngineCall]:
        async def all_() -> list[EngineCall]:
            requests = [
                asyncio.ensure_future(
                    self.pool.generate(PROMPT, Sampling(max_tokens=200, ignore_eos=True, seed=seed, affinity=(0, seed)))
                )
                for seed in range(count)
            ]
            await asyncio.sleep(0.2)
            during()
            return await asyncio.gather(*requests)

        return self.loop.run(all_(), timeout=60)

    def verify(self) -> None:
        """Assert that every serving engine samples from the weights of the last push."""
        for member in self.pool.members:
            call = self.loop.run(member.generate(PROMPT, Sampling(max_tokens=32, ignore_eos=True, seed=0)), timeout=60)
            assert call.oldest_version == self.version
            expected = sampled_logprobs(self.model, call.prompt_ids, call.sampled_ids)
            assert max(abs(a - b) for a, b in zip(call.sampled_logprobs, expected, strict=True)) < 1e-4


@pytest.fixture
def pool(forked_servers: ForkedServers) -> Iterator[Pool]:
    with forked_servers.running(2) as servers, BackgroundLoop() as loop:
        pool = Pool(loop, servers)
        pool.push()
        try:
            yield pool
        finally:
            pool.roster.close()
            pool.sync.close()
            loop.run(pool.pool.close())


def before_a_sync(pool: Pool, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    strike()
    pool.push()


def while_weights_travel(pool: Pool, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    on_bucket(monkeypatch, 2, strike)
    pool.push()
    monkeypatch.undo()


def while_weights_are_loaded(pool: Pool, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = pool.pool.members[1]
    finish = engine.finish_weight_update

    async def struck(label: str) -> None:
        task = asyncio.ensure_future(finish(label))
        await asyncio.sleep(0.005)
        strike()
        await task

    monkeypatch.setattr(engine, "finish_weight_update", struck)
    pool.push()


def while_the_canary_is_scored(pool: Pool, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = pool.pool.members[1]

    async def score(ids: list[int]) -> list[float]:
        strike()
        return (await engine.score_ranked(ids))[0]

    monkeypatch.setattr(engine, "score", score)
    pool.push()


def in_mid_generation(pool: Pool, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pool.sample()
    calls = pool.sample(during=strike)
    assert [call.sampled_ids for call in calls] == [call.sampled_ids for call in expected]
    assert [call.sampled_logprobs for call in calls] == [call.sampled_logprobs for call in expected]
    assert pool.pool.num_resent > 0


MOMENTS = (
    before_a_sync,
    while_weights_travel,
    while_weights_are_loaded,
    while_the_canary_is_scored,
    in_mid_generation,
)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_other_server_goes_on_and_a_new_one_joins(
    pool: Pool,
    forked_servers: ForkedServers,
    monkeypatch: pytest.MonkeyPatch,
    moment: Callable[[Pool, Strike, pytest.MonkeyPatch], None],
    number: signal.Signals,
) -> None:
    struck, other = pool.servers[1], f"the engine at {pool.servers[0].url}"
    moment(pool, lambda: pool.strike(1, number), monkeypatch)
    assert pool.names == [other], pool.said
    assert any(f"the engine at {struck.url} is lost" in sentence for sentence in pool.said)
    pool.verify()
    if number == signal.SIGSTOP:  # it continues, with old weights, and is a new member
        pool.strike(1, signal.SIGCONT)
        pool.push_until(2)
    else:
        with forked_servers.running() as (newcomer,):
            pool.urls.append(newcomer.url)
            pool.push_until(2)
            assert newcomer.url in pool.names[1]
            pool.verify()
            pool.urls.remove(newcomer.url)
            pool.push()
            assert pool.names == [other]
    pool.push()
    pool.verify()


def test_a_server_that_is_back_before_the_next_sync_joins_in_it(pool: Pool, forked_servers: ForkedServers) -> None:
    url = pool.servers[1].url
    pool.sample(during=lambda: pool.strike(1, signal.SIGKILL))
    pool.servers[1].stop()
    port = int(url.rpartition(":")[2])
    while is_taken(port):  # a killed process holds it until its memory is freed
        time.sleep(0.05)
    restarted = forked_servers.start(port)
    try:
        restarted.wait_until_ready()
        while url not in pool.roster._ready:
            time.sleep(0.05)
        pool.push()
        assert len(pool.names) == 2, pool.said
        pool.verify()
        pool.push()
        pool.verify()
    finally:
        restarted.stop()
