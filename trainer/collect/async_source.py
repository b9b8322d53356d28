"""Rollouts made ahead, while the trainer works on earlier ones: `rollout.max_staleness` >= 1.

    trainer   collect v7 │ score, update, sync │ collect v8 │ score, update, sync │ collect v9 ...
                 ▲                    │             ▲
    groups    ═══╪════════════════════╪═════════════╡ trained by the update after version 8
                 └─ begun at v7       └─ new weights arrive while it is sampled: its tokens carry v7 and v8

Groups are begun in `collect` and nowhere else, so what a checkpoint saves between two steps stands still. In between
their episodes go on in the background loop, and each group is scored as soon as it is complete.

Staleness is bounded where groups are begun (back-pressure): at most 1 + S batches are begun and not yet trained, S
being the batches of updates that fit into `max_staleness`. Trained in the order in which they were begun, none would
be too old. A group may overtake an older one that is not complete, as long as the older one can still be trained in
time; `rollout.stragglers` says what happens when it cannot: the step waits for it, or goes on without it. A group that
is too old is dropped whole, and counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rollout.engine.protocol import Sampling
from rollout.records import Rollout
from rollout.sampler.sampler import OnRollout, RunEpisode, Sampler
from trainer.collect.groups import Collected, Group, is_kept
from trainer.collect.source import RolloutSource
from trainer.config.schema import Config
from trainer.data.prompts import Row
from trainer.stopwatch import Stopwatch

GROUPS_SCORED_AT_ONCE = 4
"""Each scores up to 16 rollouts at once (`rewards.composition.FaultTolerance.concurrency`)."""
END_S = 10.0
"""For episodes to end when they are cancelled; a tool that holds on is left to the end of the process."""


class _Complete(NamedTuple):
    group: Group
    greedy: Sequence[Rollout]
    """The greedy answer to its prompt, where the advantage needs it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Work:
    """A group from its beginning until it is trained or dropped."""

    place: int
    """Of its prompt in the data, and its group id."""
    row: Row
    begun: int
    """Version of the engine's weights at its beginning: none of its tokens is older."""
    task: asyncio.Task[_Complete]

    @property
    def is_complete(self) -> bool:
        return self.task.done()

    @property
    def oldest_version(self) -> int:
        """Of its tokens; of what is still in flight a lower bound."""
        if not self.is_complete:
            return self.begun
        trained = [rollout for rollout in self.task.result().group if rollout.is_trainable]
        calls = [call for rollout in trained for call in rollout.calls if call.sampled_ids]
        return min((call.oldest_version for call in calls), default=self.begun)


