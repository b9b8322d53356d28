"""Asynchronous rollouts, sampled while the trainer works on earlier ones: `rollout.max_staleness` >= 1.

    trainer   collect v7 │ score, update, sync │ collect v8 │ score, update, sync │ collect v9 ...
                 ▲                    │             ▲
    groups    ═══╪════════════════════╪═════════════╡ trained by the update after version 8
                 └─ begun at v7       └─ new weights arrive while it is sampled: its tokens carry v7 and v8

Rank 0 decides which groups begin and which batch is ready; drivers sample and score their groups, and hand complete
ones to rank 0 in `collect` (`trainer/collect/several_ranks.py`). Groups begin only in `collect`, so the state that a
checkpoint saves between two steps does not move. Between steps their episodes continue in the background loop of each
driver, and each group is scored as soon as it is complete.

Staleness is bounded where groups begin (back-pressure): at most 1 + S batches are begun and untrained, where S batches
of updates fit into `max_staleness`. Trained in the order of their beginning, none would be too old. A group may
overtake an older incomplete one as long as that one can still be trained in time; if it cannot, `rollout.stragglers`
decides between waiting for it and training without it. A group that is too old is dropped whole, and counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from lockstep.rewards.composition import Tally
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout
from lockstep.rollout.sampler.sampler import OnRollout, RunEpisode, Sampler
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.collect.call_journal import CallJournal, Calls
from lockstep.trainer.collect.collect_log import Collection, CollectLog, Round
from lockstep.trainer.collect.driving import end
from lockstep.trainer.collect.groups import Collected, Group, is_kept, rewards_of
from lockstep.trainer.collect.kept_batches import InFlight, KeptBatches, calls_of, complete_of
from lockstep.trainer.collect.source import RolloutSource
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Row
from lockstep.trainer.stopwatch import Stopwatch

GROUPS_SCORED_AT_ONCE = 4
"""Groups in scoring on a driver; each scores up to 16 rollouts at once (`rewards.composition.FaultTolerance`)."""


class Complete(NamedTuple):
    group: Group
    greedy: Sequence[Rollout]
    """Greedy answer to its prompt; empty if the advantage does not need it."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Work:
    """A group from its beginning until it is trained or dropped, as rank 0 knows it."""

    place: int
    """Place of its prompt in the data; also its group id."""
    begun: int
    """Version of the engine's weights at its beginning: none of its tokens is older."""
    result: Complete | None = None
    """None until its driver has handed it over."""

    @property
    def is_complete(self) -> bool:
        return self.result is not None

    @property
    def group(self) -> Group:
        """Its rollouts; empty if it is incomplete."""
        return self.result.group if self.result is not None else ()

    @property
    def oldest_version(self) -> int:
        """Version of its oldest token; a lower bound if it is incomplete."""
        calls = [call for rollout in self.group if rollout.is_trainable for call in rollout.calls if call.sampled_ids]
        return min((call.oldest_version for call in calls), default=self.begun)


class Orders(NamedTuple):
    """Decisions of rank 0 in one round."""

    begun: Sequence[int] = ()
    """Places whose groups begin."""
    dropped: Sequence[int] = ()
    """Places whose groups end: they are too old."""
    is_ready: bool = False
    """True if a batch is complete."""


