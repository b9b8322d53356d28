"""Routing of an engine pool: one engine per group, and the least loaded engine for a new group."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.rollout.engine.pool import SKEW_FACTOR, SKEW_REQUESTS, EnginePool
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import ConfigError, EngineError
from lockstep.rollout.records import ImageSpan

SAMPLING = Sampling(max_tokens=4)


class Member:
    """An engine that holds every request until `may_answer` is set."""

    max_model_len, vocab_size, dtype, loop = 64, 512, torch.float32, None

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[tuple[int, ...] | None] = []
        self.may_answer = asyncio.Event()
        self.failure: Exception | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()) -> Any:
        self.seen.append(sampling.affinity)
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return self.name


def pool_of(*members: Any) -> EnginePool:
    return EnginePool(members)


async def sent(pool: EnginePool, *keys: tuple[int, ...] | None) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(pool.generate((1,), replace(SAMPLING, affinity=key))) for key in keys]
    await asyncio.sleep(0)
    return tasks


async def test_groups_stay_together_and_are_spread_over_the_engines():
    members = [Member("a"), Member("b")]
    keys = [(0, group) for group in range(6) for _ in range(4)]
    tasks = await sent(pool_of(*members), *keys)
    for member in members:
        assert len(member.seen) == 12
        assert set(Counter(member.seen).values()) == {4}
        member.may_answer.set()
    await asyncio.gather(*tasks)


async def test_later_turns_of_a_group_go_to_the_same_engine():
    a, b = Member("a"), Member("b")
    a.may_answer.set()
    b.may_answer.set()
    pool = pool_of(a, b)
    first = [await pool.generate((1,), replace(SAMPLING, affinity=(0, group))) for group in range(8)]
    again = [await pool.generate((1,), replace(SAMPLING, affinity=(0, group))) for group in reversed(range(8))]
    assert first == again[::-1]


async def test_a_group_moves_away_from_an_overloaded_engine():
    a, b = Member("a"), Member("b")
    pool = pool_of(a, b)
    tasks = await sent(pool, *[(0, 0)] * (SKEW_REQUESTS + 2))
    assert (len(a.seen), len(b.seen)) == (SKEW_REQUESTS + 1, 1)
    tasks += await sent(pool, *[(0, 0)] * 4)
    assert len(b.seen) == 5, f"it stays on the new engine, which may have {SKEW_FACTOR} times the load"
    a.may_answer.set()
    b.may_answer.set()
    await asyncio.gather(*tasks)


async def test_requests_without_a_group_go_to_the_least_loaded():
    members = [Member("a"), Member("b"), Member("c")]
    tasks = await sent(pool_of(*members), *[None] * 9)
    assert [len(member.seen) for member in members] == [3, 3, 3]
    for member in members:
        member.may_answer.set()
    await asyncio.gather(*tasks)


async def test_a_failed_request_is_not_moved_to_another_engine():
    a, b = Member("a"), Member("b")
    a.failure = EngineError("a is gone")
    a.may_answer.set()
    b.may_answer.set()
    pool = pool_of(a, b)
    with pytest.raises(EngineError, match="a is gone"):
        await pool.generate((1,), SAMPLING)


def test_engines_that_differ_are_refused():
    other = Member("b")
    other.vocab_size = 1024
    with pytest.raises(ConfigError, match="start all engines with the same model"):
        pool_of(Member("a"), other)
    with pytest.raises(ConfigError, match="at least one"):
        pool_of()
