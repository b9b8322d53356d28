"""Recovery from dead engines: order and number of restarts, and errors that are not retried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest

from lockstep.rollout.errors import (
    ConfigError,
    EngineError,
    EngineLostError,
    LockstepError,
    RankLostError,
    SyncError,
)
from lockstep.trainer.engines.recovery import Recovery
from tests.fixtures.distributed import FakeRank, on_ranks


class World:
    """A rank's engine, which can die, and everything that a recovery calls."""

    def __init__(
        self,
        *,
        limit: int = 2,
        syncs: Iterable[Exception] = (),
        rank: FakeRank | None = None,
        arrivals: Iterable[bool] = (),
        pool_timeout_s: float = 60.0,
    ) -> None:
        """syncs: errors with which the engine dies of the first pushes; later ones go well. arrivals: whether a server
        is there, each time it is looked for; afterwards one is."""
        self._arrivals = iter(arrivals)
        self.rank = rank or FakeRank()
        self._syncs = iter(syncs)
        self.is_dead = False
        self.done: list[str] = []
        self.recovery = Recovery(
            engines=self,  # type: ignore[arg-type]
            distributed=self.rank,
            rollouts=self,  # type: ignore[arg-type]
            sync=self,  # type: ignore[arg-type]
            version=lambda: 7,
            limit=limit,
            pool_timeout_s=pool_timeout_s,
            say=self.done.append,
        )

    def restart_dead(self) -> list[str]:
        was_dead, self.is_dead = self.is_dead, False
        return ["the embedded engine"] if was_dead else []

    @property
    def has_engine(self) -> bool:
        return next(self._arrivals, True)

    def forget(self) -> None:
        self.done.append("forget")

    def reconnect(self) -> None:
        self.done.append("reconnect")

    def push(self, version: int) -> None:
        assert not self.is_dead
        self.done.append(f"push {version}")
        if error := next(self._syncs, None):
            self.is_dead = not isinstance(error, EngineLostError)
            raise error

    def dying(self, deaths: int, error: LockstepError) -> Callable[[], str]:
        """Return work during which the engine dies `deaths` times."""
        left = [deaths]

        def work() -> str:
            if left[0]:
                left[0] -= 1
                self.is_dead = not isinstance(error, EngineLostError)  # servers are not restarted here
                raise error
            return "sampled"

        return work


@pytest.mark.parametrize("error", [EngineError("the engine is dead\nlog"), SyncError("weight sync failed")])
def test_a_dead_engine_gets_the_weights_before_it_samples_again(error: LockstepError) -> None:
    world = World()
    assert world.recovery.attempt(world.dying(1, error)) == "sampled"
    said, *done = world.done
    assert said == f"an engine died and was started again (1 of 2): {str(error).splitlines()[0]}"
    assert done == ["forget", "reconnect", "push 7"]


def test_all_ranks_repeat_work_if_one_rank_s_engine_died() -> None:
    def attempt(rank: FakeRank) -> tuple[str, int, list[str]]:
        world = World(rank=rank)
        sample = world.dying(rank.is_main, EngineError("dead"))
        result = world.recovery.attempt(lambda: rank.together(sample))
        return result, world.recovery.num_restarts, world.done[1:]

    expected = ("sampled", 1, ["forget", "reconnect", "push 7"])
    assert on_ranks(2, attempt) == [expected, expected]


def test_an_engine_that_dies_too_often_ends_the_run() -> None:
    world = World(limit=2)
    with pytest.raises(EngineError, match="third"):
        world.recovery.attempt(world.dying(3, EngineError("a third time")))
    assert world.recovery.num_restarts == 2


def test_an_engine_that_dies_while_receiving_weights_is_restarted_again() -> None:
    world = World(limit=2, syncs=[SyncError("in sending the weights\nlog")])
    assert world.recovery.attempt(world.dying(1, EngineError("first"))) == "sampled"
    assert world.done == [
        "an engine died and was started again (1 of 2): first",
        *("forget", "reconnect", "push 7"),
        "an engine died and was started again (2 of 2): in sending the weights",
        *("forget", "reconnect", "push 7"),
    ]


def test_deaths_during_recovery_count_against_the_limit() -> None:
    world = World(limit=2, syncs=[SyncError("second"), SyncError("third")])
    with pytest.raises(SyncError, match="third"):
        world.recovery.attempt(world.dying(1, EngineError("first")))
    assert world.recovery.num_restarts == 2


def test_a_live_engine_that_fails_the_weight_sync_ends_the_run() -> None:
    world = World(limit=5)

    def push(version: int) -> None:
        raise SyncError("the canary is off")

    world.push = push  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="canary"):
        world.recovery.attempt(world.dying(1, EngineError("first")))
    assert world.recovery.num_restarts == 1


