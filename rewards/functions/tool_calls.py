"""Exact match of tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lockstep.rewards.functions.answers import reference
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout


def tool_calls_match(rollout: Rollout, *, column: str = "answer") -> float:
    """Return 1 if the first sampled turn makes exactly the calls of the reference, in any order; else 0.

    The reference is a list, or its JSON text, of `{"name": ..., "arguments": {...}}`; an empty list expects no call.
    Calls are equal if name and arguments are equal as JSON: 1 equals 1.0, but not "1" or true. A call that could not be
    parsed is wrong. Raises `DataError`: the reference is not such a list.
    """
    expected = [_call(entry, column) for entry in _list(reference(rollout, column), column)]
    turn = next(iter(rollout.sampled_turns), {})
    if turn.get("tool_call_errors"):
        return 0.0
    calls = [_call(call, column) for call in turn.get("tool_calls") or ()]
    for call in expected:
        if call not in calls:
            return 0.0
        calls.remove(call)
    return float(not calls)


def _list(value: Any, column: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"tool_calls_match: column {column!r} is not JSON: {value!r:.80}") from error
    if not isinstance(value, list | tuple):
        raise DataError(f"tool_calls_match: column {column!r} holds a {type(value).__name__}; expected a list of calls")
    return list(value)


def _call(entry: Any, column: str) -> tuple[str, Any]:
    call = entry.get("function", entry) if isinstance(entry, Mapping) else {}
    if not isinstance(call.get("name"), str):
        raise DataError(
            f"tool_calls_match: column {column!r}: expected calls with name and arguments, found {entry!r:.80}"
        )
    return call["name"], _without_booleans(_arguments(call.get("arguments")))


def _arguments(value: Any) -> Any:
    """Parse arguments that are JSON text; other text stays text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if not value:
        return {}
    # Columnar files give every call the arguments of all calls, and null for those of other calls.
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value


def _without_booleans(value: Any) -> Any:
    """Replace booleans by tuples, which no JSON value equals: in Python, True equals 1."""
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, Mapping):
        return {key: _without_booleans(item) for key, item in value.items()}
    return [_without_booleans(item) for item in value] if isinstance(value, list | tuple) else value
