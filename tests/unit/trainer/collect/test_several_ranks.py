"""The choice of the ranks that drive, and records that cannot travel; `test_driving.py` tests the rest."""

from __future__ import annotations

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.collect.several_ranks import SeveralRanks, drivers_of
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.config.schema import Config
from tests.fixtures.distributed import FakeRank, on_ranks


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