def test_other_errors_during_recovery_are_raised() -> None:
    for error in (RankLostError("another rank is gone"), ConfigError("sync.address"), ZeroDivisionError()):
        world = World(limit=5, syncs=[error])
        with pytest.raises(type(error)):
            world.recovery.attempt(world.dying(1, EngineError("first")))
        assert world.recovery.num_restarts == 1


def test_a_limit_of_0_restarts_nothing() -> None:
    world = World(limit=0)
    with pytest.raises(EngineError):
        world.recovery.attempt(world.dying(1, EngineError("dead")))
    assert world.is_dead
    assert world.done == []


def test_an_error_of_a_live_engine_is_not_retried() -> None:
    world = World()

    def refuses() -> None:
        raise EngineError("a prompt of 600 tokens leaves no room")

    with pytest.raises(EngineError, match="no room"):
        world.recovery.attempt(refuses)
    assert world.done == []


def test_no_collective_is_called_when_a_rank_is_lost() -> None:
    world = World()
    world.rank.together = lambda work: pytest.fail("the lost rank does not come")
    with pytest.raises(RankLostError):
        world.recovery.attempt(world.dying(1, RankLostError("another rank is gone")))


@pytest.fixture
def counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second each time it is read, and never sleeps."""
    readings = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(readings)), sleep=lambda seconds: None)
    for module in ("recovery", "waiting"):
        monkeypatch.setattr(f"lockstep.trainer.engines.{module}.time", clock)


@pytest.mark.usefixtures("counting_clock")
def test_a_run_without_servers_waits_for_one_and_sends_it_the_weights() -> None:
    world = World(arrivals=[False, False, False])
    assert world.recovery.attempt(world.dying(1, EngineLostError("no engine is left"))) == "sampled"
    said, *done = world.done
    assert said == "no engine is left; waiting up to 60 s for a server of rollout.urls"
    assert done == ["forget", "push 7"]
    assert world.recovery.num_restarts == 0, "servers are not started by the run"


@pytest.mark.usefixtures("counting_clock")
def test_a_server_on_any_rank_ends_the_wait_of_all() -> None:
    def attempt(rank: FakeRank) -> tuple[str, list[str]]:
        world = World(rank=rank, arrivals=[False, rank.rank == 1] if rank.rank else [False, False])
        sample = world.dying(rank.is_main, EngineLostError("no engine is left"))
        return world.recovery.attempt(lambda: rank.together(sample)), world.done[1:]

    assert on_ranks(2, attempt) == [("sampled", ["forget", "push 7"])] * 2


@pytest.mark.usefixtures("counting_clock")
def test_a_pool_that_stays_empty_ends_the_run_on_all_ranks() -> None:
    def attempt(rank: FakeRank) -> str:
        world = World(rank=rank, arrivals=[False] * 10**6, pool_timeout_s=9.0)
        with pytest.raises(EngineLostError) as raised:
            world.recovery.attempt(lambda: rank.together(world.dying(1, EngineLostError("no engine is left"))))
        return str(raised.value)

    for text in on_ranks(2, attempt):
        assert "none of rollout.urls got the weights within rollout.pool_timeout_s=9;" in text


@pytest.mark.usefixtures("counting_clock")
def test_a_server_that_dies_of_its_first_sync_is_waited_for_again() -> None:
    world = World(syncs=[EngineLostError("no engine is left: the newcomer")])
    assert world.recovery.attempt(world.dying(1, EngineLostError("no engine is left"))) == "sampled"
    assert world.done == ["forget", "push 7", "forget", "push 7"]


@pytest.mark.usefixtures("counting_clock")
def test_servers_that_answer_and_never_get_the_weights_end_the_run() -> None:
    world = World(syncs=[EngineLostError("no engine is left: the port is closed")] * 10**6, pool_timeout_s=9.0)
    with pytest.raises(EngineLostError, match=r"none of rollout\.urls got the weights within .*pool_timeout_s=9;"):
        world.recovery.attempt(world.dying(1, EngineLostError("no engine is left")))
    assert world.done.count("push 7") == 8, "the wait begins with the loss of the last server, not with each sync"


@pytest.mark.usefixtures("counting_clock")
def test_a_sync_that_goes_well_ends_the_wait() -> None:
    world = World(arrivals=[*[False] * 5, True] * 2, pool_timeout_s=9.0)
    assert world.recovery.attempt(world.dying(2, EngineLostError("no engine is left"))) == "sampled"
    assert world.done.count("push 7") == 2
