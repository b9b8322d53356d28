"""Roster of servers: who serves, who waits, who is left out, and what is said of it. Real servers: test_server_pool."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.errors import ConfigError, EngineError, EngineLostError, SyncError
from lockstep.rollout.server import server_roster as module
from lockstep.rollout.server.server_engine import ServerEngine
from lockstep.rollout.server.server_roster import ServerRoster
from lockstep.rollout.system.background_loop import BackgroundLoop

INSTANCES = itertools.count()
A, B, C = "http://a:8000", "http://b:8000", "http://c:8000"


class Server(ServerEngine):
    """A connected server."""

    def __init__(self, url: str, loop: BackgroundLoop, *, instance: str = "", backend: str = "gloo") -> None:
        self.url, self.name, self.loop = url, f"the engine at {url}", loop
        self.max_model_len, self.vocab_size, self.dtype = 64, 512, torch.float32
        self.instance, self.weight_transfer_backend = instance or str(next(INSTANCES)), backend
        self.failure: Exception | None = None
        self.given_up = ""
        self.is_closed = False

    async def check_process(self) -> None:
        if self.failure is not None:
            raise self.failure

    def give_up(self, reason: str) -> None:
        self.given_up = reason

    async def close(self) -> None:
        self.is_closed = True


class World:
    """A roster over servers A and B, and what it finds at their addresses."""

    def __init__(self, loop: BackgroundLoop) -> None:
        self.loop = loop
        self.listed: Any = [A, B]
        self.found: dict[str, Exception | None] = {}
        """Error of connecting to an address; None: none. Addresses that are not here do not answer."""
        self.traits: dict[str, str] = {}
        """Settings of servers that are connected later."""
        self.said: list[str] = []
        self.servers = [Server(url, loop) for url in self.listed]
        self.pool = EnginePool(self.servers)
        self.roster = ServerRoster(self.pool, addresses=self.addresses, connect=self.connect, warn=self.said.append)
        self.roster.renew()
        self.roster.serve()

    def addresses(self) -> list[str]:
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed

    def connect(self, url: str) -> ServerEngine:
        failure = self.found.get(url, EngineError("it does not answer"))
        if failure is not None:
            raise failure
        return Server(url, self.loop, **self.traits)

    def wait_until(self, is_so: Callable[[], Any]) -> None:
        give_up_at = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < give_up_at, self.said
            time.sleep(0.005)

    @property
    def serving(self) -> list[str]:
        return [member.url for member in self.pool.members if isinstance(member, Server)]

    def sync(self) -> None:
        self.roster.renew()
        self.roster.serve()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    with BackgroundLoop() as loop:
        world = World(loop)
        yield world
        world.roster.close()


def test_a_new_address_serves_after_the_sync_that_sent_to_it(world: World) -> None:
    world.found[C] = None
    world.listed = [A, B, C]
    world.wait_until(lambda: C in world.roster._ready)
    assert world.serving == [A, B]
    world.roster.renew()
    *_, joining = world.roster.engines
    assert world.roster.is_new(joining)
    assert world.serving == [A, B], "it has no weights yet"
    world.roster.serve()
    assert world.serving == [A, B, C]
    assert not world.roster.is_new(joining)
    assert world.said == [f"the engine at {C} joined with the weights of the run (3 serve)"]
    assert world.roster.metrics()["sync/engines_joined"] == 1
    assert world.roster.metrics()["sync/engines_joined"] == 0


def test_a_server_that_leaves_the_list_is_given_up_at_the_next_sync(world: World) -> None:
    world.listed = [A]
    world.sync()
    assert world.serving == [A]
    gone = world.servers[1]
    assert gone.given_up == "rollout.urls does not list it any more"
    assert gone.is_closed
    assert world.said == [f"the engine at {B} is lost: rollout.urls does not list it any more (1 left)"]


def test_a_restarted_server_is_another_one(world: World) -> None:
    world.servers[1].failure = EngineLostError("it was restarted")
    world.found[B] = None
    world.roster.renew()
    world.roster.serve()
    assert world.serving == [A]
    world.wait_until(lambda: B in world.roster._ready)
    world.sync()
    assert world.serving == [A, B]
    assert world.pool.members[1] is not world.servers[1]


def test_a_server_that_a_request_finds_lost_is_connected_again(world: World) -> None:
    world.pool.remove(world.servers[0])
    assert world.pool.on_lost is not None
    world.pool.on_lost(world.servers[0], EngineLostError("it hangs"))
    assert world.said == [f"the engine at {A} is lost: it hangs (1 left)"]
    assert world.servers[0].given_up == "it hangs", "its other requests go elsewhere at once"
    world.found[A] = None
    world.wait_until(lambda: A in world.roster._ready)
    world.sync()
    assert world.serving == [B, A]
    assert world.servers[0].is_closed


@pytest.mark.parametrize("is_request_first", [True, False])
def test_a_server_that_requests_and_a_sync_find_lost_is_named_once(world: World, is_request_first: bool) -> None:
    lost, error = world.servers[0], EngineLostError("it is gone")

    def by_request() -> None:
        world.pool.remove(lost)
        world.roster._left_pool(lost, error)

    found = [by_request, lambda: world.roster.lose(lost, error)]
    for find in found if is_request_first else reversed(found):
        find()
    world.sync()
    assert world.serving == [B]
    assert world.said == [f"the engine at {A} is lost: it is gone (1 left)"]
    assert lost.is_closed


def test_a_server_that_fails_its_first_canary_is_not_asked_again_at_once(world: World) -> None:
    world.found[C] = None
    world.listed = [A, B, C]
    world.wait_until(lambda: C in world.roster._ready)
    world.roster.renew()
    *_, joining = world.roster.engines
    world.roster.lose(joining, SyncError("its log π differ"))
    world.roster.serve()
    assert world.serving == [A, B]
    assert world.said[0] == f"{C} does not join: its log π differ"
    time.sleep(0.1)
    assert not world.roster._ready


def test_a_server_with_settings_that_do_not_fit_is_named_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_FOR_S", 0.0)
    asked = []
    monkeypatch.setattr(world.roster, "_connect", lambda url: asked.append(url) or world.connect(url))
    world.found[C] = ConfigError("it computes in bfloat16")
    world.listed = [A, B, C]
    world.wait_until(lambda: len(asked) > 3)
    assert world.said == [f"{C} does not join: it computes in bfloat16"]


def test_a_list_that_cannot_be_read_changes_nothing(world: World) -> None:
    world.listed = EngineError("the name does not resolve")
    for _ in range(3):
        world.sync()
    assert world.serving == [A, B]
    assert world.said == ["the name does not resolve; the run goes on with 2 known addresses"]


def test_a_run_has_an_engine_while_one_serves_or_waits(world: World) -> None:
    for server in world.servers:
        server.failure = EngineLostError("gone")
    world.roster.renew()
    assert not world.roster.has_engine
    world.found[A] = None
    world.wait_until(lambda: world.roster.has_engine)
    world.sync()
    assert world.serving == [A]


def test_a_process_joins_under_one_address(world: World) -> None:
    world.traits, world.found[C] = {"instance": world.servers[0].instance}, None
    world.listed = [A, B, C]
    world.wait_until(lambda: world.said)
    assert world.said == [f"{C} does not join: it is the same process as the engine at {A}"]
    assert not world.roster._ready


def test_a_server_with_another_transport_does_not_join(world: World) -> None:
    world.traits, world.found[C] = {"backend": "nccl"}, None
    world.listed = [A, B, C]
    world.wait_until(lambda: world.said)
    assert f"{C} does not join: it takes weights over nccl, and the run sends them over gloo" in world.said[0]


def test_a_server_that_waits_is_connected_once_while_members_are_checked(world: World) -> None:
    """Members that hang answer late, and servers are looked for meanwhile."""
    world.found[C] = None
    world.listed = [A, B, C]
    world.wait_until(lambda: C in world.roster._ready)
    check = world.servers[0].check_process

    async def late() -> None:
        await asyncio.sleep(0.2)
        await check()

    world.servers[0].check_process = late  # type: ignore[method-assign]
    world.roster.renew()
    assert [engine.url for engine in world.roster.engines] == [A, B, C]
    assert not world.roster._ready
    world.roster.serve()
    assert world.serving == [A, B, C]


def test_a_server_that_restarts_while_it_waits_does_not_serve_by_its_old_connection(world: World) -> None:
    world.found[C] = None
    world.listed = [A, B, C]
    world.wait_until(lambda: C in world.roster._ready)
    waiting: Any = world.roster._ready[C]
    waiting.failure = EngineLostError("it was restarted")
    world.sync()
    assert world.serving == [A, B]
    assert waiting.is_closed


def test_the_last_server_at_the_start_of_a_run_is_not_waited_for(world: World) -> None:
    world.roster._has_served = False
    world.roster.lose(world.servers[0], EngineLostError("it is gone"))
    with pytest.raises(SyncError, match="no plugin"):
        world.roster.lose(world.servers[1], SyncError("no plugin"))


def test_a_request_that_loses_a_server_during_a_sync_keeps_it_out(world: World) -> None:
    world.roster.renew()
    world.pool.remove(world.servers[0])
    world.roster._left_pool(world.servers[0], EngineLostError("it hangs"))
    world.roster.serve()
    assert world.serving == [B]
