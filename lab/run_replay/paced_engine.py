"""An engine that samples every call as a run did: each token by the weights of the same version.

    recorded call   ├──── version 3 ────┼── version 4 ──┤
    requests        prompt, 20 tokens     prompt + 20 tokens, goes on after 20 drawn tokens

A call that a weight sync interrupted is one request per version. Its later requests wait until their version is loaded,
and the trainer waits, before it changes the weights, until all requests of the old version are answered. Each answer is
compared with the record bit by bit; the first difference ends the replay.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import numpy as np

from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.records import EngineCall, ImageSpan, Rollout, SamplingSupport, VersionSpan

T = TypeVar("T")

ROLLOUT: ContextVar[int] = ContextVar("ROLLOUT")
"""Rollout whose episode the task plays."""


class Difference(Exception):
    """The first difference between a run and its replay, in a sentence."""


class PacedEngine:
    """Engine that follows recorded calls. Its coroutines run in the loop of the engine behind it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._version = -1
        self._calls: dict[int, list[tuple[int, EngineCall]]] = {}
        """Recorded calls that were not made yet, with their numbers, by rollout."""
        self._owed: Counter[int] = Counter()
        """Number of requests that are not answered yet, by version."""
        self._changed = asyncio.Condition()
        self._difference = ""
        self.num_tokens = self.num_interrupted = 0
        """Sampled tokens, and calls of several versions, so far."""

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)  # scores of the canary, the end

    # What the source of rollouts tells it

    def expect(self, rollouts: Iterable[Rollout]) -> None:
        """Announce the recorded rollouts of a group that begins."""
        for rollout in rollouts:
            self._calls[rollout.rollout_id] = list(enumerate(rollout.calls))
            self._owed.update(span.version for call in rollout.calls for span in _spans(call))

    async def advance(self, version: int) -> None:
        """Let requests of this version begin: the engine has its weights."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def settled(self, version: int) -> None:
        """Wait until no request of the weights up to this version is missing. Raises `Difference`."""
        await self.unless_different(
            self._until(lambda: not any(count for of, count in self._owed.items() if of <= version))
        )

    async def ended(self, rollout: Rollout) -> None:
        """Compare the number of calls at the end of an episode."""
        if left := self._calls.pop(rollout.rollout_id, []):
            number, _ = left[0]
            await self.differ(
                f"rollout {rollout.rollout_id} ended after {rollout.num_turns} calls ({rollout.error or rollout.status}"
                f"), in the run call {number + 1} follows"
            )

    async def differ(self, sentence: str) -> None:
        """End the replay with a sentence, unless an earlier one has."""
        async with self._changed:
            self._difference = self._difference or sentence
            self._changed.notify_all()

    async def unless_different(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises `Difference` as soon as there is one."""
        task = asyncio.ensure_future(work)
        different = asyncio.ensure_future(self._until(lambda: bool(self._difference)))
        try:
            await asyncio.wait({task, different}, return_when=asyncio.FIRST_COMPLETED)
            if self._difference:
                raise Difference(self._difference)
            return task.result()
        finally:
            different.cancel()
            task.cancel()

    async def _until(self, holds: Any) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    # What episodes ask

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        """See `Engine.generate`. Never returns after a difference."""
        rollout_id = ROLLOUT.get()
        recorded = self._recorded(rollout_id, prompt_ids, images)
        if recorded is None:
            return await self._stop(f"rollout {rollout_id}: {self._unexpected(rollout_id, prompt_ids)}")
        number, record = recorded
        spans, parts, problem = _spans(record), list[EngineCall](), ""
        for span in spans:
            await self._until(lambda span=span: self._version >= span.version)
            limit = sampling.max_tokens - span.start if span is spans[-1] else span.end - span.start
            request = replace(sampling, max_tokens=limit, drawn=span.start)
            part = await self._engine.generate([*prompt_ids, *record.sampled_ids[: span.start]], request, images)
            if problem := _difference(part, record, span):
                break
            parts.append(part)
            self.num_tokens += len(part.sampled_ids)
            async with self._changed:
                self._owed[span.version] -= 1
                self._changed.notify_all()
        if not problem and parts and parts[-1].finish_reason != record.finish_reason:
            problem = f"end by {parts[-1].finish_reason}, in the run by {record.finish_reason}"
        if problem:
            return await self._stop(f"rollout {rollout_id}, call {number + 1}, {problem}")
        self.num_interrupted += len(parts) > 1
        return _joined(prompt_ids, parts, images) if parts else record

    def _recorded(
        self, rollout_id: int, prompt_ids: Sequence[int], images: Sequence[ImageSpan]
    ) -> tuple[int, EngineCall] | None:
        """Take the first recorded call with this prompt, with its number; None if there is none.

        Calls that an episode makes at the same time arrive in another order than they begin, so prompts decide.
        """
        calls = self._calls.get(rollout_id, [])
        for index, (number, call) in enumerate(calls):
            if call.prompt_ids == tuple(prompt_ids) and call.images == tuple(images):
                del calls[index]
                return number, call
        return None

    async def _stop(self, sentence: str) -> NoReturn:
        await self.differ(sentence)
        await asyncio.Event().wait()  # until the replay ends
        raise AssertionError("nothing sets the event")

    def _unexpected(self, rollout_id: int, prompt_ids: Sequence[int]) -> str:
        if not (calls := self._calls.get(rollout_id)):
            return "the episode asks once more than in the run"
        (number, call), prompt = calls[0], tuple(prompt_ids)
        at = _first_difference(prompt, call.prompt_ids)
        return (
            f"no call of the run that is left has this prompt of {len(prompt)} tokens; that of call {number + 1} "
            f"({len(call.prompt_ids)} tokens) differs from position {at} on: the environment, the data or the chat "
            "template gave something else"
        )


