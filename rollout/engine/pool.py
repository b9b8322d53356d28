"""Pool of engines with least-loaded routing and prefix affinity.

Requests with the same `Sampling.affinity` go to the same engine, which has their prefix cached, unless it is much more
loaded than another. A server that is lost leaves the pool, and its requests are sent again to the others: they carry
their seeds, so the answers are the same. Other failures are retried where they occurred (`rollout/server/client.py`),
and a dead engine of this process ends the step (`trainer/engines/recovery.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from lockstep.rollout.engine.protocol import PooledEngine, Sampling
from lockstep.rollout.errors import ConfigError, EngineError, EngineLostError
from lockstep.rollout.records import EngineCall, ImageSpan

if TYPE_CHECKING:  # of runs with a teacher
    from lockstep.rollout.engine.token_scores import TokenScores

T = TypeVar("T")

log = logging.getLogger(__name__)

REMEMBERED_KEYS = 65536
"""Number of affinity keys whose engine is remembered, most recently used first."""
SKEW_FACTOR, SKEW_REQUESTS = 2, 8
"""A key moves when its engine has more than SKEW_FACTOR times the requests of the least loaded one, plus SKEW_REQUESTS.
Moving costs one prefill of the prompt; a long queue costs more."""
PAUSE_S = 2.0
"""Time after which servers are tried again when none answers [s]."""

OnLost = Callable[[PooledEngine, EngineLostError], None]


class EnginePool:
    """An `Engine` over engines that serve the same model."""

    on_lost: OnLost | None = None
    """Is told of each engine that was lost, and lets it come back by `add` when it has the weights. None: no weights
    are sent to the engines, so one that was lost is asked again whenever no other one answers."""

    def __init__(self, members: Sequence[PooledEngine], *, patience_s: float = 0.0) -> None:
        """patience_s: time without any engine that answers after which a request fails, where `on_lost` is None [s]."""
        if not members:
            raise ConfigError("a pool needs at least one engine")
        self.members: tuple[PooledEngine, ...] = ()
        self.loop = members[0].loop
        self.num_resent = 0
        """Number of requests that were sent again to another engine."""
        self._patience_s = patience_s
        self._first = members[0]
        self._in_flight: dict[PooledEngine, int] = {}
        self._by_key: OrderedDict[tuple[int, ...], PooledEngine] = OrderedDict()
        for member in members:
            self.add(member)

    @property
    def max_model_len(self) -> int:
        return min(member.max_model_len for member in self.members or (self._first,))

    def add(self, member: PooledEngine) -> None:
        """Send requests to this engine, too. Raises `ConfigError` if it serves another model than the others."""
        first = self._first
        if (member.dtype, member.vocab_size) != (first.dtype, first.vocab_size):
            raise ConfigError(
                f"{first.name} serves {first.dtype} with {first.vocab_size} ids, {member.name} "
                f"{member.dtype} with {member.vocab_size}; start all engines with the same model and --dtype"
            )
        self._in_flight.setdefault(member, 0)
        self.members = (*self.members, member)

    def remove(self, member: PooledEngine) -> None:
        """Send no more requests to this engine."""
        self.members = tuple(one for one in self.members if one is not member)
        for key in [key for key, one in self._by_key.items() if one is member]:
            del self._by_key[key]
        self._forget_if_unused(member)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        return await self._ask(lambda member: member.generate(prompt_ids, sampling, images), sampling.affinity)

    async def score(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        return (await self.score_ranked(ids, images))[0]

    async def score_ranked(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[list[float], list[int]]:
        return await self._ask(lambda member: member.score_ranked(ids, images))

    async def score_top(self, ids: Sequence[int], top_k: int, images: Sequence[ImageSpan] = ()) -> TokenScores:
        return await self._ask(lambda member: member.score_top(ids, top_k, images))

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))

    async def _ask(self, act: Callable[[PooledEngine], Awaitable[T]], key: tuple[int, ...] | None = None) -> T:
        """Return the answer of an engine, which is another one if the first is lost meanwhile."""
        silent: dict[PooledEngine, EngineLostError] = {}
        silent_at: float | None = None
        """Time at which the last engine fell silent."""
        while True:
            member = self._choose(key, [one for one in self.members if one not in silent] if silent else self.members)
            self._in_flight[member] += 1
            try:
                return await act(member)
            except EngineLostError as error:
                self.num_resent += 1
                if self.on_lost is not None:
                    if member in self.members:
                        self.remove(member)
                        self.on_lost(member, error)
                    if not self.members:
                        raise EngineLostError(f"no engine is left: {error}") from error
                    continue
                silent[member] = error
            finally:
                self._in_flight[member] -= 1
                self._forget_if_unused(member)
            silent_at = time.monotonic() if silent_at is None else silent_at
            if len(silent) < len(self.members):
                log.warning("%s; its request goes to another server", silent[member])
            elif time.monotonic() - silent_at >= self._patience_s:
                raise EngineError(str(silent[member])) from silent[member]
            else:
                log.warning("%s; no other server answers, so it is asked again", silent[member])
                silent.clear()
                await asyncio.sleep(PAUSE_S)

    def _forget_if_unused(self, member: PooledEngine) -> None:
        if member not in self.members and not self._in_flight.get(member):
            self._in_flight.pop(member, None)

    def _choose(self, key: tuple[int, ...] | None, members: Sequence[PooledEngine]) -> PooledEngine:
        if not members:
            raise EngineLostError("no engine is left that serves requests")
        least = min(members, key=self._in_flight.__getitem__)
        if key is None:
            return least
        member = self._by_key.get(key, least)
        too_many = SKEW_FACTOR * self._in_flight[least] + SKEW_REQUESTS
        if member not in members or self._in_flight[member] > too_many:
            member = least
        self._by_key[key] = member
        self._by_key.move_to_end(key)
        if len(self._by_key) > REMEMBERED_KEYS:
            self._by_key.popitem(last=False)
        return member
