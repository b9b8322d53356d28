"""The JSON of a request → a `ChatRequest`, or the error that the OpenAI API would give.

Whatever would change the distribution that is sampled from is either what the run trains with, or refused with a
sentence that names the expected value. Fields that are not known are refused, as the OpenAI API does: one of them
might be a sampling setting, or token ids beside the messages (a second source of truth, tokens.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from rollout.chat.tool_calls import MAX_DEPTH, without_surrogates
from rollout.engine.protocol import Sampling
from rollout.gateway.errors import ApiError, not_supported, shown, wrong_type
from rollout.gateway.messages import depth_of, read_messages, read_tools
from rollout.records import Message

MAX_CHOICES = 128
MAX_STOPS = 4

_PAIR = ("temperature", "top_p", "top_k", "min_p")
"""What makes the sampling distribution; compared with the settings of the run."""

_NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "top_logprobs": 0,
    "min_tokens": 0,
    "ignore_eos": False,
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
"""Settings that are accepted where they change nothing. The model is trained on what it samples by itself."""

_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Fields that do not reach a model."""

_READ = frozenset(
    {"model", "messages", "tools", "tool_choice", "n", "stream", "stream_options", "stop", "stop_token_ids"}
    | {"max_tokens", "max_completion_tokens", "seed", "logprobs", *_PAIR}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion that can be sampled."""

    messages: tuple[Message, ...]
    """With the token ids that the client sent back (`ID_FIELDS`), not yet checked against the record."""
    tools: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    """What the run samples with; `max_tokens` may be lower, stop ids may be more."""
    num_choices: int
    stop_strings: tuple[str, ...]
    seed: int | None
    wants_logprobs: bool
    stream: bool
    wants_usage: bool
    """At the end of a stream; whole answers always have it."""


def read_json(raw: bytes) -> dict[str, Any]:
    """The body of a request, without lone surrogates (which no tokenizer can encode). Raises `ApiError` (400)."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body of the request is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise wrong_type("body", body, expected="a JSON object")
    if depth_of(body) > MAX_DEPTH:
        raise ApiError(f"the body of the request is nested more than {MAX_DEPTH} levels deep")
    return _clean(body)


def read_chat_request(body: Mapping[str, Any], *, offered: Sequence[Sampling], vocab_size: int) -> ChatRequest:
    """Check a request.

    Args:
        body: from `read_json`.
        offered: the sampling settings of the run; the first is what a request gets that asks for nothing.
        vocab_size: stop ids must be below.

    Raises:
        ApiError: 400, with the field and the expected value.
    """
    _refuse_unknown(body)
    sampling = _sampling(body, offered, vocab_size)
    tools = read_tools(body.get("tools"))
    _check_tool_choice(body.get("tool_choice"), tools)
    options = _read(body, "stream_options", dict, {}, expected="an object")
    return ChatRequest(
        messages=read_messages(body.get("messages")),
        tools=tools,
        sampling=sampling,
        num_choices=_integer(body, "n", default=1, low=1, high=MAX_CHOICES),
        stop_strings=_stop_strings(body.get("stop")),
        seed=None if body.get("seed") is None else _integer(body, "seed", default=0, low=-(2**63), high=2**63 - 1),
        wants_logprobs=_read(body, "logprobs", bool, False, expected="true or false"),
        stream=_read(body, "stream", bool, False, expected="true or false"),
        wants_usage=_read(options, "include_usage", bool, False, expected="true or false"),
    )


def _refuse_unknown(body: Mapping[str, Any]) -> None:
    for field, value in body.items():
        if field in _READ or field in _IGNORED or value is None:
            continue
        if "token_ids" in field or "prefix" in field:
            raise not_supported(
                field,
                why="token ids are read from the messages they belong to and checked against what was sampled; "
                "send assistant messages back as you received them",
            )
        if field not in _NEUTRAL:
            raise ApiError(f"unrecognized request argument: {shown(field)}", param=field, code="unknown_parameter")
        if value != _NEUTRAL[field]:
            raise not_supported(
                field,
                why="the model is trained on what it samples by itself; "
                f"leave it out, or send {json.dumps(_NEUTRAL[field])}",
            )


def _sampling(body: Mapping[str, Any], offered: Sequence[Sampling], vocab_size: int) -> Sampling:
    asked = {field: _number(body, field) for field in _PAIR if body.get(field) is not None}
    if asked.get("top_k") == -1:  # vLLM's way to say off
        asked["top_k"] = 0
    fitting = [one for one in offered if all(_of(one)[field] == value for field, value in asked.items())]
    if not fitting:
        expected = " or ".join(", ".join(f"{field}={value:g}" for field, value in _of(one).items()) for one in offered)
        wrong = next(
            (field for field, value in asked.items() if all(_of(one)[field] != value for one in offered)),
            next(iter(asked)),
        )
        raise ApiError(
            f"{wrong}={asked[wrong]:g} is not what this run samples with; expected {expected}. Other settings would "
            "be another distribution than the one that is trained: leave them out, or send these",
            param=wrong,
            code="sampling_mismatch",
        )
    sampling = fitting[0]
    # The older and the newer name of one limit.
    limits = [
        _integer(body, field, default=0, low=1, high=sampling.max_tokens)
        for field in ("max_tokens", "max_completion_tokens")
        if body.get(field) is not None
    ]
    return replace(
        sampling,
        max_tokens=min([sampling.max_tokens, *limits]),
        stop_token_ids=tuple(
            dict.fromkeys([*sampling.stop_token_ids, *_stop_ids(body.get("stop_token_ids"), vocab_size)])
        ),
    )


def _of(sampling: Sampling) -> dict[str, float]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }


def _check_tool_choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    if value is None or value == "auto" or (value == "none" and not tools):
        return
    if value == "none":
        raise not_supported("tool_choice", why="found 'none' beside tools; leave out the tools that must not be called")
    raise not_supported(
        "tool_choice",
        why=f"found {shown(value)}, expected 'auto': a forced call is not sampled from the model's own distribution",
    )


def _stop_strings(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong_type("stop", value, expected="a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS:
        raise ApiError(f"stop has {len(stops)} strings, at most {MAX_STOPS} are allowed", param="stop")
    return tuple(stops)


def _stop_ids(value: Any, vocab_size: int) -> list[int]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise wrong_type("stop_token_ids", value, expected=f"a list of token ids below {vocab_size}")
    return ids


def _number(body: Mapping[str, Any], field: str) -> float:
    value = body[field]
    if type(value) not in (int, float) or abs(value) > 1e9:
        raise wrong_type(field, value, expected="a number")
    return value


def _integer(body: Mapping[str, Any], field: str, *, default: int, low: int, high: int) -> int:
    value = body.get(field)
    if value is None:
        return default
    if type(value) is not int:
        raise wrong_type(field, value, expected="an integer")
    if not low <= value <= high:
        raise ApiError(f"{field}={shown(value)} must lie between {low} and {high}", param=field, code="invalid_value")
    return value


def _read(body: Mapping[str, Any], field: str, kind: type, default: Any, *, expected: str) -> Any:
    value = body.get(field)
    if value is None:
        return default
    if type(value) is not kind:
        raise wrong_type(field, value, expected=expected)
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
