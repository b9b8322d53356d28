"""Sampling and scoring of groups by all drivers.

A group is scored as soon as it is complete, while others are sampled, unless a function sees the whole batch: then
rank 0 gets the rollouts of all drivers and scores them at once. Groups reach reward functions in the order in which
they end, which depends on time. The stage `reward` is what scoring still takes after the last rollout.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby

from lockstep.rewards.composition import RewardSet, Tally
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.records import Rollout
from lockstep.rollout.sampler.sampler import OnRollout, Sampler
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.data.prompts import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The parts that sample and score, on one rank."""

    drivers: Drivers
    sampler: Sampler | None
    """None on ranks that do not drive."""
    rewards: RewardSet

    def groups(
        self,
        places: Sequence[int],
        read: Callable[[Sequence[int]], Sequence[Row]],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        step: int,
        stage: Callable[[str], AbstractContextManager[object]],
        first_group: int = 0,
        on_rollout: OnRollout = lambda rollout: None,
        tally: Tally | None = None,
        is_shaped: bool = True,
    ) -> list[list[Rollout]]:
        """Sample and score a group for each place; a collective. Returns them on rank 0, in order; nothing elsewhere.

        Ids and seeds are those of the position in the step, whichever rank samples. Raises on all ranks what sampling
        and scoring raise on one.

        read: returns the data rows at places. stage: context of the stages `rollout` and `reward`. first_group: number
        of the first group in the step. on_rollout: called on rank 0 with each of its own rollouts as it ends, and with
        those of other drivers as their groups arrive. tally: counts what is not in the metrics of training, and raises
        for too many errors; None: in the metrics. is_shaped: as in `RewardSet.score`.
        """
        drivers, rewards = self.drivers, self.rewards
        drivers.renew()
        own = {first_group + i: place for i, place in enumerate(places) if drivers.owns(first_group + i)}
        rows = drivers.together(lambda: read(list(own.values())))
        complete: deque[list[Rollout]] = deque()
        """Groups of this rank that rank 0 has not received."""
        groups: dict[int, list[Rollout]] = {}
        scoring: list[asyncio.Task[None]] = []
        slots = rewards.slots()
        is_scored_at_once = rewards.compares_batches

        async def score(group: Sequence[Rollout]) -> None:
            complete.append(await rewards.score(group, tally=tally, is_shaped=is_shaped, slots=slots))

        def on_group(group: list[Rollout]) -> None:
            if is_scored_at_once:
                complete.append(group)
            else:
                scoring.append(asyncio.create_task(score(group)))

        async def sample() -> None:
            if self.sampler is not None and own:
                await self.sampler.collect(
                    rows,
                    samples_per_prompt=samples_per_prompt,
                    sampling=sampling,
                    step=step,
                    group_ids=list(own),
                    on_rollout=on_rollout if drivers.is_main else lambda rollout: None,
                    on_group=on_group,
                )

        async def finish() -> None:
            if is_scored_at_once and drivers.is_main:
                rollouts = [rollout for group_id in sorted(groups) for rollout in groups[group_id]]
                scored = await rewards.score(rollouts, tally=tally, is_shaped=is_shaped, slots=slots)
                complete.extend(list(group) for _, group in groupby(scored, key=lambda rollout: rollout.group_id))
            await asyncio.gather(*scoring)

        def receive(group: list[Rollout]) -> None:
            group_id = group[0].group_id
            for rollout in group if group_id not in groups and group_id not in own else ():
                on_rollout(rollout)
            groups[group_id] = group

        def take() -> list[list[Rollout]]:
            return [complete.popleft() for _ in range(len(complete))]

        try:
            with stage("rollout"):
                drivers.run(sample(), take, receive)
            with stage("reward"):
                drivers.run(finish(), take, receive)
        except BaseException as error:
            drivers.end(scoring, after=error)
            raise
        if tally is not None:
            for other in drivers.gather(lambda: [] if drivers.is_main else [tally]):
                tally.add(other)
            drivers.together(lambda: rewards.refuse_errors(tally) if drivers.is_main else None)
        return [groups[group_id] for group_id in sorted(groups)]

    def hand_over(self) -> None:
        """Add to the counts of rank 0, for its metrics and limits, those of the other drivers; a collective."""

        def counts() -> Iterable[tuple[Tally, dict[str, int]]]:
            if not self.drivers.is_main and self.sampler is not None:
                yield self.rewards.take_tally(), self.sampler.take_faults()

        for tally, faults in self.drivers.gather(counts):
            self.rewards.add(tally)
            if self.sampler is not None:
                self.sampler.add_faults(faults)
