"""Conversion of a request's JSON to a `ChatRequest`, or to the error that the OpenAI API would give.

Settings that change the sampling distribution must equal those of the run; others are refused with the expected value.
Unknown fields are refused, as the OpenAI API does: they may be sampling settings, or token ids beside the messages,
which would be a second source of truth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.chat.tool_calls import MAX_DEPTH, depth_of, refuse_constant, without_surrogates
from rollout.engine.protocol import Sampling
from rollout.gateway.errors import ApiError, checked, not_supported, quoted, unknown_field, wrong_type
from rollout.gateway.messages import forget_ids, read_last_ids, read_tools
from rollout.gateway.prefix_chain import Prefix, Prefixes

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_IDS = 64

_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")
"""Settings of the sampling distribution, compared with those of the run."""

_NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "min_tokens": 0,
    "ignore_eos": False,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
"""Settings and the only value that is accepted, which has no effect. Training needs samples of the model alone."""

_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Fields that do not reach a model."""

_READ = frozenset(
    {"model", "messages", "tools", "tool_choice", "n", "stream", "stream_options", "stop", "stop_token_ids"}
    | {"max_tokens", "max_completion_tokens", "seed", "logprobs", "top_logprobs", *_DISTRIBUTION}
    | {"parallel_tool_calls"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion that can be sampled."""

    conversation: Prefix
    """Messages and tools."""
    last_ids: tuple[int, ...] | None
    """Sampled ids that the client sent back with the last assistant message, not yet checked against the record."""
    sampling: Sampling
    """Settings of the run. `max_tokens` is the lower one of the run's and the client's, and stop ids may be added."""
    num_choices: int
    one_call: bool
    """End each answer with its first tool call."""
    stop_strings: tuple[str, ...]
    seed: int | None
    wants_logprobs: bool
    stream: bool
    wants_usage: bool
    """Send the usage at the end of a stream. Other answers always contain it."""


def read_json(raw: bytes) -> dict[str, Any]:
    """Parse the body of a request, without the token evidence that is not read (`forget_ids`).

    Lone surrogates, which no tokenizer can encode, become U+FFFD.

    Raises `ApiError`: 400; not JSON, not an object, or nested too deeply.
    """
    try:
        text = raw.decode()
        body = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body of the request is not valid JSON: {error}") from None
    checked(body, dict, "body", expected="a JSON object")
    forget_ids(body.get("messages"))
    if depth_of(body) > MAX_DEPTH:
        raise ApiError(f"the body of the request is nested more than {MAX_DEPTH} levels deep")
    if "\\u" not in text:  # only escapes can spell lone surrogates
        return body
    text = json.dumps(body, ensure_ascii=False)
    clean = without_surrogates(text)
    return body if clean == text else json.loads(clean)


def read_chat_request(
    body: Mapping[str, Any], *, offered: Sequence[Sampling], vocab_size: int, prefixes: Prefixes
) -> ChatRequest:
    """Check a request. Raises `ApiError` (400) with the field and the expected value.

    offered: sampling settings that may be asked for; the first is the default. vocab_size: limit of stop ids.
    prefixes: conversations that need no second check.
    """
    _refuse_unknown(body)
    sampling = _sampling(body, offered, vocab_size)
    tools = read_tools(body.get("tools"))
    _check_tool_choice(body.get("tool_choice"), tools)
    if _integer(body, "top_logprobs", default=0, low=0, high=20):
        raise not_supported(
            "top_logprobs",
            why="only sampled tokens have logprobs; leave it out, or send 0. logprobs=true returns these",
        )
    options = {} if body.get("stream_options") is None else body["stream_options"]
    checked(options, dict, "stream_options", expected="an object")
    conversation = prefixes.read(body.get("messages"), tools)
    return ChatRequest(
        conversation=conversation,
        last_ids=read_last_ids(body["messages"]),
        sampling=sampling,
        num_choices=_integer(body, "n", default=1, low=1, high=MAX_CHOICES),
        one_call=body.get("parallel_tool_calls") is not None and not _flag(body, "parallel_tool_calls"),
        stop_strings=_stop_strings(body.get("stop")),
        seed=None if body.get("seed") is None else _integer(body, "seed", default=0, low=-(2**63), high=2**63 - 1),
        wants_logprobs=_flag(body, "logprobs"),
        stream=_flag(body, "stream"),
        wants_usage=_flag(options, "include_usage"),
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
            raise unknown_field(field)
        if value != _NEUTRAL[field]:
            raise not_supported(
                field,
                why=f"training needs unmodified samples; leave it out, or send {json.dumps(_NEUTRAL[field])}",
            )


def _sampling(body: Mapping[str, Any], offered: Sequence[Sampling], vocab_size: int) -> Sampling:
    asked = {field: _number(body, field) for field in _DISTRIBUTION if body.get(field) is not None}
    if asked.get("top_k") == -1:  # off in vLLM
        asked["top_k"] = 0
    choices = [{field: getattr(one, field) for field in _DISTRIBUTION} for one in offered]
    fitting = [one for one, choice in zip(offered, choices, strict=True) if asked.items() <= choice.items()]
    if not fitting:
        expected = " or ".join(", ".join(f"{field}={value:g}" for field, value in one.items()) for one in choices)
        wrong = next(
            (field for field, value in asked.items() if all(one[field] != value for one in choices)),
            next(iter(asked)),
        )
        raise ApiError(
            f"{wrong}={asked[wrong]:g} differs from the settings of this run; expected {expected}. Other settings "
            "sample from a distribution that is not trained: leave them out, or send these",
            param=wrong,
            code="sampling_mismatch",
        )
    sampling = fitting[0]
    limits = [
        _integer(body, field, default=sampling.max_tokens, low=1, high=2**63 - 1)
        for field in ("max_tokens", "max_completion_tokens")  # the older and the newer name
    ]
    stops = [*sampling.stop_token_ids, *_stop_ids(body.get("stop_token_ids"), vocab_size)]
    return replace(sampling, max_tokens=min(sampling.max_tokens, *limits), stop_token_ids=tuple(dict.fromkeys(stops)))


def _check_tool_choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    if value is None or value == "auto" or (value == "none" and not tools):
        return
    if value == "none":
        raise not_supported("tool_choice", why="found 'none' beside tools; leave out the tools that must not be called")
    raise not_supported(
        "tool_choice",
        why=f"found {quoted(value)}, expected 'auto': a forced call is not sampled from the model's own distribution",
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
    if len(ids) > MAX_STOP_IDS:
        raise ApiError(f"stop_token_ids has {len(ids)} ids, at most {MAX_STOP_IDS} are allowed", param="stop_token_ids")
    return ids


def _number(body: Mapping[str, Any], field: str) -> float:
    value = body[field]
    if type(value) not in (int, float) or abs(value) > 1e9:
        raise wrong_type(field, value, expected="a number")
    return value


def _integer(body: Mapping[str, Any], field: str, *, default: int, low: int, high: int) -> int:
    value = default if body.get(field) is None else checked(body[field], int, field, expected="an integer")
    if not low <= value <= high:
        raise ApiError(f"{field}={quoted(value)} must lie between {low} and {high}", param=field, code="invalid_value")
    return value


def _flag(parent: Mapping[str, Any], field: str) -> bool:
    return parent.get(field) is not None and checked(parent[field], bool, field, expected="true or false")
