"""Exact match of tool calls with the reference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.rewards.functions.tool_calls import tool_calls_match
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout

ROME, OSLO = {"name": "weather", "arguments": {"city": "Rome", "days": 3}}, {"name": "weather", "arguments": "{}"}


def judged(made: list[dict[str, Any]], reference: object, **turn: Any) -> float:
    calls = [{"type": "function", "function": call} for call in made]
    message = {"role": "assistant", "content": None, "tool_calls": calls, **turn}
    return tool_calls_match(
        Rollout(rollout_id=0, group_id=0, calls=(), messages=(message,), example={"answer": reference})
    )


def test_exactly_the_calls_of_the_reference_match_in_any_order() -> None:
    assert judged([ROME, OSLO], [OSLO, ROME]) == 1
    assert judged([ROME, OSLO], json.dumps([OSLO, ROME])) == 1
    assert judged([ROME], [OSLO, ROME]) == 0
    assert judged([ROME, ROME], [ROME]) == 0
    assert judged([], []) == 1


def test_arguments_are_compared_as_json() -> None:
    assert judged([{**ROME, "arguments": '{"days": 3.0, "city": "Rome"}'}], [ROME]) == 1
    assert judged([{**ROME, "arguments": {"city": "Rome", "days": "3"}}], [ROME]) == 0
    assert judged([{**ROME, "arguments": "{no json"}], [ROME]) == 0
    assert judged([OSLO], [{"name": "weather", "arguments": {"city": None}}]) == 1, "null: an argument of another call"


def test_a_call_that_could_not_be_parsed_is_wrong() -> None:
    assert judged([ROME], [ROME], tool_call_errors=["malformed"]) == 0


@pytest.mark.parametrize("reference", ["{no json", {"name": "weather"}, 7, [7], [{"arguments": {}}]], ids=str)
def test_a_malformed_reference_is_an_error_not_a_zero(reference: object) -> None:
    with pytest.raises(DataError, match="tool_calls_match: column 'answer'"):
        judged([ROME], reference)


@pytest.mark.parametrize("wrong", [1, 1.0, "true", [True]])
def test_a_boolean_equals_no_number(wrong: object) -> None:
    true, other = ({"name": "f", "arguments": {"on": [{"x": value}]}} for value in (True, wrong))
    assert judged([true], [true]) == 1
    assert judged([true], [other]) == judged([other], [true]) == 0
