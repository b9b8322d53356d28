"""The calculator with delays."""

from __future__ import annotations

import random
import time

from rollout.environments import make_environment
from tests.fixtures.turns import use


async def test_the_slow_calculator_gives_the_calculators_answers_after_seeded_delays():
    slow = make_environment("slow_calculator", max_delay_s=0.2, delay_seed=7)
    assert slow.tools == make_environment("calculator").tools
    durations = []
    for _ in range(3):
        started = time.perf_counter()
        step = await slow.step(use("calculator", expression="64*22-55"))
        durations.append(time.perf_counter() - started)
        assert [turn["content"] for turn in step.messages] == ["1353"]
    delays = random.Random(7)
    for duration in durations:
        assert duration >= delays.uniform(0, 0.2) - 1e-3
