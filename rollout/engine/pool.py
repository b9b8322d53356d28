"""Pool of engines with least-loaded routing and prefix affinity.

Requests with the same `Sampling.affinity` go to the same engine, which has their prefix cached, unless it is much more
loaded than another. A failed request is not moved to another engine: passing failures are retried where they occurred
(`rollout/server/client.py`), and a dead engine ends the step (`trainer/engines/recovery.py`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.rollout.engine.protocol import PooledEngine, Sampling
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import EngineCall, ImageSpan

if TYPE_CHECKING:  # of runs with a teacher
    from lockstep.rollout.engine.token_scores import TokenScores

REMEMBERED_KEYS = 65536
"""Number of affinity keys whose engine is remembered, most recently used first."""
SKEW_FACTOR, SKEW_REQUESTS = 2, 8
"""A key moves when its engine has more than SKEW_FACTOR times the requests of the least loaded one, plus SKEW_REQUESTS.
Moving costs one prefill of the prompt; a long queue costs more."""


class EnginePool:
    """An `Engine` over engines that serve the same model."""

    def __init__(self, members: Sequence[PooledEngine]) -> None:
        if not members:
            raise ConfigError("a pool needs at least one engine")
        self.members = tuple(members)
        self.loop = members[0].loop
        self._in_flight = [0] * len(members)
        self._index_by_key: OrderedDict[tuple[int, ...], int] = OrderedDict()
        for member in members[1:]:
            if (member.dtype, member.vocab_size) != (members[0].dtype, members[0].vocab_size):
                raise ConfigError(
                    f"{members[0].name} serves {members[0].dtype} with {members[0].vocab_size} ids, {member.name} "
                    f"{member.dtype} with {member.vocab_size}; start all engines with the same model and --dtype"
                )

    @property
    def max_model_len(self) -> int:
        return min(member.max_model_len for member in self.members)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        index = self._choose(sampling.affinity)
        self._in_flight[index] += 1
        try:
            return await self.members[index].generate(prompt_ids, sampling, images)
        finally:
            self._in_flight[index] -= 1

    async def score(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        return (await self.score_ranked(ids, images))[0]

    async def score_ranked(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[list[float], list[int]]:
        index = self._least_loaded()
        self._in_flight[index] += 1
        try:
            return await self.members[index].score_ranked(ids, images)
        finally:
            self._in_flight[index] -= 1

    async def score_top(self, ids: Sequence[int], top_k: int, images: Sequence[ImageSpan] = ()) -> TokenScores:
        index = self._least_loaded()
        self._in_flight[index] += 1
        try:
            return await self.members[index].score_top(ids, top_k, images)
        finally:
            self._in_flight[index] -= 1

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))

    def _choose(self, key: tuple[int, ...] | None) -> int:
        least = self._least_loaded()
        if key is None:
            return least
        index = self._index_by_key.get(key, least)
        if self._in_flight[index] > SKEW_FACTOR * self._in_flight[least] + SKEW_REQUESTS:
            index = least
        self._index_by_key[key] = index
        self._index_by_key.move_to_end(key)
        if len(self._index_by_key) > REMEMBERED_KEYS:
            self._index_by_key.popitem(last=False)
        return index

    def _least_loaded(self) -> int:
        return min(range(len(self.members)), key=self._in_flight.__getitem__)
