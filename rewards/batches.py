"""Calls of reward functions: what they see of the rollouts (one, a group, all), and what they return as numbers."""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any

import numpy as np

from lockstep.rewards.meter import Meter, measuring
from lockstep.rewards.outcomes import Verdict, judge_batch
from lockstep.rollout.records import Rollout
from lockstep.rollout.system.background_loop import in_shared_loop, run_coroutine
from lockstep.rollout.system.deadline import call_with_deadline, is_async

GROUP_PARAMETER = "rollouts"
"""Name of the first parameter that makes a function group-wise."""
MAX_REWARDS = 2**20
"""Items that are read of what a function returns: a generator may never end."""


class Scope(StrEnum):
    """Rollouts that a reward function sees in one call."""

    ROLLOUT = "rollout"
    """One rollout."""
    GROUP = "group"
    """The rollouts of one prompt that have not failed, in the order of their ids."""
    BATCH = "batch"
    """All rollouts that are scored together."""

    async def judge(
        self, rollouts: Sequence[Rollout], call: Callable[[Sequence[Rollout]], Awaitable[Sequence[Verdict]]]
    ) -> list[Verdict]:
        """Return one verdict per rollout, in order. call: returns those on the rollouts of one call."""
        parts = self._split(rollouts)
        verdict_lists = await asyncio.gather(*(call([rollouts[index] for index in part]) for part in parts))
        verdicts = {
            index: verdict
            for part, part_verdicts in zip(parts, verdict_lists, strict=True)
            for index, verdict in zip(part, part_verdicts, strict=True)
        }
        return [verdicts[index] for index in range(len(rollouts))]

    def _split(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        """Return the indices of the rollouts of each call."""
        if self is Scope.BATCH:
            return [list(range(len(rollouts)))]
        parts: defaultdict[int, list[int]] = defaultdict(list)
        for index, rollout in enumerate(rollouts):
            parts[rollout.group_id if self is Scope.GROUP else index].append(index)
        return [sorted(part, key=lambda index: rollouts[index].rollout_id) for part in parts.values()]


class Slots:
    """Limits on concurrent calls in this process, for groups that are scored at the same time."""

    def __init__(self, concurrency: int) -> None:
        self.calls = asyncio.Semaphore(concurrency)
        self._lanes: defaultdict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(1))
        """By `id` of the function: callable objects need not have a hash."""

    def of(self, reward: BatchReward) -> asyncio.Semaphore:
        """Async group-wise functions make many requests at once, so the next group waits, outside its deadline."""
        is_alone = reward.scope is Scope.GROUP and is_async(reward.function)
        return self._lanes[id(reward.function)] if is_alone else self.calls


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReward:
    """A reward function as it is called: with some of the rollouts, for which it returns a list of rewards."""

    function: Callable[..., Any]
    arguments: Callable[[Sequence[Rollout]], Mapping[str, Any]]
    """Returns its keyword arguments."""
    scope: Scope = Scope.BATCH
    load: Callable[[], None] = lambda: None
    """Loads what the function needs (a model) before its first call, outside its deadline."""

    def calling(self, rollouts: Sequence[Rollout]) -> Callable[[], Any]:
        """Return the call on rollouts, async if the function is. It returns plain numbers where it can.

        Arguments are made and numbers converted within the call, so that whatever they raise is an error of it.
        """

        def call() -> Any:
            return plain(self.function(**self.arguments(rollouts)))

        async def call_async() -> Any:
            return plain(await self.function(**self.arguments(rollouts)))

        return call_async if is_async(self.function) else call

    async def judge(
        self,
        rollouts: Sequence[Rollout],
        meter: Meter,
        *,
        timeout_s: float,
        by_turn: bool = False,
        slots: Slots,
    ) -> list[Verdict]:
        """Return one verdict per rollout, from calls in this process. The limit counts from the start of each call.

        meter: gets what the function measures. by_turn: the function may return one number per turn. slots: of calls.
        """
        lane = slots.of(self)

        async def call(seen: Sequence[Rollout]) -> list[Verdict]:
            calling = self.calling(seen)
            calling = partial(in_shared_loop, calling) if is_async(calling) else calling
            async with lane:
                with measuring(Meter(num_updates=meter.num_updates)) as own:
                    result = await call_with_deadline(calling, timeout_s=timeout_s)
            meter.merge(own.sums, own.counts)
            num_turns = [rollout.num_turns if by_turn else None for rollout in seen]
            return judge_batch(result, num_turns, dict(own.columns))

        return await self.scope.judge(rollouts, call)


def each(
    function: Callable[..., Any],
    arguments: Callable[[Rollout], Mapping[str, Any]] | None = None,
    read: Callable[[Any], Any] = lambda value: value,
) -> BatchReward:
    """Adapt a function of one rollout. arguments: keywords in place of the rollout. read: of what it returns."""

    def result(rollout: Rollout) -> Any:
        return function(rollout) if arguments is None else function(**arguments(rollout))

    def score(rollout: Rollout) -> list[Any]:
        return [read(plain(result(rollout)))]

    async def score_async(rollout: Rollout) -> list[Any]:
        return [read(plain(await result(rollout)))]

    return BatchReward(
        function=score_async if is_async(function) else score,
        arguments=lambda rollouts: {"rollout": private_copy(rollouts[0])},
        scope=Scope.ROLLOUT,
    )


def plain(value: Any) -> Any:
    """Return numbers in arrays, tensors and other classes as those of Python, also in lists; other values unchanged.

    Awaits the coroutine that a plain function returns, as one that wraps an async function does.
    """
    if inspect.iscoroutine(value):
        value = run_coroutine(value)
    torch = sys.modules.get("torch")  # a function that returns tensors has imported it
    if isinstance(value, np.ndarray | np.generic) or (torch is not None and isinstance(value, torch.Tensor)):
        value = value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Set):
        return [plain(item) for item in islice(value, MAX_REWARDS)]
    return float(value) if isinstance(value, Real) and type(value) not in (bool, int, float) else value


def is_group_wise(function: Callable[..., Any]) -> bool:
    """Return True if the first parameter of a function, or of calls of a class's instances, is named `rollouts`."""
    is_class = inspect.isclass(function)
    parameters = list(inspect.signature(function.__call__ if is_class else function).parameters)
    return parameters[is_class:][:1] == [GROUP_PARAMETER]


def group_wise(function: Callable[..., Any], settings: Mapping[str, Any]) -> BatchReward:
    """Adapt `fn(rollouts, **settings) -> list[float | None]`, sync or async, which is called once per group."""
    bound = partial(function, **settings) if settings else function
    return BatchReward(function=bound, arguments=_group_arguments, scope=Scope.GROUP)


def private_copy(rollout: Rollout) -> Rollout:
    """Return a copy whose changes by a function no other function sees."""
    return replace(rollout, messages=copy.deepcopy(rollout.messages), example=copy.deepcopy(rollout.example))


def _group_arguments(rollouts: Sequence[Rollout]) -> Mapping[str, Any]:
    return {GROUP_PARAMETER: [private_copy(rollout) for rollout in rollouts]}
