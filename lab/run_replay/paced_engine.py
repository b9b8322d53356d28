"""An engine that samples every call as a run did: each token by the weights of the same version.

    recorded call   ├──── version 3 ────┼── version 4 ──┤
    requests        prompt, 20 tokens     prompt + 20 tokens, after 20 draws (`Sampling.drawn`)

A call that a weight sync interrupted is one request per version. A request waits until its version is loaded, and the
trainer waits, before it changes the weights, until all requests of the old version are answered. Each answer is
compared with the record bit by bit; the first difference ends the replay.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.records import EngineCall, ImageSpan, Rollout, VersionSpan

T = TypeVar("T")

ROLLOUT: ContextVar[int] = ContextVar("ROLLOUT")
"""Rollout whose episode the task plays."""


class Difference(Exception):
    """The first difference between a run and its replay, in a sentence."""


class PacedEngine:
    """Engine that follows recorded calls. Its coroutines run in the loop of the engine behind it."""

    def __init__(self, engine: Engine, *, patience_s: float) -> None:
        """patience_s: time without a token after which a replay that waits ends [s]."""
        self._engine, self._patience_s = engine, patience_s
        self._version = -1
        self._calls: dict[int, list[tuple[int, EngineCall]]] = {}
        """Recorded calls that were not made yet, with their numbers, by rollout."""
        self._owed: Counter[int] = Counter()
        """Number of requests that are not answered yet, by version."""
        self._changed = asyncio.Condition()
        self._difference = ""
        self.num_tokens = self.num_interrupted = 0
        """Sampled tokens, and calls of several versions, so far."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)  # limits, scores, the end

    # Announcements of the source of rollouts

    def expect(self, rollouts: Iterable[Rollout]) -> None:
        """Announce the recorded rollouts of a group that begins."""
        for rollout in rollouts:
            self._calls[rollout.rollout_id] = list(enumerate(rollout.calls, start=1))
            self._owed.update(span.version for call in rollout.calls for span in _spans(call))

    async def advance(self, version: int) -> None:
        """Let requests of this version begin: the engine has its weights."""
        self._version = version
        await self._notify()

    async def settled(self) -> None:
        """Wait until no request of the weights so far is missing. Raises `Difference`."""
        await self.unless_different(
            self._until(lambda: not any(count for of, count in self._owed.items() if of <= self._version))
        )

    async def ended(self, rollout: Rollout) -> None:
        """Compare the number of calls at the end of an episode."""
        if left := self._calls.pop(rollout.rollout_id, []):
            why = rollout.error or rollout.status
            await self._differ(f"rollout {rollout.rollout_id} ends ({why}), in the run call {left[0][0]} follows")

    async def unless_different(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises `Difference` as soon as there is one."""
        task = asyncio.ensure_future(work)
        different = asyncio.ensure_future(self._until(lambda: bool(self._difference)))
        try:
            num_before, done = -1, set[Any]()
            while not done and self.num_tokens != num_before:
                num_before, both = self.num_tokens, {task, different}
                done, _ = await asyncio.wait(both, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED)
            if self._difference or not done:
                waits = f"no token was sampled for {self._patience_s:g} s, but episodes of the run went on"
                raise Difference(self._difference or waits)
            return task.result()
        finally:
            different.cancel()
            task.cancel()

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _differ(self, sentence: str) -> None:
        self._difference = self._difference or sentence
        await self._notify()

    # Requests of episodes

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        """See `Engine.generate`. Returns the recorded call after it was sampled again, and never after a difference."""
        rollout_id = ROLLOUT.get()
        calls = self._calls.get(rollout_id, [])
        # Calls that an episode makes at the same time are recorded as they end, so prompts tell them apart.
        index = next((i for i, (_, c) in enumerate(calls) if _prompt(c) == (tuple(prompt_ids), tuple(images))), None)
        if index is None:
            return await self._stop(f"rollout {rollout_id}{_unexpected(tuple(prompt_ids), calls)}")
        number, record = calls.pop(index)
        spans, problem = _spans(record), ""
        for span in spans:
            await self._until(lambda span=span: self._version >= span.version)
            is_last = span is spans[-1]
            limit = sampling.max_tokens - span.start if is_last else span.end - span.start
            request = replace(sampling, max_tokens=limit, drawn=span.start)
            part = await self._engine.generate([*prompt_ids, *record.sampled_ids[: span.start]], request, images)
            problem = _difference(part, record, span)
            if is_last and not problem and part.finish_reason != record.finish_reason:
                problem = f"end by {part.finish_reason}, in the run by {record.finish_reason}"
            if problem:
                await self._stop(f"rollout {rollout_id}, call {number}, {problem}")
            self.num_tokens += len(part.sampled_ids)
            self._owed[span.version] -= 1
            await self._notify()
        self.num_interrupted += len(spans) > 1
        return record

    async def _stop(self, sentence: str) -> NoReturn:
        await self._differ(sentence)
        await asyncio.Event().wait()  # until the replay ends
        raise AssertionError("nothing sets the event")


def _spans(call: EngineCall) -> list[VersionSpan]:
    return [span for span in call.version_spans if span.end > span.start]


def _prompt(call: EngineCall) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    return call.prompt_ids, call.images


def _unexpected(prompt: tuple[int, ...], calls: Sequence[tuple[int, EngineCall]]) -> str:
    if not calls:
        return " asks once more than in the run"
    number, call = calls[0]
    return (
        f", call {number}, position {_first_difference(prompt, call.prompt_ids)} of the prompt: other ids than in the "
        "run, so the data, the environment or the chat template gave something else"
    )


def _difference(part: EngineCall, record: EngineCall, span: VersionSpan) -> str:
    """Compare an answer with the recorded tokens of a span; "" if all bits are equal."""
    if {one.version for one in part.version_spans} != {span.version}:
        return f"position {span.start}: sampled as {part.version_spans}, in the run by weights {span.version}"
    for what, now, then in (
        ("token", part.sampled_ids, record.sampled_ids[span.start : span.end]),
        ("logprob", part.sampled_logprobs, record.sampled_logprobs[span.start : span.end]),
        ("support", _supports(part), _supports(record)[span.start : span.end]),
    ):
        if (at := _first_difference(now, then)) < max(len(now), len(then)):
            values = [one[at] if at < len(one) else "the end" for one in (now, then)]
            return f"position {span.start + at}: {what} {values[0]}, in the run {values[1]}"
    return ""


def _supports(call: EngineCall) -> list[list[int]]:
    if call.support is None:
        return []
    offsets, ids = call.support.offsets.tolist(), call.support.token_ids.tolist()
    return [ids[start:end] for start, end in pairwise(offsets)]


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
