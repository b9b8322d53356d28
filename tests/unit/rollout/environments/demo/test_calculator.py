"""The calculator: its expressions, and episodes with it."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.demo.calculator import MAX_EXPRESSION_CHARS, evaluate
from tests.fixtures.turns import say, use


async def test_calculator_episode_calls_the_tool_and_ends_with_the_answer():
    environment = make_environment("calculator")
    opening = await environment.reset({"question": "compute 64*22-55", "answer": "1353"})
    assert opening == ({"role": "user", "content": "compute 64*22-55"},)
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator"]
    step = await environment.step(use("calculator", expression="64*22-55"))
    assert not step.done
    assert [turn["content"] for turn in step.messages] == ["1353"]
    assert step.outcome == {"tool_calls": 1, "tool_errors": 0}
    last = await environment.step(say("The answer is 1353"))
    assert last.done
    assert last.messages == ()


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


async def test_a_wrong_call_is_answered_with_an_error_and_the_episode_goes_on():
    environment = make_environment("calculator")
    await environment.reset({"question": "q"})
    for turn, says in (
        (use("calculator", expression="2**9"), "only integers"),
        (use("calculator", expression=5), "not of type 'string'"),
        (use("python", code="1"), "no tool 'python'"),
        ({**say("<tool_call>{"), "tool_call_errors": ["never closed"]}, "never closed"),
    ):
        step = await environment.step(turn)
        assert not step.done
        assert says in step.messages[0]["content"]
        assert step.outcome["tool_errors"] == 1


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-*() ", max_size=60) | st.text(max_size=30))
def test_the_calculator_agrees_with_python_or_refuses(expression):
    try:
        value = evaluate(expression)
    except ValueError:
        return
    assert value == eval(expression.strip())
    assert type(value) is int


numbers = st.integers(min_value=0, max_value=10**6).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*"), inner).map("".join)
        | inner.map(lambda text: f"({text})")
        | inner.map(lambda text: f"-{text}")
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(expressions)
def test_the_calculator_evaluates_every_valid_expression(expression):
    if len(expression) <= MAX_EXPRESSION_CHARS:
        assert evaluate(expression) == eval(expression)


@pytest.mark.parametrize(
    "expression",
    ["", " ", "2**9", "7/2", "7//2", "__import__('os')", "1.5", "1e9", "(" * 150, "1" * 201, "1,2", "()", "1 2", "x",
     "0x10", "-" * 199 + "1" + "+", "1\x00"],
)  # fmt: skip
def test_the_calculator_refuses_all_other_expressions(expression):
    with pytest.raises(ValueError, match=r"only|not an expression|characters"):
        evaluate(expression)


def test_the_longest_expressions_are_evaluated():
    assert evaluate("9" * 99 + "*" + "9" * 100) == int("9" * 99) * int("9" * 100)
    assert evaluate("-" * 198 + "1") == 1
