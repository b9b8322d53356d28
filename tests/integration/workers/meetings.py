"""Meetings of real ranks. Started by tests/unit/trainer/collect/test_several_ranks.py; writes DIRECTORY/rank<N>.json.

meetings.py DIRECTORY [DEAD MOMENT]
DEAD: rank that kills itself in a meeting, at a MOMENT: `asked` for records, `sending` or `receiving` them.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep.rollout.errors import EngineError, RankLostError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.collect.several_ranks import SeveralRanks
from lockstep.trainer.distributed.distributed import Distributed


class Rank(Distributed):
    """A rank that lists its messages, and dies before one of this kind with records."""

    messages: list[str] = []  # noqa: RUF012
    dies_when = ""

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._note("sending", tensor)
        super().send(tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], object]:
        self._note("receiving", tensor)
        return super().receive(tensor, rank)

    def _note(self, kind: str, tensor: torch.Tensor) -> None:
        if kind == self.dies_when and tensor.dtype == torch.uint8:
            die()
        self.messages.append(kind)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def error_of(work: Callable[[], object]) -> str:
    try:
        return f"none, but {work()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def records(rank: int) -> list[str]:
    """Records of all ranks but the third, of different lengths."""
    return [] if rank == 2 else [f"{rank}, {letter}" + "x" * (rank % 2) * 300_000 for letter in "ab"]


def meetings(ranks: Rank, drivers: SeveralRanks) -> dict[str, Any]:
    rank, last = ranks.rank, ranks.world_size - 1
    ended: list[str] = []
    ranks.messages.clear()
    found: dict[str, Any] = {"quiet": [drivers.gather(list), drivers.meet(list, lambda: rank == last).is_running]}
    found["messages of two quiet meetings"] = sorted(ranks.messages)
    found["records"] = [record[:4] for record in drivers.gather(lambda: records(rank))]

    def fails() -> list[str]:
        if rank == 1:
            raise EngineError("the engine of rank 1 is dead")
        return records(rank) if rank in (0, last) else []

    found["failure of rank 1"] = error_of(lambda: drivers.gather(fails))
    found["records after it"] = [record[:4] for record in drivers.gather(lambda: records(rank))]

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("canceled")

    def refuse(record: str) -> None:
        raise ValueError(f"refused {record}")

    take = {last: ["a record"]}
    found["failure in `receive`"] = error_of(lambda: drivers.run(wait(), lambda: take.pop(rank, []), refuse))
    found["coroutine"] = ended

    async def name() -> str:
        return f"result {rank}"

    take = {last: ["a record"]}
    found["failure in the last `receive`"] = error_of(lambda: drivers.run(name(), lambda: take.pop(rank, []), refuse))
    received: list[str] = []
    take = {number: [f"of {number}"] for number in range(last + 1)}
    found["result"] = drivers.run(name(), lambda: take.pop(rank, []), received.append)
    found["received"] = received
    return found


def lose(ranks: Rank, drivers: SeveralRanks, dead: int, moment: str) -> str:
    def take() -> list[str]:
        if ranks.rank == dead and moment == "asked":
            die()
        return records(ranks.rank)

    ranks.dies_when = moment if ranks.rank == dead else ""
    try:
        return f"none, but {drivers.gather(take)}"
    except RankLostError as error:
        return str(error)


def main(directory: str, dead: int = -1, moment: str = "") -> None:
    ranks = Rank.start(dtype="float32", max_grad_norm=0.0)
    ranks.barrier()  # rank 0 has the store by which the others start
    with BackgroundLoop() as loop:
        drivers = SeveralRanks(loop, ranks, range(ranks.world_size))
        found = meetings(ranks, drivers) if dead < 0 else lose(ranks, drivers, dead, moment)
    places = [Path(directory) / f"rank{rank}.json" for rank in range(ranks.world_size) if rank != dead]
    own = Path(directory) / f"rank{ranks.rank}.json"
    own.with_suffix(".new").write_text(json.dumps(found))
    own.with_suffix(".new").rename(own)
    while not all(place.exists() for place in places):  # else the end of a rank would tell the others of a loss
        time.sleep(0.01)


if __name__ == "__main__":
    directory, *death = sys.argv[1:]
    main(directory, int(death[0]) if death else -1, *death[1:])
