"""Drivers of a run on several ranks: who they are, and how they meet.

All ranks meet at least every `POLL_S` seconds while episodes run. There they agree through a tree of ranks
(`trainer/distributed/rank_tree.py`), ranks with records send them to rank 0, and if one rank has failed, all raise its
error and cancel their episodes.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

import torch

from lockstep.rollout.errors import ConfigError, EvidenceError
from lockstep.rollout.records import Prompt, Routes
from lockstep.rollout.server.url_list import is_watched
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.distributed.rank_tree import RankTree

T = TypeVar("T")

POLL_S = 0.2
"""Longest time between two meetings of the ranks [s]; a driver that is ready waits for none."""


def driver_ranks(rollout: RolloutConfig, distributed: Distributed, *, address: str | None) -> tuple[int, ...]:
    """Return the ranks that drive, in the order of their numbers; a collective. address, errors: as of `drivers_of`."""
    own = torch.tensor([int(os.environ.get("LOCAL_RANK", "0"))])
    return drivers_of(rollout, distributed.gather(own).tolist(), address=address)


def drivers_of(rollout: RolloutConfig, local_ranks: Sequence[int], *, address: str | None) -> tuple[int, ...]:
    """Return the ranks that drive. local_ranks: the number of each rank on its machine. address: `sync.address`.

    Raises `ConfigError` for more drivers than ranks, or on more machines than `sync.address` can be of.
    """
    world_size = len(local_ranks)
    if rollout.engine != "server":
        return tuple(range(world_size)) if rollout.engine == "colocated" else (0,)
    is_one = address is not None or any(map(is_watched, rollout.urls))
    machines = 1 if is_one else local_ranks.count(0)
    count = min(machines, len(rollout.urls)) if rollout.drivers is None else rollout.drivers
    if count > world_size:
        raise ConfigError(
            f"rollout.drivers={count} are ranks, and this run has {world_size}; set rollout.drivers={world_size} or "
            "less, or launch more with `accelerate launch --num_processes`"
        )
    ranks = tuple(sorted(range(world_size), key=lambda rank: (local_ranks[rank], rank))[:count])
    if address is not None and sum(local_ranks[rank] == 0 for rank in ranks) > 1:
        raise ConfigError(
            f"rollout.drivers={count} are on several machines, and sync.address={address} is an address of one; set "
            "sync.address=null, or rollout.drivers=1"
        )
    return ranks


class SeveralRanks(Drivers):
    """The drivers among the ranks of a run."""

    poll_s = POLL_S

    def __init__(self, loop: BackgroundLoop, distributed: Distributed, ranks: Sequence[int]) -> None:
        """ranks: of the drivers, in the order of their numbers."""
        super().__init__(loop, is_main=distributed.is_main)
        self._distributed, self._ranks = distributed, list(ranks)
        self._tree = RankTree(distributed)
        self._share_among(self._ranks)

    def _share_among(self, ranks: Sequence[int]) -> None:
        rank = self._distributed.rank
        self.index, self.count = ranks.index(rank) if rank in ranks else None, len(ranks)

    def renew(self) -> None:
        if len(self._ranks) > 1:
            flags = self._distributed.gather(torch.tensor([int(self.has_engine())])).tolist()
            self._share_among([rank for rank in self._ranks if flags[rank]] or self._ranks)

    def together(self, work: Callable[[], T]) -> T:
        return self._together(work, torch.zeros(1, dtype=torch.int64))

    def decide(self, work: Callable[[], T]) -> T:
        return self._distributed.broadcast(self.together(lambda: work() if self.is_main else None))

    def gather(self, take: Callable[[], Iterable[T]]) -> list[T]:
        meeting = self.meet(take)
        return self.together(meeting.records) if meeting.has_sent else meeting.own

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        take: Callable[[], Iterable[Any]] = list,
        receive: Callable[[Any], None] = lambda record: None,
    ) -> T:
        task = self.loop.run(_started(coroutine))
        meeting = Meeting([], is_running=True)
        is_running = True

        def receive_all() -> None:
            for record in meeting.records():
                receive(record)

        def advance() -> Iterable[Any]:
            nonlocal is_running
            receive_all()
            is_running = not self.loop.run(_has_ended(task))
            return take()

        try:
            while meeting.is_running:
                meeting = self.meet(advance, lambda: is_running)
            self.together(receive_all)
            return task.result()
        except BaseException as error:
            self.end([task], after=error)
            raise

    def meet(self, take: Callable[[], Iterable[Any]], is_running: Callable[[], bool] = lambda: False) -> Meeting:
        """As `gather`, but unpack nothing yet. is_running: called after `take`; True if this rank has more to do."""
        told = torch.zeros(2 + self._distributed.world_size, dtype=torch.int64)  # has failed, is running, bytes by rank

        def take_packed() -> tuple[list[Any], bytes]:
            records = list(take())
            payload = pack(records) if records and not self.is_main else b""
            told[1], told[2 + self._distributed.rank] = is_running(), len(payload)
            return (records if self.is_main else []), payload

        own, payload = self._together(take_packed, told)
        sizes = told[2:].tolist()
        senders = [rank for rank, size in enumerate(sizes) if size and self.is_main]
        received = [self._tree.receive(torch.zeros(sizes[rank], dtype=torch.uint8), rank) for rank in senders]
        if payload:
            self._tree.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0)
        payloads = [wait().numpy().tobytes() for wait in received]
        return Meeting(own, payloads, has_sent=any(sizes), is_running=bool(told[1]))

    def _together(self, work: Callable[[], T], told: torch.Tensor) -> T:
        """As `together`. told: numbers of this rank, the first one free; becomes the highest of all ranks."""
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except (Exception, SystemExit) as error:  # of any kind: raised again below, after the others are told
            failure = error
        told[0] = failure is not None
        told.copy_(self._tree.highest(told))
        if told[0]:  # only now do the ranks exchange texts
            self._distributed.together(lambda: _raise(failure))
        return result  # type: ignore[return-value]


class Meeting(NamedTuple):
    """Result of a meeting on one rank; records are on rank 0 only."""

    own: list[Any]
    """Records of rank 0 itself."""
    payloads: Sequence[bytes] = ()
    """Packed records of other ranks, in the order of the ranks."""
    has_sent: bool = False
    """True if any rank has sent records."""
    is_running: bool = False
    """True if any rank has more to do."""

    def records(self) -> list[Any]:
        return [*self.own, *(record for one in self.payloads for record in pickle.loads(one))]  # noqa: S301  # of this run


def pack(records: Sequence[Any]) -> bytes:
    """Return records for `pickle.loads` on another rank of this run. Raises `EvidenceError` if one cannot be sent."""
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(records)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise EvidenceError(
            f"rollouts cannot be sent to rank 0: {error}; expected plain values (numbers, texts, lists, mappings) in "
            "outcomes of environments and in what reward functions log: return those"
        ) from error
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickler that keeps what the calls of a rollout share; copies by themselves are whole (`Prompt.__reduce__`)."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Prompt | Routes):
            return NotImplemented
        return _rebuild, (type(obj), {field.name: getattr(obj, field.name) for field in fields(obj)})


def _rebuild(kind: Callable[..., Any], values: dict[str, Any]) -> Any:
    return kind(**values)


async def _started(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.get_running_loop().create_task(coroutine)


def _raise(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure


async def _has_ended(task: asyncio.Task[Any]) -> bool:
    """Return True if the task ends within `POLL_S`. Raises its error."""
    await asyncio.wait([task], timeout=POLL_S)
    if task.done():
        task.result()
    return task.done()
