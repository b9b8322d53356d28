"""Mathematical equality by math-verify, in a worker."""

from __future__ import annotations

import asyncio

import pytest

from lockstep.rewards.composition import make_reward_set
from tests.unit.rewards.workers.test_pool import rollout


def test_expressions_with_equal_values_are_equal():
    pytest.importorskip("math_verify")
    rewards = make_reward_set(["math_equal"])
    cases = [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("The answer is $x^2+2x+1$", r"(x+1)^2", 1.0),
        ("It is 3", "4", 0.0),
        ("no idea", "4", 0.0),
        ("$2$", "2^{10}", 0.0),
        ("$1024$", "2^{10}", 1.0),
        (r"\boxed{2\pi}", r"2\pi", 1.0),
        (r"\boxed{2}", r"2\pi \text{ meters}", 0.0),
        ("$1234$", "1{,}234", 1.0),
        ("$4$", r"\sqrt{16}", 1.0),
        ("$72$", "3 + 4 = <<3+4=7>>7\n#### 72", 1.0),
        ("$7$", "so it is $7$", 1.0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
        (r"\boxed{5}", r"5\text{ meters}", 1.0),
        ("$-5$", "−5", 1.0),
    ]
    rollouts = [rollout(answer, answer=reference) for answer, reference, _ in cases]
    scored = asyncio.run(rewards.score(rollouts))
    rewards.close()
    assert [one.reward for one in scored] == [value for _, _, value in cases]
