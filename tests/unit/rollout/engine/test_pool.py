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
from lockstep.rollout.errors import ConfigError, EngineError, EngineLostError
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


async def test_requests_of_a_lost_engine_go_to_the_others_and_no_more_come() -> None:
    a, b = Member("a"), Member("b")
    pool, lost = pool_of(a, b), []
    pool.on_lost = lambda member, error: lost.append((member.name, str(error)))
    tasks = await sent(pool, *[None] * 6)
    assert (len(a.seen), len(b.seen)) == (3, 3)
    a.failure = EngineLostError("a is gone")
    a.may_answer.set()
    b.may_answer.set()
    assert await asyncio.gather(*tasks) == ["b"] * 6
    assert await asyncio.gather(*await sent(pool, *[None] * 4)) == ["b"] * 4
    assert lost == [("a", "a is gone")], "once, not for each of its requests"
    assert pool.num_resent == 3
    assert (len(a.seen), len(b.seen)) == (3, 3 + 3 + 4)


async def test_a_group_of_a_lost_engine_stays_together_on_another_one() -> None:
    members = [Member("a"), Member("b"), Member("c")]
    for member in members:
        member.may_answer.set()
    pool = pool_of(*members)
    pool.on_lost = lambda member, error: None
    key = replace(SAMPLING, affinity=(0, 0))
    first = await pool.generate((1,), key)
    next(member for member in members if member.name == first).failure = EngineLostError("gone")
    again = [await pool.generate((1,), key) for _ in range(4)]
    assert len(set(again)) == 1
    assert again[0] != first


async def test_a_pool_without_engines_says_so_until_one_is_added() -> None:
    a = Member("a")
    a.may_answer.set()
    a.failure = EngineLostError("a is gone")
    pool = pool_of(a)
    pool.on_lost = lambda member, error: None
    with pytest.raises(EngineLostError, match="a is gone"):
        await pool.generate((1,), SAMPLING)
    with pytest.raises(EngineLostError, match="no engine is left"):
        await pool.generate((1,), SAMPLING)
    assert pool.max_model_len == 64
    a.failure = None
    pool.add(a)
    assert await pool.generate((1,), SAMPLING) == "a"


@pytest.mark.parametrize("failure", [EngineError("the prompt is too long"), EngineError("ids outside the vocabulary")])
async def test_a_request_that_an_engine_refuses_condemns_no_engine(failure: EngineError) -> None:
    a, b = Member("a"), Member("b")
    for member in (a, b):
        member.may_answer.set()
        member.failure = failure
    pool = pool_of(a, b)
    pool.on_lost = lambda member, error: pytest.fail("no engine is lost")
    with pytest.raises(EngineError, match=str(failure)):
        await pool.generate((1,), SAMPLING)
    assert pool.members == (a, b)


async def test_engines_without_a_sync_are_asked_again_until_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.rollout.engine.pool.PAUSE_S", 0.0)
    a, b = Member("a"), Member("b")
    pool = EnginePool([a, b], patience_s=60.0)  # type: ignore[list-item]
    for member in (a, b):
        member.may_answer.set()
        member.failure = EngineLostError(f"{member.name} is gone")
    (task,) = await sent(pool, None)
    while len(b.seen) < 3:
        await asyncio.sleep(0)
    assert not task.done()
    a.failure = None
    assert await task == "a"


async def test_engines_without_a_sync_end_a_request_when_patience_is_over() -> None:
    a = Member("a")
    a.may_answer.set()
    a.failure = EngineLostError("a is gone")
    with pytest.raises(EngineError, match="a is gone") as raised:
        await pool_of(a).generate((1,), SAMPLING)
    assert type(raised.value) is EngineError, "no recovery can bring it back"
