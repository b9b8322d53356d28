"""The choice of the ranks that drive, and their meetings; `test_driving.py` tests what drivers do in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.collect.several_ranks import SeveralRanks, drivers_of
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.config.schema import Config
from tests.fixtures.distributed import FakeRank, on_ranks
from tests.fixtures.ranks import reports_alone


def served(drivers: int | None, *, servers: int = 8, address: str | None = None) -> Config:
    config = Config()
    config.rollout.engine, config.rollout.drivers, config.sync.address = "server", drivers, address
    config.rollout.urls = [f"http://127.0.0.1:{8000 + number}" for number in range(servers)]
    return config


TWO_MACHINES = [0, 1, 2, 0, 1, 2]
"""Local ranks of two machines with three ranks each."""


@pytest.mark.parametrize(
    ("config", "local_ranks", "expected"),
    [
        (served(None), [0], (0,)),
        (served(None), [0, 1, 2, 3], (0,)),
        (served(None), TWO_MACHINES, (0, 3)),
        (served(None, servers=1), TWO_MACHINES, (0,)),
        (served(None, address="10.0.0.1"), TWO_MACHINES, (0,)),
        (served(1), TWO_MACHINES, (0,)),
        (served(2), [0, 1, 2, 3], (0, 1)),
        (served(3), TWO_MACHINES, (0, 3, 1)),
        (served(6), TWO_MACHINES, (0, 3, 1, 4, 2, 5)),
        (Config(rollout=RolloutConfig(engine="colocated")), TWO_MACHINES, (0, 1, 2, 3, 4, 5)),
        (Config(), TWO_MACHINES, (0,)),
    ],
)
def test_drivers_are_spread_over_machines_first(
    config: Config, local_ranks: list[int], expected: tuple[int, ...]
) -> None:
    assert drivers_of(config.rollout, local_ranks, address=config.sync.address) == expected


def test_more_drivers_than_ranks_or_machines_of_an_address_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.drivers=3 are ranks, and this run has 2; set rollout.drivers=2 or"):
        drivers_of(served(3).rollout, [0, 1], address=None)
    with pytest.raises(ConfigError, match=r"on several machines, and sync.address=10.0.0.1 .* set sync.address=null"):
        drivers_of(served(2).rollout, TWO_MACHINES, address="10.0.0.1")


class OneWay:
    """A record that can be packed and not unpacked."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _refuse, ("no such place on rank 0",)


def _refuse(why: str) -> None:
    raise FileNotFoundError(why)


def test_a_record_that_rank_0_cannot_unpack_is_an_error_on_all_ranks() -> None:
    def gather(rank: FakeRank) -> str:
        with BackgroundLoop() as loop:
            drivers = SeveralRanks(loop, rank, [0, 1])
            with pytest.raises(Exception, match="no such place on rank 0") as raised:
                drivers.gather(lambda: [] if rank.is_main else [OneWay()])
        return str(raised.value)

    assert len(on_ranks(2, gather)) == 2


# Real ranks over gloo: tests/integration/workers/meetings.py

WORKER = "tests.integration.workers.meetings"


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_meet(ranks: int, tmp_path: Path) -> None:
    reports = reports_alone(WORKER, tmp_path, ranks=ranks)
    main, *others = reports
    senders = [rank for rank in range(ranks) if rank != 2]
    everything = [f"{rank}, {letter}" for rank in senders for letter in "ab"]
    for name in ("records", "records after it"):
        assert [found[name] for found in reports] == [everything] + [[]] * len(others), name
    for found in reports:
        assert found["quiet"] == [[], True]
        messages = found["messages of two quiet meetings"]
        assert messages == sorted(2 * ["sending", "receiving"] * (len(messages) // 4))
        assert len(messages) <= 2 * 2 * 3, "two meetings, both directions, three neighbors"
        assert found["failure of rank 1"] == "EngineError: the engine of rank 1 is dead"
        assert found["failure in `receive`"].endswith("ValueError: refused a record")
        assert found["failure in the last `receive`"] == found["failure in `receive`"]
        assert found["coroutine"] == ["canceled"]
    assert len({found["failure in `receive`"] for found in others}) == 1
    assert [found["result"] for found in reports] == [f"result {rank}" for rank in range(ranks)]
    assert main["received"] == [f"of {rank}" for rank in range(ranks)]
    assert all(found["received"] == [] for found in others)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "dead", "moment"),
    [
        (2, 1, "asked"), (3, 0, "asked"), (5, 1, "asked"), (5, 4, "asked"), (5, 4, "sending"), (5, 0, "receiving"),
    ],
)  # fmt: skip
def test_a_rank_that_dies_in_a_meeting_is_an_error_on_all_others(
    ranks: int, dead: int, moment: str, tmp_path: Path
) -> None:
    """The others stay until all have reported, so none hears of it from the end of another one."""
    for found in reports_alone(WORKER, tmp_path, dead, moment, ranks=ranks, dead=dead):
        assert f"rank {dead} is lost" in found or "the connection to a rank at 127.0.0.1 is lost" in found, found
        assert "its process or its machine has ended" in found
