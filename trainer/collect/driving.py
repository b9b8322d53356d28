"""Drivers: the ranks that sample and score, each its share of the groups, against its own engines.

    rank 0     places of the groups ─► all ranks: group number g is of driver g % N
    drivers    episodes, rewards ─► rank 0: records of complete groups, while others are sampled

This is the driver of a process that is alone; those of a run on several ranks are in `several_ranks.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from lockstep.rollout.system.background_loop import BackgroundLoop

T = TypeVar("T")

END_S = 10.0
"""Time for canceled episodes to end [s]; a tool that does not return is left to the end of the process."""


class Drivers:
    """The drivers, as seen by one rank. Its methods `renew`, `run`, `gather`, `decide` and `together` are
    collectives."""

    poll_s: float | None = None
    """Longest time between two meetings of the ranks while episodes run [s]; None: there are none."""

    def __init__(self, loop: BackgroundLoop, *, index: int | None = 0, count: int = 1, is_main: bool = True) -> None:
        """loop: of this rank's engines. index: number of this driver; None on ranks that do not drive."""
        self.loop = loop
        self.index, self.count, self.is_main = index, count, is_main
        self.has_engine: Callable[[], bool] = lambda: True
        """Returns False while all engines of this rank are lost."""

    def renew(self) -> None:
        """Share groups among the drivers that have an engine now; results do not depend on which these are."""

    def owns(self, group: int) -> bool:
        """Return True if the group with this number is sampled on this rank."""
        return group % self.count == self.index

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks; if it fails on one, raise the same error on all."""
        return work()

    def decide(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, and return its JSON value on all ranks."""
        return work()

    def gather(self, take: Callable[[], Iterable[T]]) -> list[T]:
        """Call `take` on all ranks, and return its records on rank 0, in the order of the ranks; nothing elsewhere.

        Raises on all ranks what it raises on one, and `EvidenceError` for records that cannot be sent.
        """
        return list(take())

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
        result = self.loop.run(coroutine)
        for record in take():
            receive(record)
        return result

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
