"""Reward functions that see several rollouts in one call: those of a group, or all that are scored together."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from lockstep.rewards.outcomes import Verdict
from lockstep.rollout.records import Rollout

GROUP_PARAMETER = "rollouts"
"""Name of the first parameter that makes a function group-wise."""


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
        judged = await asyncio.gather(*(call([rollouts[index] for index in part]) for part in parts))
        verdicts = {
            index: verdict
            for part, found in zip(parts, judged, strict=True)
            for index, verdict in zip(part, found, strict=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReward:
    """A reward function that scores several rollouts in one call, and how its arguments are made."""

    function: Callable[..., Any]
    arguments: Callable[[Sequence[Rollout]], Mapping[str, Any]]
    scope: Scope = Scope.BATCH
    load: Callable[[], None] = lambda: None
    """Loads what the function needs (a model) before its first call, outside its deadline."""


def scope_of(function: Callable[..., Any] | BatchReward) -> Scope:
    return function.scope if isinstance(function, BatchReward) else Scope.ROLLOUT


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
