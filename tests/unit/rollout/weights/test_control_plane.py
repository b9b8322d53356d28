"""Control plane: engines that leave it, and errors that end a sync."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.rollout.errors import EngineError, EngineLostError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.control_plane import ControlPlane, Roster


class Engine:
    """An engine whose calls may fail."""

    def __init__(self, name: str, loop: BackgroundLoop) -> None:
        self.name, self.loop = name, loop
        self.failure: Exception | None = None
        self.is_alive = True

    async def call(self) -> str:
        if self.failure is not None:
            raise self.failure
        return self.name

    async def check_alive(self) -> None:
        if not self.is_alive:
            raise EngineError("dead")


class Losing(Roster):
    """A roster that takes note of what is lost. Engines whose names begin with `new` join."""

    may_lose = True

    def __init__(self, engines: list[Any]) -> None:
        super().__init__(engines)
        self.lost: list[str] = []

    def is_new(self, engine: Any) -> bool:
        return engine.name.startswith("new")

    def lose(self, engine: Any, error: Exception) -> None:
        self.lost.append(engine.name)
        self._engines.remove(engine)


@pytest.fixture
def engines() -> Iterator[list[Any]]:
    with BackgroundLoop() as loop:
        yield [Engine(name, loop) for name in ("a", "b", "new")]


def called(plane: ControlPlane) -> list[str]:
    return plane.all(lambda engine: engine.call())  # type: ignore[attr-defined]


def test_results_are_those_of_the_engines_that_are_left_in_order(engines: list[Any]) -> None:
    roster = Losing(engines)
    plane = ControlPlane(roster, 30.0, is_staged=True)
    engines[0].failure = EngineLostError("it hangs")
    assert called(plane) == ["b", "new"] == plane.names
    assert plane.take_lost() == {"a": "it hangs"}
    assert plane.take_lost() == {}
    assert roster.lost == ["a"]


def test_an_error_of_a_dead_server_or_of_one_that_joins_loses_it(engines: list[Any]) -> None:
    plane = ControlPlane(Losing(engines), 30.0, is_staged=True)
    engines[1].failure, engines[1].is_alive = EngineError("HTTP 500"), False
    engines[2].failure = EngineError("parameters were not among the weights that arrived")
    assert called(plane) == ["a"]
    assert plane.take_lost().keys() == {"b", "new"}


def test_an_error_of_a_living_server_that_serves_is_raised(engines: list[Any]) -> None:
    plane = ControlPlane(Losing(engines), 30.0, is_staged=True)
    engines[0].failure = EngineError("parameters were not among the weights that arrived")
    with pytest.raises(EngineError, match="parameters"):
        called(plane)
    assert plane.names == ["a", "b", "new"]


def test_engines_that_stay_are_never_lost(engines: list[Any]) -> None:
    plane = ControlPlane(engines, 30.0, is_staged=True)
    engines[0].failure = EngineLostError("gone")
    with pytest.raises(EngineLostError, match="gone"):
        called(plane)
    assert plane.names == ["a", "b", "new"]


def test_another_process_under_the_name_of_one_that_left_is_connected_again(engines: list[Any]) -> None:
    """Else the sync would use the connection of the process that is gone."""
    roster = Losing(engines)
    plane = ControlPlane(roster, 30.0, is_staged=True)
    roster._engines[0] = Engine("a", engines[0].loop)  # type: ignore[call-overload]
    plane.renew()
    assert plane.names == ["a", "b", "new"]
    assert plane.take_lost().keys() == {"a"}
