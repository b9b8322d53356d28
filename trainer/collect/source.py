"""Synchronous rollouts, sampled by the weights of their step.

    prompts ─► sample ─► score ─► drop groups without spread ─► greedy answers (ReMax)
                 ▲                          │
                 └─ other prompts for them ◄┘   `dynamic_sampling`, at most `max_refills` times

A group is scored as soon as it is complete, while others are sampled, unless a function sees the whole batch: groups
reach reward functions in the order in which they end, which depends on time. The stage `reward` is what scoring still
takes after the last rollout.

Rank 0 does all of this alone, keeps the records of the curriculum, and broadcasts the position in the data, so ranks
cannot decide differently. Everything is a function of the seed, the step, the position and these records.
`trainer/collect/async_source.py` samples while the trainer works.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby

from lockstep.rewards.composition import RewardSet
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.records import Rollout
from lockstep.rollout.sampler.sampler import OnRollout, Sampler
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.collect.groups import Collected, Group, is_kept, rewards_of
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Position, Prompts, Row
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.stopwatch import Stopwatch

Scoring = asyncio.Task[list[Rollout]]


class RolloutSource(ABC):
    """Source of the rollouts of a step."""

    def __init__(
        self,
        config: Config,
        *,
        distributed: Distributed,
        loop: BackgroundLoop,
        sampler: Sampler | None,
        sampling: Sampling,
        rewards: RewardSet,
        prompts: Prompts,
    ) -> None:
        """sampler: None on ranks that do not sample."""
        self._config = config
        self._algorithm = config.algorithm
        self._distributed = distributed
        self._loop = loop
        self._sampler = sampler
        self._sampling = sampling
        self._rewards = rewards
        self._prompts = prompts

    @abstractmethod
    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        """Return the rollouts of this step; a collective. Raises the error of rank 0 on all ranks.

        version: weights of the engine, which the rollouts will train.
        """

    @abstractmethod
    def forget(self) -> None:
        """Cancel rollouts in flight, after a failed `collect` or between two; their prompts are sampled again."""

    @abstractmethod
    def close(self) -> None:
        """End rollouts in flight."""

    def _take_metrics(self) -> dict[str, float]:
        """Return the metrics of rewards and sampling since the last call, and of the data."""
        sampler_metrics = self._sampler.take_metrics() if self._sampler is not None else {}
        return {**self._rewards.take_metrics(), **sampler_metrics, **self._prompts.metrics()}


class Collector(RolloutSource):
    """Synchronous source: all rollouts of a step come from its weights."""

    _before: Position | None = None
    """Position before an unfinished `collect`, which has reported nothing to the curriculum yet."""

    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        sampler = self._sampler
        self._before = self._prompts.position
        collection = self._distributed.together(
            lambda: Collected() if sampler is None else self._collect(sampler, step, watch, on_rollout)
        )
        self._before = None
        self._prompts.restore(Position(**self._distributed.broadcast(asdict(self._prompts.position))))
        return collection

    def forget(self) -> None:
        if self._before is not None:
            self._prompts.restore(self._before)
            self._before = None
        self._take_metrics()  # of rollouts that are sampled again

    def close(self) -> None:
        """Do nothing: no rollout is in flight between two steps."""

    def _collect(self, sampler: Sampler, step: int, watch: Stopwatch, on_rollout: OnRollout) -> Collected:
        groups = self._sample_groups(sampler, step, watch, on_rollout)
        kept_groups = [(row, group) for _, row, group in groups if is_kept(group, self._algorithm)]
        dropped_groups = [group for *_, group in groups if not is_kept(group, self._algorithm)]
        greedy = []
        if self._config.plan.needs_greedy:
            greedy = self._greedy_answers(sampler, [row for row, _ in kept_groups], step, watch)
        collection = Collected.of([group for _, group in kept_groups], dropped_groups, greedy, self._algorithm)
        for place, _, group in groups:
            self._prompts.learn(place, rewards_of(group))
        self._prompts.finish(place for place, *_ in groups)
        self._rewards.refuse_errors()
        return replace(collection, metrics={**self._take_metrics(), **collection.metrics})

    def _sample_groups(
        self, sampler: Sampler, step: int, watch: Stopwatch, on_rollout: OnRollout
    ) -> list[tuple[int, Row, Group]]:
        """Sample groups until enough are kept or the refills are used up. A group's id is its index in the list.

        Returns the place of its row in the data, the row, and the group.
        """
        settings, algorithm = self._config.rollout, self._algorithm
        groups: list[tuple[int, Row, Group]] = []
        for _ in range(1 + algorithm.max_refills if algorithm.dynamic_sampling else 1):
            missing = settings.prompts_per_step - sum(is_kept(group, self._algorithm) for *_, group in groups)
            if not missing:
                break
            placed_rows = self._prompts.begin(missing)
            sampling = self._sample(
                sampler, [row for _, row in placed_rows], step, first_group=len(groups), on_rollout=on_rollout
            )
            with watch.stage("rollout"):
                scoring = self._loop.run(sampling)
            with watch.stage("reward"):
                scored_rollouts = self._loop.run(_joined(scoring))
            by_group = groupby(scored_rollouts, key=lambda rollout: rollout.group_id)
            groups += [(*one, tuple(group)) for one, (_, group) in zip(placed_rows, by_group, strict=True)]
        return groups

    async def _sample(
        self, sampler: Sampler, rows: Sequence[Row], step: int, *, first_group: int, on_rollout: OnRollout
    ) -> list[Scoring]:
        """Sample a group for each row; return the tasks that score them, in order."""
        scoring: dict[int, Scoring] = {}
        slots = self._rewards.slots()

        def begin(group: Sequence[Rollout]) -> None:
            scoring[group[0].group_id] = asyncio.create_task(self._rewards.score(group, slots=slots))

        at_once = self._rewards.compares_batches
        try:
            rollouts = await sampler.collect(
                rows,
                samples_per_prompt=self._config.rollout.samples_per_prompt,
                sampling=self._sampling,
                step=step,
                first_group=first_group,
                on_rollout=on_rollout,
                on_group=(lambda group: None) if at_once else begin,
            )
        except BaseException:
            await _cancel(scoring.values())
            raise
        if at_once:
            begin(rollouts)
        return [scoring[group_id] for group_id in sorted(scoring)]

    def _greedy_answers(self, sampler: Sampler, rows: Sequence[Row], step: int, watch: Stopwatch) -> list[Rollout]:
        """Sample and score one rollout per row at temperature 0, ReMax's baseline, which is never trained."""
        with watch.stage("rollout"):
            rollouts = self._loop.run(
                sampler.collect(
                    rows, samples_per_prompt=1, sampling=replace(self._sampling, temperature=0.0), step=step
                )
            )
        with watch.stage("reward"):
            return self._loop.run(self._rewards.score(rollouts, in_metrics=False))


async def _joined(scoring: Sequence[Scoring]) -> list[Rollout]:
    """Return the rollouts of all groups. The first failure cancels the other groups."""
    try:
        return [rollout for group in await asyncio.gather(*scoring) for rollout in group]
    finally:
        await _cancel(scoring)


async def _cancel(scoring: Iterable[Scoring]) -> None:
    """Cancel these tasks and wait for them; their failures are not logged as forgotten ones."""
    for task in scoring:
        task.cancel()
    await asyncio.gather(*scoring, return_exceptions=True)
