"""Asynchronous rollouts, sampled while the trainer works on earlier ones: `rollout.max_staleness` >= 1.

    trainer   collect v7 │ score, update, sync │ collect v8 │ score, update, sync │ collect v9 ...
                 ▲                    │             ▲
    groups    ═══╪════════════════════╪═════════════╡ trained by the update after version 8
                 └─ begun at v7       └─ new weights arrive while it is sampled: its tokens carry v7 and v8

Groups begin only in `collect`, so the state that a checkpoint saves between two steps does not move. Between steps
their episodes continue in the background loop, and each group is scored as soon as it is complete.

Staleness is bounded where groups begin (back-pressure): at most 1 + S batches are begun and untrained, where S batches
of updates fit into `max_staleness`. Trained in the order of their beginning, none would be too old. A group may
overtake an older incomplete one as long as that one can still be trained in time; if it cannot, `rollout.stragglers`
decides between waiting for it and training without it. A group that is too old is dropped whole, and counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.records import Rollout
from lockstep.rollout.sampler.sampler import OnRollout, RunEpisode, Sampler
from lockstep.trainer.collect.groups import Collected, Group, is_kept, rewards_of
from lockstep.trainer.collect.source import RolloutSource
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Row
from lockstep.trainer.stopwatch import Stopwatch

GROUPS_SCORED_AT_ONCE = 4
"""Groups in scoring; each scores up to 16 rollouts at once (`rewards.composition.FaultTolerance.concurrency`)."""
END_S = 10.0
"""Time for cancelled episodes to end [s]; a tool that does not return is left to the end of the process."""


class _Complete(NamedTuple):
    group: Group
    greedy: Sequence[Rollout]
    """Greedy answer to its prompt; empty if the advantage does not need it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Work:
    """A group from its beginning until it is trained or dropped."""

    place: int
    """Place of its prompt in the data; also its group id."""
    row: Row
    begun: int
    """Version of the engine's weights at its beginning: none of its tokens is older."""
    task: asyncio.Task[_Complete]

    @property
    def is_complete(self) -> bool:
        return self.task.done()

    @property
    def oldest_version(self) -> int:
        """Version of its oldest token; a lower bound if it is incomplete."""
        if not self.is_complete:
            return self.begun
        rollouts = [rollout for rollout in self.task.result().group if rollout.is_trainable]
        calls = [call for rollout in rollouts for call in rollout.calls if call.sampled_ids]
        return min((call.oldest_version for call in calls), default=self.begun)


