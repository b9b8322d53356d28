"""Tests of requests of the Messages API: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.integrations.gateway.dialects.anthropic_messages import MESSAGES
from lockstep.integrations.gateway.errors import ApiError
from lockstep.integrations.gateway.request import SampleRequest
from lockstep.integrations.gateway.session import Session
from lockstep.rollout.engine.protocol import Sampling
from tests.fixtures.gateway import offer_of

OFFER = offer_of(Session("", offered=[Sampling(max_tokens=16)]))
USER = {"role": "user", "content": "x"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def read(**fields: Any) -> SampleRequest:
    return MESSAGES.read({"max_tokens": 5, "messages": [USER], **fields}, OFFER)


def turn(*blocks: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": list(blocks)}, USER]


def asks(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def test_results_and_texts_of_a_user_message_are_messages_in_their_order():
    result = {"type": "tool_result", "tool_use_id": "1", "is_error": True}
    blocks = [result, {**result, "tool_use_id": "2", "content": [text("o"), text("k")]}, text("a"), text("b")]
    request = read(messages=asks(*blocks), system=[text("s"), text("t")])
    assert request.conversation.messages == (
        {"role": "system", "content": "st"},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "tool", "tool_call_id": "2", "content": "ok"},
        {"role": "user", "content": "ab"},
    )


def test_blocks_of_a_turn_are_one_message():
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"b": 1, "a": "ü"}}
    thinking = {"type": "thinking", "thinking": "t", "signature": "s"}
    request = read(messages=turn(thinking, text("a"), text("b"), call))
    function = {"name": "f", "arguments": '{"b": 1, "a": "ü"}'}
    assert request.conversation.messages[1] == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "t",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    assert request.mark.name == "s"


def test_token_ids_of_the_last_turn_are_read():
    turns = [USER, {"role": "assistant", "content": "a", "generation_token_ids": [3, 4]}, USER]
    assert read(messages=turns).mark.sampled_ids == (3, 4)


def test_fields_reach_the_request():
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    request = read(tools=[TOOL], tool_choice=choice, stop_sequences=["a", "b"], stream=True)
    assert (request.sampling.max_tokens, request.one_call, request.stream) == (5, True, True)
    assert request.stop_strings == ("a", "b")
    (tool,) = request.conversation.tools
    assert tool["function"] == {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_a_call_that_is_asked_for_is_marked(choice):
    assert read(tools=[TOOL], tool_choice=choice).must_call
    assert not read(tools=[TOOL], tool_choice={"type": "auto"}).must_call


def test_settings_without_an_effect_are_accepted():
    neutral = {"thinking": {"type": "adaptive"}, "output_config": {"effort": None}, "metadata": {"user_id": "u"}}
    assert read(**neutral, service_tier="auto", speed="standard", tool_choice={"type": "none"}) == read()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, ("max_tokens", "required")),
        ({"max_tokens": 0}, ("max_tokens", "between")),
        ({"max_tokens": "5"}, ("max_tokens", "an integer")),
        ({"messages": None}, ("messages", "a list")),
        ({"messages": []}, ("messages", "the user")),
        ({"messages": {}}, ("messages", "a list")),
        ({"messages": ["x"]}, ("messages[0]", "an object")),
        ({"messages": [USER] * 32769}, ("messages", "32768")),
        ({"messages": [{"role": "tool", "content": "x"}]}, ("messages[0].role", "user, assistant")),
        ({"messages": [{"role": ["user"], "content": "x"}]}, ("messages[0].role", "user, assistant")),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, ("messages", "does not continue")),
        ({"messages": [{**USER, "generation_token_ids": [1]}]}, ("messages[0]", "token ids")),
        ({"messages": [{"role": "user"}]}, ("messages[0].content", "content blocks")),
        ({"messages": asks()}, ("messages[0].content", "at least one")),
        ({"messages": asks("x")}, ("messages[0].content[0]", "a content block")),
        ({"messages": asks({"type": "image", "source": {}})}, ("messages[0].content[0].type", "'image'")),
        ({"messages": asks({"type": ["text"]})}, ("messages[0].content[0].type", "text and tool_result")),
        ({"messages": asks({"type": "text"})}, ("messages[0].content[0].text", "a string")),
        ({"messages": asks({"type": "tool_result", "tool_use_id": 1})}, ("messages[0].content[0].tool_use_id",)),
        (
            {"messages": asks({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]})},
            ("messages[0].content[0].content[0].type", "'image'"),
        ),
        ({"messages": turn({"type": "redacted_thinking", "data": "x"})}, ("redacted_thinking", "tool_use")),
        ({"messages": turn({"type": "thinking", "thinking": "x", "signature": 1})}, ("signature", "a string")),
        ({"messages": turn({"type": "tool_use", "id": "1", "name": "f", "input": "{}"})}, ("input", "an object")),
        ({"messages": turn(*[{"type": "tool_use", "id": "1", "name": "f", "input": {}}] * 1025)}, ("1024",)),
        ({"system": 5}, ("system", "content blocks")),
        ({"system": [{"type": "image"}]}, ("system[0].type", "text")),
        ({"tools": {}}, ("tools", "a list")),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, ("tools[0].type", "runs no tools")),
        ({"tools": [{"name": "f", "input_schema": []}]}, ("tools[0].input_schema", "a JSON schema")),
        ({"tool_choice": {"type": "any"}}, ("tool_choice", "auto")),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, ("tool_choice", "('f')")),
        ({"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, ("tool_choice", "auto")),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, ("tool_choice", "leave out the tools")),
        ({"tool_choice": "auto"}, ("tool_choice", "an object")),
        ({"tool_choice": {"disable_parallel_tool_use": 1}}, ("disable_parallel_tool_use", "true or false")),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ("thinking", "adaptive")),
        ({"output_config": {"format": {"type": "json_schema"}}}, ("output_config.format", "leave it out")),
        ({"stop_sequences": [""]}, ("stop_sequences", "empty")),
        ({"stop_sequences": ["a"] * 5}, ("stop_sequences", "at most 4")),
        ({"mcp_servers": []}, ("mcp_servers", "tools")),
        ({"container": "c"}, ("container", "no code")),
        ({"speed": "fast"}, ("speed", "standard")),
        ({"temperature": 0.3}, ("temperature=0.3", "temperature=1")),
        ({"top_k": 5}, ("top_k=5", "top_k=0")),
        ({"n": 2}, ("unrecognized", "'n'")),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_its_field(fields, words):
    with pytest.raises(ApiError) as caught:
        read(**fields)
    error = MESSAGES.error(caught.value)
    assert (caught.value.status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert all(word in error["error"]["message"] for word in words), error["error"]["message"]
