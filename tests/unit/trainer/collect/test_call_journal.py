"""The journal of calls: answers of a killed run come again, and only to the requests that they belong to."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.rollout.engine.partial_answers import joined, partial_call
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import RequestError
from lockstep.rollout.records import EngineCall, FinishReason, ImageSpan, SamplingSupport, VersionSpan
from lockstep.trainer.collect.call_journal import CallJournal, Key

SAMPLING = Sampling(max_tokens=10, seed=3, affinity=(0, 7))
KEY = Key(3, 1.0)


def call(prompt: tuple[int, ...], ids: tuple[int, ...], *, version: int = 0, finish: str = "stop") -> EngineCall:
    return EngineCall(
        prompt_ids=prompt,
        sampled_ids=ids,
        sampled_logprobs=tuple(-0.1 * token for token in ids),
        finish_reason=FinishReason(finish),
        version_spans=(VersionSpan(version=version, start=0, end=len(ids)),),
        support=SamplingSupport(
            offsets=np.arange(len(ids) + 1) * 2, token_ids=np.array([one for token in ids for one in (token, 99)])
        ),
    )


class Pool:
    """Engine that answers with the next token of its own, and remembers what it was asked."""

    members = ()
    max_model_len = 64

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], Sampling]] = []
        self.gate: asyncio.Event | None = None

    async def generate(self, prompt_ids: Any, sampling: Sampling, images: Any = ()) -> EngineCall:
        self.asked.append((tuple(prompt_ids), sampling))
        if self.gate is not None:
            await self.gate.wait()
        return call(tuple(prompt_ids), (8, 9), version=2)


def ask(journal: CallJournal, prompt: tuple[int, ...] = (1, 2), sampling: Sampling = SAMPLING) -> EngineCall:
    return asyncio.run(journal.generate(prompt, sampling))


def journal_of(*calls: tuple[Key, EngineCall]) -> tuple[CallJournal, Pool]:
    pool = Pool()
    journal = CallJournal(pool)  # type: ignore[arg-type]
    journal.begin(7, calls)
    return journal, pool


def test_a_call_that_had_ended_comes_again_once() -> None:
    first = call((1, 2), (5, 6))
    journal, pool = journal_of((KEY, first))
    assert ask(journal) == first
    assert not pool.asked
    assert ask(journal).sampled_ids == (8, 9)


def test_the_rest_of_an_interrupted_call_is_sampled() -> None:
    journal, pool = journal_of((KEY, call((1, 2), (5, 6, 7), finish="abort")))
    answer = ask(journal)
    ((prompt, sampling),) = pool.asked
    assert prompt == (1, 2, 5, 6, 7)
    assert (sampling.max_tokens, sampling.drawn, sampling.seed) == (7, 3, 3)
    assert answer == replace(
        call((1, 2), (5, 6, 7, 8, 9)),
        version_spans=(VersionSpan(version=0, start=0, end=3), VersionSpan(version=2, start=3, end=5)),
        support=answer.support,
    )
    assert answer.support is not None
    assert answer.support.token_ids.tolist() == [5, 99, 6, 99, 7, 99, 8, 99, 9, 99]
    assert answer.support.offsets.tolist() == [0, 2, 4, 6, 8, 10]
    assert answer.prompt_ids == (1, 2)


@pytest.mark.parametrize(
    ("prompt", "change"),
    [
        ((1, 3), {}),
        ((1, 2), {"seed": 4}),
        ((1, 2), {"temperature": 0.5}),
        ((1, 2), {"affinity": (0, 8)}),
        ((1, 2), {"affinity": None}),
        ((1, 2), {"affinity": (7,)}),
        ((1, 2), {"is_trained": False}),
    ],
)
def test_other_requests_are_sampled(prompt: tuple[int, ...], change: dict[str, Any]) -> None:
    journal, pool = journal_of((KEY, call((1, 2), (5, 6))))
    assert ask(journal, prompt, replace(SAMPLING, **change)).sampled_ids == (8, 9)
    assert [asked for asked, _ in pool.asked] == [prompt]


def test_an_episode_that_asks_something_else_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    journal, _ = journal_of((KEY, call((1, 2), (5,))), (Key(4, 1.0), call((1, 2), (5,))))
    with caplog.at_level(logging.WARNING):
        ask(journal, (1, 3))
        ask(journal, (1, 3), replace(SAMPLING, seed=4))
    assert [record.getMessage()[:47] for record in caplog.records] == [
        "an episode of group (0, 7) asks something else "
    ]


def test_other_images_are_another_prompt() -> None:
    image = ImageSpan(start=0, end=1, digest="00" * 32)
    journal, pool = journal_of((KEY, replace(call((1, 2), (5,)), images=(image,))))
    assert ask(journal).sampled_ids == (8, 9)
    assert len(pool.asked) == 1


def calls_of(journal: CallJournal) -> dict[int, list[tuple[Key, tuple[int, ...], str]]]:
    found = asyncio.run(journal.calls())
    return {place: [(key, one.sampled_ids, one.finish_reason) for key, one in calls] for place, calls in found.items()}


def test_all_calls_of_groups_in_flight_are_kept() -> None:
    journal, _ = journal_of((Key(1, 1.0), call((1, 2), (5,))), (Key(2, 1.0), call((1, 2), (6,), finish="abort")))
    journal.begin(8)
    journal.begin(9)
    ask(journal)
    ask(journal, sampling=replace(SAMPLING, seed=1))
    ask(journal, sampling=replace(SAMPLING, affinity=(0, 8)))
    assert calls_of(journal) == {
        7: [(KEY, (8, 9), "stop"), (Key(1, 1.0), (5,), "stop"), (Key(2, 1.0), (6,), "abort")],
        8: [(KEY, (8, 9), "stop")],
    }
    journal.end([7, 8])
    assert calls_of(journal) == {}


def test_what_an_interrupted_call_had_stays_while_its_rest_is_sampled() -> None:
    journal, pool = journal_of((KEY, call((1, 2), (5, 6, 7), finish="abort")))

    async def twice() -> tuple[Any, Any]:
        pool.gate = asyncio.Event()
        task = asyncio.create_task(journal.generate((1, 2), SAMPLING))
        while not pool.asked:
            await asyncio.sleep(0)
        during = await journal.calls()
        pool.gate.set()
        await task
        return during, await journal.calls()

    during, afterwards = asyncio.run(twice())
    assert [(key, one.sampled_ids, one.finish_reason) for key, one in during[7]] == [(KEY, (5, 6, 7), "abort")]
    assert [(key, one.sampled_ids, one.finish_reason) for key, one in afterwards[7]] == [(KEY, (5, 6, 7, 8, 9), "stop")]


def test_after_a_failed_request_an_interrupted_call_still_has_its_beginning() -> None:
    class Failing(Pool):
        async def generate(self, prompt_ids: Any, sampling: Sampling, images: Any = ()) -> EngineCall:
            if not self.asked:
                self.asked.append((tuple(prompt_ids), sampling))
                raise RequestError("once")
            return await super().generate(prompt_ids, sampling, images)

    pool = Failing()
    journal = CallJournal(pool)  # type: ignore[arg-type]
    journal.begin(7, [(KEY, call((1, 2), (5, 6, 7), finish="abort"))])
    with pytest.raises(RequestError):
        ask(journal)
    assert calls_of(journal) == {7: [(KEY, (5, 6, 7), "abort")]}
    assert ask(journal).sampled_ids == (5, 6, 7, 8, 9)


def test_an_engine_elsewhere_has_no_partial_calls() -> None:
    assert partial_call(object(), (1,), replace(SAMPLING, name="one")) is None


def test_joined_calls_have_the_end_of_the_second() -> None:
    whole = joined(call((1,), (4,), finish="abort"), call((1, 4), (5, 6), version=1, finish="length"))
    assert whole.finish_reason is FinishReason.LENGTH
    assert whole.sampled_logprobs == (-0.4, -0.5, -0.1 * 6)