class Producer(RolloutSource):
    """Keeps groups in flight. Its state is touched in the background loop, during `collect`."""

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
        """Begun and neither trained nor dropped, in the order in which they were begun."""

    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        """See `RolloutSource`. Seeds depend on the place of a prompt in the data, not on the step."""
        sampler = self._sampler
        with watch.stage("wait"):
            return self._distributed.together(
                lambda: Collected() if sampler is None else self._loop.run(self._collect(sampler, version, on_rollout))
            )

    def forget(self) -> None:
        if self._sampler is not None:
            self._loop.run(self._give_up())
        self._prompts.restore(self._prompts.cursor, self._prompts.unfinished)
        self._forget_metrics()

    def close(self) -> None:
        """Give up what is in flight. Its prompts stay `unfinished`, so that a resumed run takes them again."""
        if self._sampler is not None:
            self._loop.run(self._end())

    async def _collect(self, sampler: Sampler, version: int, on_rollout: OnRollout) -> Collected:
        """The first failure of any group is raised here, where results are looked at."""
        if self._run_episode is None:
            self._run_episode = await self._shared.enter_async_context(sampler.open(self._sampling))
        too_old = [work for work in self._works if work.oldest_version < version - self._max_staleness]
        self._remove(too_old)
        silent: list[_Work] = []  # groups without spread, under dynamic sampling
        shown: set[int] = set()
        while True:
            silent += self._remove([w for w in self._complete() if not is_kept(w.task.result().group, self._config)])
            self._begin(sampler, self._room(version), version)
            for work in self._complete():
                for rollout in work.task.result().group if work.place not in shown else ():
                    on_rollout(rollout)
                shown.add(work.place)
            batch = self._ready(version, num_silent=len(silent))
            if batch is not None:
                break
            await asyncio.wait(
                [work.task for work in self._works if not work.is_complete], return_when=asyncio.FIRST_COMPLETED
            )
        self._remove(batch)
        return self._collected(sampler, batch, silent, num_too_old=len(too_old))

    # What is in flight

    def _complete(self) -> list[_Work]:
        return [work for work in self._works if work.is_complete]

    def _room(self, version: int) -> int:
        """Groups that may be begun now."""
        steps_left = math.ceil((self._config.updates - version) / self._updates_per_step)
        steps_ahead = min(1 + self._max_staleness // self._updates_per_step, max(steps_left, 1))
        return steps_ahead * self._batch - len(self._works)

    def _begin(self, sampler: Sampler, count: int, version: int) -> None:
        for place, row in self._prompts.begin(max(count, 0)):
            task = asyncio.get_running_loop().create_task(self._make(sampler, place, row))
            task.add_done_callback(_look_at)
            self._works.append(_Work(place=place, row=row, begun=version, task=task))

    def _remove(self, works: Sequence[_Work]) -> Sequence[_Work]:
        """For good: what is still in flight is cancelled, and the prompts are finished."""
        for work in works:
            work.task.cancel()
            self._works.remove(work)
        self._prompts.finish(work.place for work in works)
        return works

    def _ready(self, version: int, *, num_silent: int) -> list[_Work] | None:
        """The groups that this step trains, the oldest first, or None while it has to wait."""
        batch = self._complete()[: self._batch]
        if len(batch) < self._batch:
            # As many groups as a synchronous step would have sampled before it gave up.
            limit = self._batch * (1 + self._config.algorithm.max_refills)
            return batch if num_silent + len(batch) >= limit else None
        if self._config.rollout.stragglers == "wait":
            left = [work for work in self._works if work not in batch]
            for place, work in enumerate(left):
                trained_at = version + self._updates_per_step * (1 + place // self._batch)  # at the earliest
                if not work.is_complete and work.begun + self._max_staleness < trained_at:
                    return None
        return batch

    async def _give_up(self) -> None:
        for work in self._works:
            work.task.cancel()
        if self._works:
            await asyncio.wait([work.task for work in self._works], timeout=END_S)
        self._works.clear()

    async def _end(self) -> None:
        await self._give_up()
        await self._shared.aclose()

    # One group

    async def _make(self, sampler: Sampler, place: int, row: Row) -> _Complete:
        """A group, sampled and scored, and beside it the greedy answer that ReMax compares it with."""
        sampled = [self._sample(sampler, place, row, self._sampling, self._config.rollout.samples_per_prompt)]
        if self._config.needs_greedy:
            sampled.append(self._sample(sampler, place, row, replace(self._sampling, temperature=0.0), 1))
        group, *greedy = await _all(sampled)
        async with self._scoring:
            scored = await self._rewards.score(group)
            answers = [answer for one in greedy for answer in await self._rewards.score(one, in_metrics=False)]
        return _Complete(group=tuple(scored), greedy=tuple(answers))

    def _sample(
        self, sampler: Sampler, place: int, row: Row, sampling: Sampling, count: int
    ) -> Coroutine[Any, Any, list[Rollout]]:
        return sampler.collect(
            [row], samples_per_prompt=count, sampling=sampling, step=0, first_group=place, run=self._run_episode
        )

    def _collected(
        self, sampler: Sampler, batch: Sequence[_Work], silent: Sequence[_Work], *, num_too_old: int
    ) -> Collected:
        for work in (*silent, *batch):
            group = work.task.result().group
            self._prompts.learn(work.row, [rollout.reward for rollout in group if rollout.is_trainable])
        results = [work.task.result() for work in batch]
        greedy = [answer for result in results for answer in result.greedy]
        dropped = [work.task.result().group for work in silent]
        collected = Collected.of([result.group for result in results], dropped, greedy, self._config)
        group_size, num_complete = self._config.rollout.samples_per_prompt, len(self._complete())
        metrics = {
            **self._rewards.take_metrics(),
            **sampler.take_metrics(),
            **self._prompts.metrics(),
            **collected.metrics,
            "rollout/inflight": float(group_size * (len(self._works) - num_complete)),
            "rollout/queue": float(group_size * num_complete),
            "rollout/stale_dropped": float(group_size * num_too_old),
        }
        return replace(collected, metrics=metrics)


def _look_at(task: asyncio.Task[Any]) -> None:
    """Asyncio logs failures that nobody looked at: of groups that were dropped, or given up at the end."""
    if not task.cancelled():
        task.exception()


async def _all(coroutines: Sequence[Coroutine[Any, Any, list[Rollout]]]) -> list[list[Rollout]]:
    """Results in order. The first failure cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except* Exception as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
