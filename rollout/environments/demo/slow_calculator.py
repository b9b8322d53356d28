"""Environment `slow_calculator`: the calculator of the demo with delays, for tests of asynchronous rollouts."""

from __future__ import annotations

import asyncio
import functools
import random
from typing import Any

from lockstep.rollout.environments.demo.calculator import CalculatorEnvironment, evaluate
from lockstep.rollout.environments.tools import ToolEnvironment


class SlowCalculatorEnvironment(ToolEnvironment):
    """`CalculatorEnvironment` with a uniform delay of up to `max_delay_s` seconds per call (docs/asynchrony.md)."""

    declaration = CalculatorEnvironment.declaration

    def __init__(self, *, max_delay_s: float = 2.0, delay_seed: int = 0, **settings: Any):
        """delay_seed: the n-th call of the process has the same delay in every run; which call is n-th may differ."""
        self._max_delay_s = max_delay_s
        self._delays = _delays(delay_seed)
        super().__init__([self.calculator], **settings)

    async def calculator(self, expression: str) -> int:
        """Evaluate an integer expression with + - * and parentheses.

        Args:
            expression: for example 64*22-55
        """
        await asyncio.sleep(self._delays.uniform(0, self._max_delay_s))
        return evaluate(expression)


@functools.cache
def _delays(seed: int) -> random.Random:
    """Return a generator shared by all episodes: with one each, all first calls would have the same delay."""
    return random.Random(seed)
