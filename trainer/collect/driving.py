"""Drivers: the ranks that sample and score, each its share of the groups, against its own engines.

    rank 0     places of the groups ─► all ranks: group number g is of driver g % N
    drivers    episodes, rewards ─► rank 0: records of complete groups, while others are sampled

All ranks meet at least every `POLL_S` seconds. There records travel to rank 0; and if one rank has failed, all raise
its error and cancel their episodes. A process that is alone neither polls nor sends.
"""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import Prompt, Routes
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.distributed.distributed import Distributed

T = TypeVar("T")

POLL_S = 0.2
"""Longest time between two meetings of the ranks while episodes run [s]; a driver that is ready waits for none."""
END_S = 10.0
"""Time for canceled episodes to end [s]; a tool that does not return is left to the end of the process."""


class Drivers:
    """The drivers, as seen by one rank. Its methods `renew`, `run`, `gather`, `decide` and `together` are
    collectives."""

    def __init__(
        self,
        loop: BackgroundLoop,
        distributed: Distributed | None = None,
        ranks: Sequence[int] = (0,),
        *,
        has_engine: Callable[[], bool] = lambda: True,
    ) -> None:
        """loop: of this rank's engines. distributed: None in a process that is not a rank. ranks: of the drivers.
        has_engine: returns False while all engines of this driver are lost."""
        self.loop = loop
        self._ranks = list(ranks)
        self._has_engine = has_engine
        self._distributed = distributed if distributed is not None and distributed.world_size > 1 else None
        self._rank = self._distributed.rank if self._distributed else 0
        self.is_main = self._rank == 0
        self.poll_s = POLL_S if self._distributed else None
        self._share_among(self._ranks)

    def _share_among(self, ranks: Sequence[int]) -> None:
        self.count = len(ranks)
        self.index = ranks.index(self._rank) if self._rank in ranks else None
        """Number of this driver; None on ranks that do not drive now."""

    def renew(self) -> None:
        """Share groups among the drivers that have an engine now; results do not depend on which these are."""
        if self._distributed is None or len(self._ranks) == 1:
            return
        flags = self._distributed.gather(torch.tensor([int(self._has_engine())])).tolist()
        self._share_among([rank for rank in self._ranks if flags[rank]] or self._ranks)

    def owns(self, group: int) -> bool:
        """Return True if the group with this number is sampled on this rank."""
        return group % self.count == self.index

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks; if it fails on one, raise the same error on all."""
        return work() if self._distributed is None else self._distributed.together(work)

    def decide(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, and return its JSON value on all ranks."""
        value = self.together(lambda: work() if self.is_main else None)
        return value if self._distributed is None else self._distributed.broadcast(value)  # type: ignore[return-value]

    def gather(self, take: Callable[[], Iterable[T]]) -> list[T]:
        """Call `take` on all ranks, and return its records on rank 0, in the order of the ranks; nothing elsewhere.

        Raises on all ranks what it raises on one, and `EvidenceError` for records that cannot be sent.
        """
        if self._distributed is None:
            return list(take())

        def take_packed() -> tuple[list[T], bytes]:
            records = list(take())
            return ([], pack(records)) if records and not self.is_main else (records, b"")

        own, payload = self._distributed.together(take_packed)
        payloads = self._distributed.gather_to_main(payload)
        if not self.is_main:
            return []
        own += [record for one in filter(None, payloads) for record in pickle.loads(one)]  # noqa: S301  # of this run
        return own

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        take: Callable[[], Iterable[Any]] = list,
        receive: Callable[[Any], None] = lambda record: None,
    ) -> T:
        """Run a coroutine on every rank, each its own, and return its result.

        take: returns what rank 0 gets from this rank, again and again, and once after the coroutine has ended.
        receive: called on rank 0 with each record that was taken anywhere.

        Raises the first error of any rank on all of them, after their coroutines were canceled.
        """
        if (distributed := self._distributed) is None:
            result = self.loop.run(coroutine)
            for record in take():
                receive(record)
            return result
        task = self.loop.run(_started(coroutine))
        arrived: list[Any] = []
        is_running = True

        def advance() -> Iterable[Any]:
            nonlocal is_running
            for record in arrived:
                receive(record)
            is_running = not self.loop.run(_has_ended(task))
            return take()

        try:
            while True:
                arrived = self.gather(advance)
                if not distributed.sum(torch.tensor([float(is_running)])).item():
                    break
            distributed.together(lambda: list(map(receive, arrived)))
            return task.result()
        except BaseException as error:
            self.end([task], after=error)
            raise

    def end(self, tasks: Iterable[asyncio.Task[Any]], *, after: BaseException) -> None:
        """Cancel tasks of this rank after an error, and wait for their end; Ctrl-C does not wait."""
        if isinstance(after, Exception):
            self.loop.run(end(tasks))
        else:
            self.loop.submit(end(tasks))


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait for them at most `END_S`; their failures are not logged as forgotten ones."""
    tasks = list(tasks)
    for task in tasks:
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=END_S)


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


async def _has_ended(task: asyncio.Task[Any]) -> bool:
    """Return True if the task ends within `POLL_S`. Raises its error."""
    await asyncio.wait([task], timeout=POLL_S)
    if task.done():
        task.result()
    return task.done()
