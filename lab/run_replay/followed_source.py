"""The asynchronous source of rollouts, which sees groups arrive when they arrived in the run.

The code of the run decides again which groups begin, are dropped and are trained; each decision is compared with the
log. Groups that the run dropped or lost untrained are not sampled: a stand-in arrives in their place.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lockstep.lab.run_replay.paced_engine import ROLLOUT, Difference, PacedEngine
from lockstep.lab.run_replay.recorded_run import RecordedRun
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, VersionSpan
from lockstep.rollout.sampler.sampler import OnRollout
from lockstep.trainer.collect.async_source import Complete, Orders, Producer
from lockstep.trainer.collect.collect_log import Collection, CollectLog, Round
from lockstep.trainer.collect.groups import Collected
from lockstep.trainer.stopwatch import Stopwatch

COMPARED = ("status", "error", "rewards", "reward", "turn_rewards")
"""Fields of a scored rollout that decide what it trains, beside its calls."""


class _Comparison(CollectLog):
    """In place of the log of a run: compares with it."""

    def __init__(self, run: RecordedRun) -> None:
        super().__init__(Path())
        self._run = run

    def append(self, collection: Collection) -> None:
        logged = self._run.collections[collection.step]
        for name in ("version", "delivered"):
            if (now := getattr(collection, name)) != (then := getattr(logged, name)):
                raise Difference(f"{name} is {now}, in the run {then}")


class FollowedSource(Producer):
    """Source of a replay, in a process that is alone."""

    def __init__(self, run: RecordedRun, engine: PacedEngine, *settings: Any, **parts: Any) -> None:
        """engine: that of the sampler. settings, parts: see `Producer`."""
        super().__init__(*settings, log=_Comparison(run), **parts)
        self._run, self._engine = run, engine
        self._number = 0
        self._rounds: list[Round] = []
        """The current round of this batch, and those that have not come."""
        self.num_left_out = 0
        """Groups that were not sampled so far."""

    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        """As `Producer.collect`, but returns when all tokens of this version that the run ever trained are sampled."""
        line, loop = self._run.collections[step], self._drivers.loop
        if line.begins is not None and step:
            self.forget()  # as the kill before this batch did
        self._number, self._rounds = step, [Round([], [], [], []), *line.rounds]
        loop.run(self._engine.advance(version))
        collection = super().collect(step, version, watch, on_rollout)
        loop.run(self._engine.settled())
        return collection

    async def _open(self) -> None:
        await super()._open()
        play = self._run_episode
        assert play is not None

        async def followed(*, rollout_id: int, **episode: Any) -> Rollout:
            ROLLOUT.set(rollout_id)  # of the task of this episode
            rollout = await play(rollout_id=rollout_id, **episode)
            await self._engine.ended(rollout)
            return rollout

        self._run_episode = followed

    async def _start(self, orders: Orders) -> None:
        for name in ("dropped", "begun"):
            if (now := list(getattr(orders, name))) != (then := list(getattr(self._rounds[0], name))):
                raise Difference(f"groups {now} are {name}, in the run {then}")
        recorded = {place: self._run.group(place, begun_in=self._number) for place in orders.begun}
        for rollouts in recorded.values():
            self._engine.expect(rollouts or ())
        self.num_left_out += list(recorded.values()).count(None)
        await super()._start(orders._replace(begun=[place for place in orders.begun if recorded[place] is not None]))

    async def _advance(self, orders: Orders) -> list[tuple[int, Complete]]:
        await self._start(orders)
        return await self._take_complete()

    async def _take_complete(self) -> list[tuple[int, Complete]]:
        """Wait for the groups that arrived in this round of the run, and return them in their order."""
        del self._rounds[0]
        if not self._rounds:
            raise Difference("it waits for more groups than in the run")
        groups = []
        for place, oldest in self._rounds[0].arrived:
            complete = Complete(group=_stand_in(place, oldest), greedy=())
            if place in self._tasks:
                complete = await self._engine.unless_different(_result(self._tasks.pop(place)))
                self._compare(place, complete)
            groups.append((place, complete))
        return groups

    def _compare(self, place: int, complete: Complete) -> None:
        for now, then in zip(complete.group, self._run.group(place, begun_in=self._number) or (), strict=True):
            for name in COMPARED:
                if (value := getattr(now, name)) != getattr(then, name):
                    raise Difference(f"rollout {now.rollout_id}: {name} {value}, in the run {getattr(then, name)}")


async def _result(task: asyncio.Task[Complete]) -> Complete:
    return await task


def _stand_in(place: int, oldest: int) -> tuple[Rollout, ...]:
    """Return a group that counts as the dropped one did: with spread, and as old."""
    call = EngineCall(
        prompt_ids=(0,),
        sampled_ids=(0,),
        sampled_logprobs=(0.0,),
        finish_reason=FinishReason.LENGTH,
        version_spans=(VersionSpan(version=oldest, start=0, end=1),),
    )
    return tuple(Rollout(rollout_id=-1, group_id=place, calls=(call,), reward=reward) for reward in (0.0, 1.0))