class Producer(RolloutSource):
    """Asynchronous source. Its state changes only in the background loop, during `collect`."""

    def __init__(self, config: Config, **parts: Any) -> None:
        """parts: see `RolloutSource`."""
        super().__init__(config, **parts)
        self._batch = config.rollout.prompts_per_step
        self._max_staleness = config.rollout.max_staleness
        self._updates_per_step = config.algorithm.epochs * config.algorithm.minibatches
        self._scoring = asyncio.Semaphore(GROUPS_SCORED_AT_ONCE)
        self._shared = AsyncExitStack()
        self._run_episode: RunEpisode | None = None
        self._works: list[_Work] = []
        """Groups that are neither trained nor dropped, in the order of their beginning."""

    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        """As `RolloutSource.collect`. Seeds depend on the place of a prompt in the data, not on the step."""
        sampler = self._sampler
        with watch.stage("wait"):
            return self._distributed.together(
                lambda: Collected() if sampler is None else self._loop.run(self._collect(sampler, version, on_rollout))
            )

    def forget(self) -> None:
        if self._sampler is not None:
            self._loop.run(self._cancel())
        self._prompts.restore(self._prompts.position)
        self._take_metrics()  # of rollouts that are sampled again

    def close(self) -> None:
        """Cancel groups in flight. Their prompts stay `unfinished`, so that a resumed run samples them again."""
        if self._sampler is not None:
            self._loop.run(self._cancel())
            self._loop.run(self._shared.aclose())

    async def _collect(self, sampler: Sampler, version: int, on_rollout: OnRollout) -> Collected:
        """Wait for a batch. Raises the first failure of any group."""
        if self._run_episode is None:
            self._run_episode = await self._shared.enter_async_context(sampler.open(self._sampling))
        too_old = [work for work in self._works if work.oldest_version < version - self._max_staleness]
        self._remove(too_old)
        silent: list[_Work] = []  # groups without spread, under dynamic sampling
        shown_places: set[int] = set()
        while True:
            silent += self._deliver(
                [w for w in self._complete() if not is_kept(w.task.result().group, self._algorithm)]
            )
            self._begin(sampler, self._room(version), version)
            for work in self._complete():
                for rollout in work.task.result().group if work.place not in shown_places else ():
                    on_rollout(rollout)
                shown_places.add(work.place)
            batch = self._ready(version, num_silent=len(silent))
            if batch is not None:
                break
            await asyncio.wait(
                [work.task for work in self._works if not work.is_complete], return_when=asyncio.FIRST_COMPLETED
            )
        self._deliver(batch)
        return self._collected(batch, silent, num_too_old=len(too_old))

    # Groups in flight

    def _complete(self) -> list[_Work]:
        return [work for work in self._works if work.is_complete]

    def _room(self, version: int) -> int:
        """Return the number of groups that may begin now."""
        steps_left = math.ceil((self._config.updates - version) / self._updates_per_step)
        steps_ahead = min(1 + self._max_staleness // self._updates_per_step, max(steps_left, 1))
        return steps_ahead * self._batch - len(self._works)

    def _begin(self, sampler: Sampler, count: int, version: int) -> None:
        for place, row in self._prompts.begin(max(count, 0)):
            task = asyncio.get_running_loop().create_task(self._make(sampler, place, row))
            # Else asyncio logs the failures of groups that were dropped or cancelled, whose results are not read.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._works.append(_Work(place=place, row=row, begun=version, task=task))

    def _remove(self, works: Sequence[_Work]) -> Sequence[_Work]:
        """Remove groups for good: cancel those in flight and mark their prompts as finished."""
        for work in works:
            work.task.cancel()
            self._works.remove(work)
        self._prompts.finish(work.place for work in works)
        return works

    def _deliver(self, works: Sequence[_Work]) -> Sequence[_Work]:
        """Remove complete groups after their results are reported to the curriculum."""
        for work in works:
            self._prompts.learn(work.place, rewards_of(work.task.result().group))
        return self._remove(works)

    def _ready(self, version: int, *, num_silent: int) -> list[_Work] | None:
        """Return the groups that this step trains, oldest first; None if it must wait."""
        batch = self._complete()[: self._batch]
        if len(batch) < self._batch:
            # Number of groups that a synchronous step would have sampled before it gave up.
            limit = self._batch * (1 + self._algorithm.max_refills)
            return batch if num_silent + len(batch) >= limit else None
        if self._config.rollout.stragglers == "wait":
            left = [work for work in self._works if work not in batch]
            for place, work in enumerate(left):
                trained_at = version + self._updates_per_step * (1 + place // self._batch)  # at the earliest
                if not work.is_complete and work.begun + self._max_staleness < trained_at:
                    return None
        return batch

    async def _cancel(self) -> None:
        for work in self._works:
            work.task.cancel()
        if self._works:
            await asyncio.wait([work.task for work in self._works], timeout=END_S)
        self._works.clear()

    # One group

    async def _make(self, sampler: Sampler, place: int, row: Row) -> _Complete:
        """Sample and score a group, and the greedy answer to its prompt if the advantage needs it."""
        coroutines = [self._sample(sampler, place, row, self._sampling, self._config.rollout.samples_per_prompt)]
        if self._config.plan.needs_greedy:
            coroutines.append(self._sample(sampler, place, row, replace(self._sampling, temperature=0.0), 1))
        group, *greedy = await _all(coroutines)
        async with self._scoring:
            scored_group = await self._rewards.score(group)
            answers = [answer for one in greedy for answer in await self._rewards.score(one, in_metrics=False)]
        return _Complete(group=tuple(scored_group), greedy=tuple(answers))

    def _sample(
        self, sampler: Sampler, place: int, row: Row, sampling: Sampling, count: int
    ) -> Coroutine[Any, Any, list[Rollout]]:
        return sampler.collect(
            [row], samples_per_prompt=count, sampling=sampling, step=0, first_group=place, run=self._run_episode
        )

    def _collected(self, batch: Sequence[_Work], silent: Sequence[_Work], *, num_too_old: int) -> Collected:
        results = [work.task.result() for work in batch]
        greedy = [answer for result in results for answer in result.greedy]
        dropped_groups = [work.task.result().group for work in silent]
        collection = Collected.of([result.group for result in results], dropped_groups, greedy, self._algorithm)
        self._rewards.refuse_errors()
        group_size, num_complete = self._config.rollout.samples_per_prompt, len(self._complete())
        metrics = {
            **self._take_metrics(),
            **collection.metrics,
            "rollout/inflight": float(group_size * (len(self._works) - num_complete)),
            "rollout/queue": float(group_size * num_complete),
            "rollout/dropped_stale": float(group_size * num_too_old),
        }
        return replace(collection, metrics=metrics)


async def _all(coroutines: Sequence[Coroutine[Any, Any, list[Rollout]]]) -> list[list[Rollout]]:
    """Return results in order. The first failure cancels the others and is raised unwrapped."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except* Exception as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
