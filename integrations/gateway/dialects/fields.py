"""Top-level fields of a request: which ones a dialect takes, and the settings that all dialects read in the same way.

Settings that change the sampling distribution must equal those of the run; others are refused with the expected value.
Unknown fields are refused, as the APIs do: they may be sampling settings, or token ids beside the messages, which would
be a second source of truth.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.integrations.gateway.errors import ApiError, checked, not_supported, quoted, unknown_field, wrong_type
from lockstep.integrations.gateway.messages import MAX_TOOLS, read_function, refuse_many
from lockstep.rollout.engine.protocol import Sampling

log = logging.getLogger(__name__)

MAX_STOPS = 4
MAX_STOP_IDS = 64

DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")
"""Settings of the sampling distribution, compared with those of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """Fields of one dialect. Null always means that a field is left out."""

    read: frozenset[str]
    ignored: frozenset[str]
    """Fields that do not reach a model."""
    neutral: Mapping[str, Any]
    """Fields with the only value that is accepted, which has no effect. Training needs samples of the model alone."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Fields of the API that are never accepted, and why: the end of a sentence."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise `ApiError` (400) for the first field that is refused."""
        for name, value in body.items():
            if name in self.read or name in self.ignored or value is None:
                continue
            if name in self.refused:
                raise not_supported(name, why=self.refused[name])
            if "token_ids" in name or "prefix" in name:
                raise not_supported(
                    name,
                    why="token ids are read from the messages they belong to and checked against what was sampled; "
                    "send assistant messages back as you received them",
                )
            if name not in self.neutral:
                raise unknown_field(name)
            if value != self.neutral[name]:
                raise not_supported(
                    name,
                    why=f"training needs unmodified samples; leave it out, or send {json.dumps(self.neutral[name])}",
                )


def read_sampling(
    body: Mapping[str, Any], offered: Sequence[Sampling], *, limits: Sequence[str], stop_ids: Sequence[int] = ()
) -> Sampling:
    """Return the settings of the run that a request asks for. Raises `ApiError` (400) if they are not offered.

    limits: names of the fields that limit the sampled tokens; the lowest counts.
    """
    values = {name: _number(body, name) for name in DISTRIBUTION if body.get(name) is not None}
    if values.get("top_k") == -1:  # off in vLLM
        values["top_k"] = 0
    choices = [{name: getattr(one, name) for name in DISTRIBUTION} for one in offered]
    fitting = [one for one, choice in zip(offered, choices, strict=True) if values.items() <= choice.items()]
    if not fitting:
        expected = " or ".join(", ".join(f"{name}={value:g}" for name, value in one.items()) for one in choices)
        wrong = next(
            (name for name, value in values.items() if all(one[name] != value for one in choices)),
            next(iter(values)),
        )
        raise ApiError(
            f"{wrong}={values[wrong]:g} differs from the settings of this run; expected {expected}. Other settings "
            "sample from a distribution that is not trained: leave them out, or send these",
            param=wrong,
            code="sampling_mismatch",
        )
    sampling = fitting[0]
    numbers = [read_integer(body, name, default=sampling.max_tokens, low=1, high=2**63 - 1) for name in limits]
    stops = tuple(dict.fromkeys([*sampling.stop_token_ids, *stop_ids]))
    return replace(sampling, max_tokens=min(sampling.max_tokens, *numbers), stop_token_ids=stops)


def read_tool_choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the client asks for a call, of any tool or of one. Logs a warning the first time: an answer that
    is forced would not be sampled from the model's own distribution, so the model still chooses.

    Raises `ApiError` (400) for other choices than these and `auto`, and for a call of a tool that is not there.
    """
    if value is None or value == "auto" or (value == "none" and not tools):
        return False
    if value == "none":
        raise not_supported("tool_choice", why="found 'none' beside tools; leave out the tools that must not be called")
    names = [tool["function"]["name"] for tool in tools]
    if value == "required" and names:
        _warn_of_choice("required")
        return True
    name = _function_name(value)
    if name not in names:
        options = ", ".join(map(quoted, names)) or "none"
        raise not_supported(
            "tool_choice",
            why=f"found {quoted(value)}, expected 'auto', 'required' or one function of those in `tools` ({options})",
        )
    _warn_of_choice("a function")
    return True


def _function_name(choice: Any) -> Any:
    """Return the name of the function in a choice of chat completions or Responses; None if there is none."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    inner = choice.get("function")
    return inner.get("name") if isinstance(inner, dict) else choice.get("name")


@functools.cache
def _warn_of_choice(asked: str) -> None:
    log.warning(
        "gateway: an agent asks for calls (tool_choice is %s), which are not forced: the model may answer without one. "
        "environment/unforced_calls counts the answers to such requests",
        asked,
    )


def read_function_tools(
    value: Any, *, expected: str, kinds: Sequence[str | None], schema: str
) -> tuple[Mapping[str, Any], ...]:
    """Return tools in the inner form: name, description and schema in this order, and nothing else.

    Prompts are then the same whatever order and further keys a client writes.

    Args:
        expected: form of one tool, for errors.
        kinds: types of functions that the client calls.
        schema: field with the schema of the arguments.
    """
    tools = [] if value is None else checked(value, list, "tools", expected="a list of tools")
    refuse_many(tools, MAX_TOOLS, "tools")
    functions = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        checked(tool, dict, where, expected=expected)
        if tool.get("type") not in kinds:
            raise not_supported(
                f"{where}.type",
                why=f"found {quoted(tool.get('type'))}, expected {kinds[0]!r}: the gateway runs no tools",
            )
        function = read_function(tool, where, schema=schema)
        try:
            json.dumps(function[schema], allow_nan=False)
        except ValueError:
            raise ApiError(f"{where}.{schema} has a number that is out of range", param=f"{where}.{schema}") from None
        description = {} if function.get("description") is None else {"description": function["description"]}
        inner = {"name": function["name"], **description, "parameters": function[schema]}
        functions.append({"type": "function", "function": inner})
    return tuple(functions)


def read_stop_strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = body.get(name)
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong_type(name, value, expected="a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS:
        raise ApiError(f"{name} has {len(stops)} strings, at most {MAX_STOPS} are allowed", param=name)
    return tuple(stops)


def read_stop_ids(body: Mapping[str, Any], vocab_size: int) -> list[int]:
    ids = [] if body.get("stop_token_ids") is None else body["stop_token_ids"]
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise wrong_type("stop_token_ids", ids, expected=f"a list of token ids below {vocab_size}")
    if len(ids) > MAX_STOP_IDS:
        raise ApiError(f"stop_token_ids has {len(ids)} ids, at most {MAX_STOP_IDS} are allowed", param="stop_token_ids")
    return ids


def read_seed(body: Mapping[str, Any]) -> int | None:
    return None if body.get("seed") is None else read_integer(body, "seed", default=0, low=-(2**63), high=2**63 - 1)


def read_integer(body: Mapping[str, Any], name: str, *, default: int, low: int, high: int) -> int:
    value = default if body.get(name) is None else checked(body[name], int, name, expected="an integer")
    if not low <= value <= high:
        raise ApiError(f"{name}={quoted(value)} must lie between {low} and {high}", param=name, code="invalid_value")
    return value


def read_flag(parent: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    return default if parent.get(name) is None else checked(parent[name], bool, name, expected="true or false")


def _number(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    if type(value) not in (int, float) or abs(value) > 1e9:
        raise wrong_type(name, value, expected="a number")
    return value
