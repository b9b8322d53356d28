"""The calculator as a service that answers late: shows what waiting for tools costs (docs/asynchrony.md)."""

from __future__ import annotations

import asyncio
import functools
import random
from typing import Any

from rollout.environments.calculator import evaluate
from rollout.environments.tools import ToolEnvironment


class SlowCalculatorEnvironment(ToolEnvironment):
    """`CalculatorEnvironment` whose answers take between 0 and `max_delay_s` seconds, drawn evenly."""

    def __init__(self, *, max_delay_s: float = 2.0, delay_seed: int = 0, **settings: Any):
        """delay_seed: the n-th call of the process waits as long in every run; which call is the n-th may differ."""
        self._max_delay_s = max_delay_s
        self._chance = _chance(delay_seed)
        super().__init__([self.calculator], **settings)

    async def calculator(self, expression: str) -> int:
        """Evaluate an integer expression with + - * and parentheses.

        Args:
            expression: for example 64*22-55
        """
        await asyncio.sleep(self._chance.uniform(0, self._max_delay_s))
        return evaluate(expression)


@functools.cache
def _chance(seed: int) -> random.Random:
    """Shared by all episodes: with a generator each, all first calls would wait equally long."""
    return random.Random(seed)
