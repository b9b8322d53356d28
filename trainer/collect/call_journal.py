"""Journal of the calls of groups in flight: an engine that remembers answers, and gives those of a killed run again.

    killed run    call 1 ─────────►  call 2 ─────────►  call 3 ── 40 tokens, then the kill
    resumed run   from the journal   from the journal   the 40 tokens from the journal ── the rest is sampled

A call is told by the group, the seed and the temperature of its request. If a resumed episode asks something else than
before, for instance because a tool answers differently, its call is sampled like any other.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from lockstep.rollout.engine.partial_answers import joined, partial_call
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.episode.conversation import request_seed
from lockstep.rollout.records import EngineCall, FinishReason, ImageSpan, PromptSharing

log = logging.getLogger(__name__)


class Key(NamedTuple):
    """Identity of a call within its group."""

    seed: int | None
    temperature: float


Calls = Sequence[tuple[Key, EngineCall]]
"""Calls of a group in order of their ends; those that had not ended are aborted, with the tokens that they had."""


class _Running(NamedTuple):
    """A request in flight."""

    sampling: Sampling
    prompt_ids: Sequence[int]
    images: Sequence[ImageSpan]
    before: EngineCall | None
    """Part of the call that was sampled before the kill, with which the prompt of the request ends."""


@dataclass(slots=True)
class _Group:
    earlier: dict[Key, EngineCall]
    """Calls of the killed run that were not asked for again yet."""
    calls: dict[Key, EngineCall] = field(default_factory=dict)
    running: dict[Key, _Running] = field(default_factory=dict)
    sharing: PromptSharing = field(default_factory=PromptSharing)


class CallJournal:
    """Engine in front of a pool. Its coroutines run in the loop of the pool."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._names = itertools.count()
        self._groups: dict[int, _Group] = {}
        self._has_warned = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)  # limits, scores, the end

    def begin(self, place: int, earlier: Calls = ()) -> None:
        """Remember the calls of a group from now on, unless it has begun. earlier: those it made in a killed run."""
        self._groups.setdefault(place, _Group(earlier=dict(earlier)))

    def end(self, places: Iterable[int]) -> None:
        """Forget groups that have ended."""
        for place in places:
            self._groups.pop(place, None)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        """See `Engine.generate`."""
        # Requests of evaluations are not trained, and those of agents do not name their group.
        group = None
        if sampling.is_trained and sampling.affinity is not None and len(sampling.affinity) == 2:
            group = self._groups.get(sampling.affinity[1])
        if group is None:
            return await self._pool.generate(prompt_ids, sampling, images)
        key = Key(sampling.seed, sampling.temperature)
        call = group.earlier.pop(key, None)
        if call is not None and (call.prompt_ids, call.images) != (tuple(prompt_ids), tuple(images)):
            self._warn(sampling)
            call = None
        if call is None or call.finish_reason is FinishReason.ABORT:
            call = await self._sampled(group, key, prompt_ids, sampling, images, before=call)
        group.calls[key] = group.sharing.add(call)
        return call

    async def _sampled(
        self,
        group: _Group,
        key: Key,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        images: Sequence[ImageSpan],
        *,
        before: EngineCall | None,
    ) -> EngineCall:
        """Sample a call, or the rest of it."""
        request = replace(sampling, name=f"journal-{next(self._names)}")
        if before is not None:
            prompt_ids, request = [*prompt_ids, *before.sampled_ids], _rest(before, request)
        group.running[key] = _Running(request, prompt_ids, images, before)
        try:
            answer = await self._pool.generate(prompt_ids, request, images)
        except BaseException:
            if before is not None:  # for the episode that is started again after a failed request
                group.earlier[key] = before
            raise
        finally:
            del group.running[key]
        return answer if before is None else joined(before, answer)

    async def calls(self) -> dict[int, Calls]:
        """Return the calls of the groups in flight. Those in flight at a server are not among them."""
        all_calls = {place: self._calls(group) for place, group in self._groups.items()}
        return {place: calls for place, calls in all_calls.items() if calls}

    def _calls(self, group: _Group) -> Calls:
        calls = [*group.calls.items(), *group.earlier.items()]
        for key, running in group.running.items():
            parts = (partial_call(one, running.prompt_ids, running.sampling, running.images) for one in self.members)
            part = next(filter(None, parts), None)
            if part is None or running.before is None:
                part = part or running.before
            else:
                part = joined(running.before, part)
            if part is not None:
                calls.append((key, part))
        return calls

    def _warn(self, sampling: Sampling) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "an episode of group %s asks something else than before the run was stopped, probably because a tool "
                "answers differently: this call, and further ones like it, are sampled by the weights of now",
                sampling.affinity,
            )


def _rest(before: EngineCall, sampling: Sampling) -> Sampling:
    """Return the sampling of the rest of a call.

    On a CPU the same tokens follow as without an interruption. On other devices it is unknown how many numbers of its
    generator a token took, and with the same seed the rest would get those of the first tokens again.
    """
    count = len(before.sampled_ids)
    rest = replace(sampling, max_tokens=sampling.max_tokens - count)
    if torch.cuda.is_available():
        return replace(rest, seed=request_seed(sampling.seed, count))
    return replace(rest, drawn=count)