class Producer(RolloutSource):
    """Asynchronous source. Its state changes only during `collect`."""

    def __init__(
        self,
        config: Config,
        *,
        log: CollectLog,
        store: KeptBatches | None = None,
        journal: CallJournal | None = None,
        **parts: Any,
    ) -> None:
        """log: is told of each batch, on rank 0. store: of batches, for a resumed run; None: a kill loses rollouts in
        flight. journal: the engine of the sampler, on drivers. parts: see `RolloutSource`."""
        super().__init__(config, **parts)
        self._log, self._store, self._journal = log, store, journal
        self._num_again: int | None = None
        """Number of batches of a killed run that are left to repeat; None: not asked yet."""
        self._has_gone_on = False
        """True if nothing of a killed run is left to repeat or to go on with."""
        self._begins: str | None = "start"
        """See `Collection.begins`."""
        self._batch = config.rollout.prompts_per_step
        self._max_staleness = config.rollout.max_staleness
        self._updates_per_step = config.algorithm.epochs * config.algorithm.minibatches
        self._scoring = asyncio.Semaphore(GROUPS_SCORED_AT_ONCE)
        self._shared = AsyncExitStack()
        self._is_open = False
        self._run_episode: RunEpisode | None = None
        self._tasks: dict[int, asyncio.Task[Complete]] = {}
        """Groups of this rank that it has not handed to rank 0, by place."""
        self._works: list[_Work] = []
        """On rank 0, groups that are neither trained nor dropped, in the order of their beginning."""

    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        """As `RolloutSource.collect`. Seeds depend on the place of a prompt in the data, not on the step.

        on_rollout: called with the rollouts of all drivers when their group is complete.
        """
        drivers = self._drivers
        drivers.renew()
        with watch.stage("wait"):
            if not self._is_open:
                drivers.run(self._open())
                self._is_open = True
            if self._is_repeated(step):
                return drivers.together(lambda: self._repeat(step, on_rollout) if drivers.is_main else Collected())
            self._keep_calls()
            silent: list[_Work] = []  # groups without spread, under dynamic sampling
            too_old: Sequence[_Work] | None = None
            batch: Sequence[_Work] | None = None
            shown_places: set[int] = set()
            arrived: list[tuple[int, Complete]] = []
            rounds: list[Round] = []

            def decide() -> Orders:
                nonlocal too_old, batch
                works = {work.place: work for work in self._works}
                for place, result in arrived:
                    works[place].result = result
                dropped: Sequence[_Work] = ()
                if too_old is None:
                    limit = version - self._max_staleness
                    too_old = dropped = self._remove([work for work in self._works if work.oldest_version < limit])
                oldest = [(place, works[place].oldest_version) for place, _ in arrived]
                quiet = self._deliver([w for w in self._complete() if not is_kept(w.group, self._algorithm)])
                silent.extend(quiet)
                begun = self._begin(self._room(version), version)
                for work in self._complete():
                    for rollout in work.group if work.place not in shown_places else ():
                        on_rollout(rollout)
                    shown_places.add(work.place)
                batch = self._ready(version, num_silent=len(silent))
                rounds.append(Round(arrived=oldest, dropped=_places(dropped), silent=_places(quiet), begun=begun))
                return Orders(begun, _places(dropped), is_ready=batch is not None)

            arrived = drivers.gather(lambda: self._drivers.loop.run(self._take_complete()))
            while not (orders := Orders(*drivers.decide(decide))).is_ready:
                arrived = drivers.gather(lambda: self._drivers.loop.run(self._advance(orders)))
            drivers.together(lambda: self._drivers.loop.run(self._start(orders)))
            self._episodes.hand_over()
            begins, self._begins = self._begins, None
            is_alone = drivers.poll_s is None
            line = Collection(step, version, begins, is_alone=is_alone, rounds=rounds, batch=_places(batch or ()))

            def deliver() -> Collected:
                collected = self._collected(self._deliver(batch or ()), silent, num_too_old=len(too_old or ()))
                if self._store is not None:
                    complete = {work.place: work.result for work in self._works if work.result is not None}
                    self._store.write(line, collected, complete)
                self._log.append(line)  # now the file is of this run
                return collected

            return drivers.together(lambda: deliver() if drivers.is_main else Collected())

    def forget(self) -> None:
        self._begins = self._begins or "engine"
        self._has_gone_on = self._has_gone_on or self._num_again is not None
        self._drivers.loop.run(self._cancel())
        self._lose_groups()
        self._take_metrics()  # of rollouts that are sampled again

    def _lose_groups(self) -> None:
        """Let all groups in flight begin again, without the calls that they had."""
        self._works.clear()
        self._prompts.restore(self._prompts.position)
        if self._store is not None and self._drivers.is_main:
            self._store.forget_calls()

    # Batches of a killed run, and its groups in flight

    def _keep_calls(self) -> None:
        """Write the calls of groups in flight; a collective."""
        if (store := self._store) is not None and self._begins is None:
            calls = dict(self._drivers.gather(lambda: self._drivers.loop.run(self._calls()).items()))
            if self._drivers.is_main:
                store.write_calls(calls)

    def _is_repeated(self, step: int) -> bool:
        """Return True if a batch was collected before the run was killed; after the last one, go on with the groups in
        flight; a collective."""
        if self._has_gone_on or (store := self._store) is None:
            return False
        if self._num_again is None:
            self._num_again = self._drivers.decide(lambda: self._recall(store, step))
        if self._num_again:
            self._num_again -= 1
            return True
        self._has_gone_on = True
        if step:
            places, state = self._drivers.decide(lambda: (_places(self._works), store.in_flight_after(step - 1)))
            self._drivers.together(lambda: self._go_on(places, state and InFlight(*state)))
        return False

    def _recall(self, store: KeptBatches, step: int) -> int:
        """Restore the groups in flight at a checkpoint, and return the number of batches to repeat."""
        if not step:
            store.clear()  # of a process that was killed before its first checkpoint
            return 0
        groups = store.in_flight_before(step)
        places = self._prompts.begin(len(groups))
        if places != [place for place, _ in groups] or self._prompts.position.unfinished != tuple(places):
            self._prompts.restore(self._prompts.position)
            store.say("this run has no log that leads to the checkpoint: rollouts in flight there are sampled again")
            return 0
        self._works = [_Work(place=place, begun=version) for place, version in groups]
        return store.count_from(step)

    def _repeat(self, step: int, on_rollout: OnRollout) -> Collected:
        """Return the batch of a killed run, and do to the groups in flight what it did. On rank 0."""
        assert self._store is not None
        line, collected = self._store.read(step)
        if line.begins is not None:
            self._works.clear()
            self._prompts.restore(self._prompts.position)
        groups = {place: list(group) for place, group in groupby(collected.rollouts, lambda one: one.group_id)}

        def delivered(places: Sequence[int]) -> list[_Work]:
            works = [work for work in self._works if work.place in places]
            for work in works:
                work.result = Complete(group=groups[work.place], greedy=())
            return works

        for one in line.rounds:
            self._remove([work for work in self._works if work.place in one.dropped])
            self._deliver(delivered(one.silent))
            if (begun := self._begin(len(one.begun), line.version)) != list(one.begun):
                raise DataError(
                    f"batch {step + 1} began the rows {one.begun}, and the data now gives {begun}: it is not what the "
                    "run had; restore it, or remove the folder batches of the run to collect from the checkpoint on"
                )
        self._deliver(delivered(line.batch))
        for rollout in collected.rollouts:
            on_rollout(rollout)
        self._store.say(f"batch {step + 1} is trained again from its {len(collected.rollouts)} rollouts")
        return collected

    def _go_on(self, places: Sequence[int], state: InFlight | None) -> None:
        """Go on with the groups that were in flight when the run was killed. places: all of them. state: None if they
        were not kept."""
        if state is None or not places:
            if places and self._store is not None and self._drivers.is_main:
                self._store.say(f"groups in flight that were not kept, and are sampled again: {len(places)}")
            self._lose_groups()
            return
        self._begins = None
        for work in self._works:
            if (values := state.complete.get(str(work.place))) is not None:
                work.result = Complete(*complete_of(values))
        unfinished = [place for place in places if str(place) not in state.complete]
        earlier = {place: calls_of(state.calls[str(place)]) for place in unfinished if str(place) in state.calls}
        if self._journal is not None:
            for place in filter(self._drivers.owns, earlier):
                self._journal.begin(place, earlier[place])
        if self._store is not None and self._drivers.is_main:
            num_tokens = sum(len(call.sampled_ids) for calls in earlier.values() for _, call in calls)
            self._store.say(
                f"{len(places)} groups were in flight: {len(places) - len(unfinished)} are complete, {len(unfinished)} "
                f"go on, with {num_tokens} tokens of {sum(map(len, earlier.values()))} calls"
            )
        self._drivers.loop.run(self._start(Orders(begun=unfinished)))

    def close(self) -> None:
        """Cancel groups in flight. Their prompts stay `unfinished`, so that a resumed run samples them again."""
        self._drivers.loop.run(self._cancel())
        self._drivers.loop.run(self._shared.aclose())

    # Groups in flight, as rank 0 decides

    def _complete(self) -> list[_Work]:
        return [work for work in self._works if work.is_complete]

    def _room(self, version: int) -> int:
        """Return the number of groups that may begin now."""
        steps_left = math.ceil((self._config.updates - version) / self._updates_per_step)
        steps_ahead = min(1 + self._max_staleness // self._updates_per_step, max(steps_left, 1))
        return steps_ahead * self._batch - len(self._works)

    def _begin(self, count: int, version: int) -> list[int]:
        places = self._prompts.begin(max(count, 0))
        self._works += [_Work(place=place, begun=version) for place in places]
        return places

    def _remove(self, works: Sequence[_Work]) -> Sequence[_Work]:
        """Remove groups for good: mark their prompts as finished."""
        for work in works:
            self._works.remove(work)
        self._prompts.finish(work.place for work in works)
        return works

    def _deliver(self, works: Sequence[_Work]) -> Sequence[_Work]:
        """Remove complete groups after their results are reported to the curriculum."""
        for work in works:
            self._prompts.learn(work.place, rewards_of(work.group))
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

    # Groups in flight on this rank

    async def _open(self) -> None:
        if self._sampler is not None:
            self._run_episode = await self._shared.enter_async_context(self._sampler.open(self._sampling))

    async def _start(self, orders: Orders) -> None:
        """Begin and end groups of this rank."""
        for place in orders.dropped:
            if place in self._tasks:
                self._tasks.pop(place).cancel()
        self._end_calls(orders.dropped)
        own = [place for place in orders.begun if self._drivers.owns(place)]
        if self._sampler is None or not own:
            return
        for place, row in zip(own, self._prompts.rows(own), strict=True):
            if self._journal is not None:
                self._journal.begin(place)
            task = asyncio.get_running_loop().create_task(self._make(self._sampler, place, row))
            # Else asyncio logs the failures of groups that were dropped or canceled, whose results are not read.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._tasks[place] = task

    async def _advance(self, orders: Orders) -> list[tuple[int, Complete]]:
        """Follow the orders, wait for a group of this rank, and return those that are complete."""
        await self._start(orders)
        if self._tasks:
            waiting, seconds = self._tasks.values(), self._drivers.poll_s
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=seconds)
        return await self._take_complete()

    async def _take_complete(self) -> list[tuple[int, Complete]]:
        """Return complete groups by place, once. Raises the failure of a group."""
        complete = [(place, task.result()) for place, task in self._tasks.items() if task.done()]
        for place, _ in complete:
            del self._tasks[place]
        self._end_calls([place for place, _ in complete])
        return complete

    def _end_calls(self, places: Iterable[int]) -> None:
        if self._journal is not None:
            self._journal.end(places)

    async def _calls(self) -> dict[int, Calls]:
        """Return the calls of the groups in flight on this rank."""
        return {} if self._journal is None else await self._journal.calls()

    async def _cancel(self) -> None:
        await end(self._tasks.values())
        self._end_calls(self._tasks)
        self._tasks.clear()
        self._works.clear()

    async def _make(self, sampler: Sampler, place: int, row: Row) -> Complete:
        """Sample and score a group, and the greedy answer to its prompt if the advantage needs it."""
        coroutines = [self._sample(sampler, place, row, self._sampling, self._config.rollout.samples_per_prompt)]
        if self._config.plan.needs_greedy:
            coroutines.append(self._sample(sampler, place, row, replace(self._sampling, temperature=0.0), 1))
        group, *greedy = await _all(coroutines)
        tally = Tally()
        async with self._scoring:
            scored_group = await self._rewards.score(group)
            answers = [answer for one in greedy for answer in await self._rewards.score(one, tally=tally)]
            self._rewards.refuse_errors(tally)
        return Complete(group=tuple(scored_group), greedy=tuple(answers))

    def _sample(
        self, sampler: Sampler, place: int, row: Row, sampling: Sampling, count: int
    ) -> Coroutine[Any, Any, list[Rollout]]:
        return sampler.collect(
            [row], samples_per_prompt=count, sampling=sampling, step=0, group_ids=[place], run=self._run_episode
        )

    def _collected(self, batch: Sequence[_Work], silent: Sequence[_Work], *, num_too_old: int) -> Collected:
        greedy = [answer for work in batch if work.result for answer in work.result.greedy]
        dropped_groups = [work.group for work in silent]
        collection = Collected.of([work.group for work in batch], dropped_groups, greedy, self._algorithm)
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


def _places(works: Sequence[_Work]) -> list[int]:
    return [work.place for work in works]


def made_ahead(
    pool: EnginePool | None, directory: RunDirectory, say: Callable[[str], None], *, saves_rollouts: bool
) -> tuple[Any, Callable[..., Producer]]:
    """Return the engine for the sampler of this rank, and a function that makes the source of rollouts.

    pool: None on ranks that do not drive. say: told what a resumed run repeats. saves_rollouts: False: rollouts are in
    no file, so a kill loses those in flight.
    """
    journal = None if pool is None else CallJournal(pool)
    log, store = CollectLog(directory.asynchrony), KeptBatches(directory, say) if saves_rollouts else None
    return journal, partial(Producer, log=log, store=store, journal=journal)


async def _all(coroutines: Sequence[Coroutine[Any, Any, list[Rollout]]]) -> list[list[Rollout]]:
    """Return results in order. The first failure cancels the others and is raised unwrapped."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except* Exception as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
