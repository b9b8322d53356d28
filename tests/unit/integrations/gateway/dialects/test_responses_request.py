"""Tests of requests of the Responses API: what is read, joined to turns, and refused."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.integrations.gateway.dialects.responses import RESPONSES
from lockstep.integrations.gateway.errors import ApiError
from lockstep.integrations.gateway.request import SampleRequest
from lockstep.integrations.gateway.session import Session
from lockstep.rollout.engine.protocol import Sampling
from tests.fixtures.gateway import offer_of

OFFER = offer_of(Session("", offered=[Sampling(max_tokens=16)]))
NAMES = "a" * 24, "b" * 24
TOOL = {"type": "function", "name": "f", "parameters": None, "strict": True}
USER = {"role": "user", "content": "x"}


def read(**fields: Any) -> SampleRequest:
    return RESPONSES.read({"input": "x", **fields}, OFFER)


def messages(*items: Any) -> list[tuple[str, str, str, list[str]]]:
    """Return role, content, reasoning and calls of the messages that the items are translated to."""
    return [
        (
            message["role"],
            message["content"],
            message.get("reasoning_content", ""),
            [call["id"] for call in message.get("tool_calls", ())],
        )
        for message in read(input=list(items)).conversation.messages
    ]


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **fields}


def called(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **fields}


def result(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": [{"type": "input_text", "text": "ok"}]}


def test_items_that_follow_each_other_are_one_turn():
    assert messages(USER, thought("t"), said("s"), called("1"), called("2"), result("1"), result("2")) == [
        ("user", "x", "", []),
        ("assistant", "s", "t", ["1", "2"]),
        ("tool", "ok", "", []),
        ("tool", "ok", "", []),
    ]


def test_items_out_of_order_begin_another_turn():
    assert messages(USER, said("a"), said("b"), thought("t"), called("1"), thought("u"), said("c")) == [
        ("user", "x", "", []),
        ("assistant", "a", "", []),
        ("assistant", "b", "", []),
        ("assistant", "", "t", ["1"]),
        ("assistant", "c", "u", []),
    ]


def test_items_with_the_ids_of_one_answer_are_one_turn_wherever_they_are():
    one, two = NAMES
    parts = [called("1", id=f"fc_{one}_0"), result("1"), called("2", id=f"fc_{one}_1"), result("2")]
    assert messages(USER, *parts, called("3", id=f"fc_{two}_0"), said("a", id=f"msg_{one}")) == [
        ("user", "x", "", []),
        ("assistant", "a", "", ["1", "2"]),
        ("tool", "ok", "", []),
        ("tool", "ok", "", []),
        ("assistant", "", "", ["3"]),
    ]


def test_items_of_two_answers_are_two_turns():
    one, two = NAMES
    turns = messages(thought("t", id=f"rs_{one}"), said("a", id=f"msg_{two}"))
    assert turns == [("assistant", "", "t", []), ("assistant", "a", "", [])]
    assert read(input=[thought("t", id=f"rs_{one}"), said("a", id=f"msg_{two}")]).mark.name == two


def test_the_mark_is_that_of_the_last_turn():
    assert read(input=[said("a", id=f"msg_{NAMES[0]}"), USER]).mark.name == NAMES[0]
    assert read(input=[said("a", id=f"msg_{NAMES[0]}"), USER, said("a"), USER]).mark.name is None
    assert read(input=[said("a", id="msg_of_another_server")]).mark.name is None


def test_instructions_and_developer_messages_are_system_messages():
    request = read(instructions="i", input=[{"role": "developer", "content": "d"}, USER])
    assert [message["role"] for message in request.conversation.messages] == ["system", "system", "user"]
    assert request.num_instructions == 1


def test_a_tool_has_the_same_form_whatever_keys_the_client_sends():
    odd = {"strict": False, "parameters": {"type": "object"}, "name": "f", "description": "d", "type": "function"}
    (tool,) = read(tools=[odd]).conversation.tools
    assert list(tool["function"]) == ["name", "description", "parameters"]
    (tool,) = read(tools=[TOOL]).conversation.tools
    assert tool["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}


def test_fields_reach_the_request():
    request = read(
        max_output_tokens=5, parallel_tool_calls=False, stream=True, include=["message.output_text.logprobs"]
    )
    assert (request.sampling.max_tokens, request.one_call, request.stream, request.wants_logprobs) == (5,) + (True,) * 3


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_call_that_is_asked_for_is_marked(choice):
    assert read(tools=[TOOL], tool_choice=choice).must_call
    assert not read(tools=[TOOL], tool_choice="auto").must_call


def test_settings_without_an_effect_are_accepted():
    neutral = {
        "background": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": "auto"},
        "tool_choice": "auto",
        "store": False,
        "stream_options": {"include_obfuscation": False},
    }
    assert read(**neutral) == read()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "at least one item"),
        ({"input": []}, "input", "at least one item"),
        ({"input": 5}, "input", "a list of items"),
        ({"input": ["x"]}, "input[0]", "an object with a type"),
        ({"input": [{}]}, "input[0].type", "message, reasoning"),
        ({"input": [{"type": ["x"]}]}, "input[0].type", "message, reasoning"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "input_text"),
        ({"input": [{"role": "user", "content": {}}]}, "input[0].content", "text parts"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "a string"),
        ({"input": [called("1", arguments={})]}, "input[0].arguments", "a string"),
        ({"input": [called("1", arguments="[" * 101 + "]" * 101)]}, "input[0].arguments", "100 levels"),
        ({"input": [called("1")] * 1025}, "input[1024].arguments", "1024"),
        ({"input": [called("1", id=5)]}, "input[0].id", "a string"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary", "a list"),
        ({"input": [{"type": "item_reference", "id": f"msg_{NAMES[0]}"}]}, "input[0].id", "no item"),
        ({"input": [USER] * 32769}, "input", "32768"),
        ({"instructions": ["x"]}, "instructions", "a string"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not found"),
        ({"previous_response_id": {}}, "previous_response_id", "the id"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "no prompt templates"),
        ({"background": True}, "background", "false"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "leave it out"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "leave it out"),
        ({"reasoning": []}, "reasoning", "an object"),
        ({"include": ["file_search_call.results"]}, "include", "expected"),
        ({"include": [["x"]]}, "include", "expected"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "runs no tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
        ({"tools": [{**TOOL, "parameters": {"maximum": float("inf")}}]}, "tools[0].parameters", "out of range"),
        ({"tools": [TOOL] * 1025}, "tools", "1024"),
        ({"tool_choice": "required"}, "tool_choice", "auto"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "('f')"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "auto"),
        ({"temperature": 0.3}, "temperature", "temperature=1"),
        ({"max_output_tokens": 0}, "max_output_tokens", "between"),
        ({"messages": [USER]}, "messages", "unrecognized"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids", "token ids"),
        ({"n": 2}, "n", "unrecognized"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_its_field(fields, param, words):
    with pytest.raises(ApiError) as caught:
        read(**fields)
    error = RESPONSES.error(caught.value)["error"]
    assert (caught.value.status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert words in error["message"]