def _spans(call: EngineCall) -> list[VersionSpan]:
    return [span for span in call.version_spans if span.end > span.start]


def _difference(part: EngineCall, record: EngineCall, span: VersionSpan) -> str:
    """Compare an answer with the recorded tokens of a span; "" if all bits are equal."""
    versions = {one.version for one in part.version_spans}
    if versions != {span.version}:
        return f"sampled by weights {sorted(versions)}, in the run by {span.version} from position {span.start} on"
    for what, now, then in (
        ("token", part.sampled_ids, record.sampled_ids[span.start : span.end]),
        ("logprob", part.sampled_logprobs, record.sampled_logprobs[span.start : span.end]),
    ):
        at = _first_difference(now, then)
        if at < max(len(now), len(then)):
            values = [one[at] if at < len(one) else "the end" for one in (now, then)]
            return f"position {span.start + at}: {what} {values[0]}, in the run {values[1]}"
    return ""


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _joined(prompt_ids: Sequence[int], parts: Sequence[EngineCall], images: Sequence[ImageSpan]) -> EngineCall:
    """Return the call that the answers make."""
    starts = np.cumsum([0, *(len(part.sampled_ids) for part in parts)]).tolist()
    supports = [part.support for part in parts if part.support is not None]
    support = None
    if supports:
        sizes = np.concatenate([np.diff(one.offsets) for one in supports])
        support = SamplingSupport(
            offsets=np.cumsum([0, *sizes], dtype=np.int64),
            token_ids=np.concatenate([one.token_ids for one in supports]),
        )
    return EngineCall(
        prompt_ids=tuple(prompt_ids),
        sampled_ids=tuple(token for part in parts for token in part.sampled_ids),
        sampled_logprobs=tuple(logprob for part in parts for logprob in part.sampled_logprobs),
        finish_reason=parts[-1].finish_reason,
        version_spans=tuple(
            VersionSpan(version=part.version_spans[0].version, start=start, end=end)
            for part, start, end in zip(parts, starts, starts[1:], strict=False)
        ),
        support=support,
        images=tuple(images),
    )
