"""Tests of the requests that are accepted, and of the errors for all others."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.integrations.gateway.dialects import fields as gateway_fields
from lockstep.integrations.gateway.dialects.chat_completions import read_chat_request
from lockstep.integrations.gateway.errors import ApiError
from lockstep.integrations.gateway.request import SampleRequest
from lockstep.integrations.gateway.session import Session
from lockstep.rollout.engine.protocol import Sampling
from tests.fixtures.gateway import offer_of

USER = {"role": "user", "content": "say it"}
TOOL = {"type": "function", "function": {"name": "f"}}
OFFERED = [Sampling(max_tokens=16), Sampling(temperature=0.0, max_tokens=8)]
OFFER = offer_of(Session("", offered=OFFERED), vocab_size=10)


def read(**fields: Any) -> SampleRequest:
    return read_chat_request({"messages": [USER], **fields}, OFFER)


def with_call(**fields: Any) -> list[dict[str, Any]]:
    """Messages with a tool call that has these fields."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(("asked", "expected"), [({}, 1.0), ({"temperature": 0.0}, 0.0), ({"temperature": 1.0}, 1.0)])
def test_settings_of_training_and_of_evaluation_are_both_offered(asked, expected):
    assert read(**asked).sampling.temperature == expected


def test_a_temperature_that_is_not_offered_is_refused_with_those_that_are():
    with pytest.raises(ApiError, match=r"temperature=1, .* or temperature=0, "):
        read(temperature=0.5)


def test_null_is_the_same_as_a_field_that_is_left_out():
    fields = ("tools", "tool_choice", "n", "stream", "stream_options", "stop", "stop_token_ids", "max_tokens", "seed")
    fields += ("logprobs", "temperature", "logit_bias", "chat_template")
    assert read(**dict.fromkeys(fields)) == read()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_that_is_asked_for_is_marked_and_said_once(choice, caplog):
    gateway_fields._warn_of_choice.cache_clear()
    for _ in range(2):
        assert read(tools=[TOOL], tool_choice=choice).must_call
    (record,) = caplog.records
    assert "environment/unforced_calls" in record.getMessage()
    assert not read(tools=[TOOL], tool_choice="auto").must_call


def test_settings_without_an_effect_are_accepted():
    neutral = {"presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "tool_choice": "auto"}
    assert read(**neutral, user="u", metadata={"a": 1}) == read()


def test_the_lower_of_the_two_token_limits_counts():
    assert read(max_tokens=7, max_completion_tokens=5).sampling.max_tokens == 5
    assert read(max_completion_tokens=5).sampling.max_tokens == 5
    assert read(max_tokens=4096).sampling.max_tokens == 16, "the run's limit is lower"


def test_fields_reach_the_request():
    request = read(n=2, stop="a", stop_token_ids=[3], seed=-1, logprobs=True, stream=True, tools=[TOOL])
    assert (request.num_choices, request.stop_strings, request.seed) == (2, ("a",), -1)
    assert request.sampling.stop_token_ids == (3,)
    assert request.wants_logprobs
    assert request.stream
    assert not request.wants_usage
    assert read(stream_options={"include_usage": True}).wants_usage


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"n": True}, "n", "invalid_type"),
        ({"n": 1.0}, "n", "invalid_type"),
        ({"n": 129}, "n", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"max_completion_tokens": 2**63}, "max_completion_tokens", "invalid_value"),
        ({"top_logprobs": 5}, "top_logprobs", "unsupported_parameter"),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls", "invalid_type"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", None),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"stream": 1}, "stream", "invalid_type"),
        ({"stream_options": []}, "stream_options", "invalid_type"),
        ({"stream_options": {"include_usage": 0}}, "include_usage", "invalid_type"),
        ({"stop": [""]}, "stop", "invalid_type"),
        ({"stop": ["a"] * 5}, "stop", None),
        ({"stop_token_ids": [10]}, "stop_token_ids", "invalid_type"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "invalid_type"),
        ({"tool_choice": "none", "tools": [TOOL]}, "tool_choice", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice", None),
        ({"tool_choice": {"type": "function", "function": []}, "tools": [TOOL]}, "tool_choice", None),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [TOOL]}, "tool_choice", None),
        ({"tools": {}}, "tools", "invalid_type"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function", "invalid_type"),
        ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_type"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters", None),
        ({"tools": [TOOL] * 1025}, "tools", None),
        ({"messages": [USER] * 32769}, "messages", None),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * 1025}]}, "messages[0].tool_calls", None),
        ({"messages": [USER, "x"]}, "messages[1]", "invalid_type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{**USER, "name": 1}]}, "messages[0].name", "invalid_type"),
        ({"messages": [{**USER, "audio": {}}]}, "messages[0].audio", "unsupported_parameter"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "invalid_type"),
        ({"messages": with_call(id=None)}, "messages[1].tool_calls[0].id", "invalid_type"),
        ({"messages": with_call(type=None)}, "messages[1].tool_calls[0].type", "unsupported_parameter"),
        ({"messages": with_call(function="f")}, "messages[1].tool_calls[0]", "invalid_type"),
    ],
    ids=lambda value: str(value)[:70] if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_its_field(fields, param, code):
    with pytest.raises(ApiError) as caught:
        read(**fields)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, param, code or error.code)
