"""A pool sends a group to one engine, and new groups to the engine with the least to do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.engine.pool import SKEW_FACTOR, SKEW_REQUESTS, EnginePool
from rollout.engine.protocol import Sampling
from rollout.errors import ConfigError, EngineError

SAMPLING = Sampling(max_tokens=4)


class Member:
    """Holds every request until it is let go."""

    max_model_len, vocab_size, dtype, loop = 64, 512, torch.float32, None

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[tuple[int, ...] | None] = []
        self.may_answer = asyncio.Event()
        self.failure: Exception | None = None
        self.is_paused = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Any:
        self.seen.append(sampling.affinity)
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return self.name

    async def pause(self, mode: str) -> None:
        self.is_paused = True


def pool_of(*members: Any) -> EnginePool:
    return EnginePool(members)


async def sent(pool: EnginePool, *keys: tuple[int, ...] | None) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(pool.generate((1,), replace(SAMPLING, affinity=key))) for key in keys]
    await asyncio.sleep(0)
    return tasks


async def test_groups_stay_together_and_are_spread():
    members = [Member("a"), Member("b")]
    keys = [(0, group) for group in range(6) for _ in range(4)]
    tasks = await sent(pool_of(*members), *keys)
    for member in members:
        assert len(member.seen) == 12
        assert set(Counter(member.seen).values()) == {4}
        member.may_answer.set()
    await asyncio.gather(*tasks)


async def test_a_later_turn_of_a_group_goes_where_its_first_went():
    a, b = Member("a"), Member("b")
    a.may_answer.set()
    b.may_answer.set()
    pool = pool_of(a, b)
    first = [await pool.generate((1,), replace(SAMPLING, affinity=(0, group))) for group in range(8)]
    again = [await pool.generate((1,), replace(SAMPLING, affinity=(0, group))) for group in reversed(range(8))]
    assert first == again[::-1]


async def test_a_group_moves_when_its_engine_is_far_behind():
    a, b = Member("a"), Member("b")
    pool = pool_of(a, b)
    tasks = await sent(pool, *[(0, 0)] * (SKEW_REQUESTS + 2))
    assert (len(a.seen), len(b.seen)) == (SKEW_REQUESTS + 1, 1)
    tasks += await sent(pool, *[(0, 0)] * 4)
    assert len(b.seen) == 5, f"it stays where it moved to; {SKEW_FACTOR} times the load is allowed"
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


async def test_a_failure_is_not_hidden_by_another_engine():
    a, b = Member("a"), Member("b")
    a.failure = EngineError("a is gone")
    a.may_answer.set()
    b.may_answer.set()
    pool = pool_of(a, b)
    with pytest.raises(EngineError, match="a is gone"):
        await pool.generate((1,), SAMPLING)


async def test_all_engines_are_paused():
    members = [Member("a"), Member("b")]
    await pool_of(*members).pause("wait")
    assert all(member.is_paused for member in members)


def test_engines_that_differ_are_refused():
    other = Member("b")
    other.vocab_size = 1024
    with pytest.raises(ConfigError, match="start all engines with the same model"):
        pool_of(Member("a"), other)
    with pytest.raises(ConfigError, match="at least one"):
        pool_of()
