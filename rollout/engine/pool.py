"""Several engines as one: each request goes to the one with the least to do, and a group stays together.

The samples of one prompt begin alike, and so do the turns of one episode. An engine that has sampled one of them has
the beginning in its prefix cache, so requests with the same `Sampling.affinity` go to the same engine, as long as that
one has not much more to do than another.

A request that fails is not moved to another engine: what is merely late or refused for a moment is retried where it
was sent (`rollout/server/client.py`), and an engine that dies ends the step (`trainer/engines/recovery.py`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from rollout.engine.protocol import PooledEngine, Sampling
from rollout.errors import ConfigError
from rollout.records import EngineCall

REMEMBERED_KEYS = 65536
"""Groups whose engine is remembered; older ones are placed anew."""
SKEW_FACTOR, SKEW_REQUESTS = 2, 8
"""A group leaves its engine when that one has more than so many times the requests of the least loaded, plus so many:
moving costs the computation of one prompt, waiting behind a long queue costs more."""


class EnginePool:
    """An `Engine` made of engines that serve the same model."""

    def __init__(self, members: Sequence[PooledEngine]) -> None:
        if not members:
            raise ConfigError("a pool needs at least one engine")
        self.members = tuple(members)
        self.loop = members[0].loop
        self._in_flight = [0] * len(members)
        self._home: OrderedDict[tuple[int, ...], int] = OrderedDict()
        for member in members[1:]:
            if (member.dtype, member.vocab_size) != (members[0].dtype, members[0].vocab_size):
                raise ConfigError(
                    f"{members[0].name} serves {members[0].dtype} with {members[0].vocab_size} ids, {member.name} "
                    f"{member.dtype} with {member.vocab_size}; start all engines with the same model and --dtype"
                )

    @property
    def max_model_len(self) -> int:
        return min(member.max_model_len for member in self.members)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> EngineCall:
        chosen = self._choose(sampling.affinity)
        self._in_flight[chosen] += 1
        try:
            return await self.members[chosen].generate(prompt_ids, sampling)
        finally:
            self._in_flight[chosen] -= 1

    async def score(self, ids: Sequence[int]) -> list[float]:
        return await self.members[self._least_loaded()].score(ids)

    async def pause(self, mode: str) -> None:
        await asyncio.gather(*(member.pause(mode) for member in self.members))

    async def resume(self) -> None:
        await asyncio.gather(*(member.resume() for member in self.members))

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))

    def _choose(self, key: tuple[int, ...] | None) -> int:
        """Index of the engine that gets the next request of this group."""
        least = self._least_loaded()
        if key is None:
            return least
        home = self._home.get(key, least)
        if self._in_flight[home] > SKEW_FACTOR * self._in_flight[least] + SKEW_REQUESTS:
            home = least
        self._home[key] = home
        self._home.move_to_end(key)
        if len(self._home) > REMEMBERED_KEYS:
            self._home.popitem(last=False)
        return home

    def _least_loaded(self) -> int:
        return min(range(len(self.members)), key=self._in_flight.__getitem__)
