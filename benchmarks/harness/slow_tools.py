"""Idle time of the engine while episodes with slow tools could use it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.environments.demo.calculator import CalculatorEnvironment
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.records import EngineCall, ImageSpan, Message


@dataclass(slots=True)
class Meter:
    """Counter of episodes in the engine, in a tool, and in between, where Lockstep works on them."""

    episodes: int
    in_engine: int = 0
    in_tools: int = 0
    finished: int = 0
    idle_s: float = 0.0
    """Time in which the engine had no request although an unfinished episode was not in a tool."""
    starved_s: float = 0.0
    """Time in which the engine had no request and all unfinished episodes were in tools; unavoidable."""
    _last: float = field(default_factory=time.perf_counter)

    def move(self, *, engine: int = 0, tools: int = 0, finished: int = 0) -> None:
        now = time.perf_counter()
        if self.in_engine == 0 and self.finished < self.episodes:
            waiting_for_tools = self.in_tools == self.episodes - self.finished
            if waiting_for_tools:
                self.starved_s += now - self._last
            else:
                self.idle_s += now - self._last
        self._last = now
        self.in_engine += engine
        self.in_tools += tools
        self.finished += finished


class MeteredEngine:
    """An engine that counts its current requests."""

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine, self._meter = engine, meter
        self.max_model_len = engine.max_model_len

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        self._meter.move(engine=1)
        try:
            return await self._engine.generate(prompt_ids, sampling)
        finally:
            self._meter.move(engine=-1)


class SlowCalculator(CalculatorEnvironment):
    """The demo's calculator with exponentially distributed delays, like those of a service."""

    def __init__(self, *, meter: Meter, mean_s: float, seed: int) -> None:
        super().__init__()
        self._meter, self._mean_s = meter, mean_s
        self._random = random.Random(seed)

    async def step(self, message: Message) -> Step:
        step = await super().step(message)
        if not step.done:
            self._meter.move(tools=1)
            await asyncio.sleep(self._random.expovariate(1 / self._mean_s))
            self._meter.move(tools=-1)
        return step

    async def conclude(self) -> Mapping[str, Any]:
        """Count the end of the episode, whatever its outcome."""
        self._meter.move(finished=1)
        return {}
