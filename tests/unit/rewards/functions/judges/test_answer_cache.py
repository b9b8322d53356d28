"""Answers of slow calls, kept by request."""

from __future__ import annotations

import asyncio

import pytest

from lockstep.rewards.functions.judges.answer_cache import AnswerCache
from lockstep.rollout.errors import RewardError


class Source:
    """Calls that answer with their number, after `wait`, or fail."""

    def __init__(self, *failures: BaseException | None) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        number = self.calls
        await asyncio.sleep(0.02)
        if len(self.failures) >= number and (failure := self.failures[number - 1]) is not None:
            raise failure
        return str(number)


def test_equal_requests_at_the_same_time_make_one_call():
    cache, source = AnswerCache(4), Source()

    async def run():
        return await asyncio.gather(*(cache.get(b"a", source) for _ in range(5)))

    answers = asyncio.run(run())
    assert source.calls == 1
    assert sorted(answers) == [("1", False), *[("1", True)] * 4]
    assert asyncio.run(cache.get(b"a", source)) == ("1", True)  # from another event loop
    assert asyncio.run(cache.get(b"b", source)) == ("2", False)


def test_a_cache_of_size_0_shares_nothing():
    cache, source = AnswerCache(0), Source()

    async def run():
        return await asyncio.gather(*(cache.get(b"a", source) for _ in range(3)))

    assert [answer for answer, _ in asyncio.run(run())] == ["1", "2", "3"]


def test_the_least_recently_used_answer_is_given_up():
    cache, source = AnswerCache(2), Source()
    for key in (b"a", b"b", b"a", b"c"):
        asyncio.run(cache.get(key, source))
    assert [asyncio.run(cache.get(key, source))[1] for key in (b"a", b"c", b"b")] == [True, True, False]


def test_a_failure_is_shared_by_those_who_wait_and_not_kept():
    cache, source = AnswerCache(4), Source(RewardError("refused"))

    async def run():
        return await asyncio.gather(*(cache.get(b"a", source) for _ in range(3)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(run())] == ["refused"] * 3
    assert source.calls == 1
    assert asyncio.run(cache.get(b"a", source)) == ("2", False)


def test_a_caller_that_is_cancelled_leaves_the_call_to_one_of_those_who_wait():
    cache, source = AnswerCache(4), Source()

    async def run():
        tasks = [asyncio.create_task(cache.get(b"a", source)) for _ in range(4)]
        await asyncio.sleep(0.005)
        tasks[0].cancel()  # makes the call
        tasks[1].cancel()  # waits for it
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, *others = asyncio.run(run())
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(second, asyncio.CancelledError)
    assert others == [("2", False), ("2", True)]


@pytest.mark.parametrize("cancelled", [1, 2])
def test_a_waiting_caller_that_is_cancelled_costs_the_others_nothing(cancelled: int):
    cache, source = AnswerCache(4), Source()

    async def run():
        tasks = [asyncio.create_task(cache.get(b"a", source)) for _ in range(3)]
        await asyncio.sleep(0.005)
        tasks[cancelled].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(run())
    assert isinstance(answers[cancelled], asyncio.CancelledError)
    assert answers[0] == ("1", False)
    assert answers[3 - cancelled] == ("1", True)
    assert source.calls == 1
