"""Tests of requests in every dialect that no client would send: each is read, or refused with a status of 4xx."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.integrations.gateway.dialects import DIALECTS
from lockstep.integrations.gateway.dialects.dialect import Dialect
from lockstep.integrations.gateway.errors import ApiError
from lockstep.integrations.gateway.request import read_json
from lockstep.integrations.gateway.session import Session
from lockstep.integrations.gateway.splice import make_prompt
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import TemplateError
from tests.fixtures.gateway import offer_of
from tests.fixtures.tokenizers import chat_tokenizer

CHAT = Chat(chat_tokenizer("qwen3"))
USER = {"role": "user", "content": "say it"}
SESSION = Session("", offered=[Sampling(max_tokens=8)])
ALL = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)

KEYS = ["role", "content", "type", "text", "name", "arguments", "id", "call_id", "output", "summary", "input"]
KEYS += ["messages", "tools", "tool_calls", "function", "tool_call_id", "n", "stop", "temperature", "max_tokens"]
KEYS += [
    "stream_options",
    "generation_token_ids",
    "prompt",
    "instructions",
    "previous_response_id",
    "include",
    "system",
]
KEYS += ["tool_use_id", "thinking", "signature", "input_schema", "tool_choice", "reasoning", "encrypted_content"]
KEYS += ["system", "stop_sequences", "output_config", "effort", "parameters", "is_error", "logprobs"]
WORDS = ["user", "assistant", "tool", "system", "developer", "text", "function", "{}", '{"a": [1]}', "\ud800", "auto"]
WORDS += ["<|im_end|>", "input_text", "output_text", "message", "reasoning", "reasoning_text", "function_call"]
WORDS += ["function_call_output", "item_reference", "tool_use", "tool_result", "thinking", "custom", "image"]
WORDS += ["msg_0123456789abcdef01234567", "resp_x", "fc_0123456789abcdef01234567_9999"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)
PARTS = st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5), max_size=3)
FIELDS = (
    "messages",
    "input",
    "prompt",
    "tools",
    "system",
    "instructions",
    "include",
    "thinking",
    "tool_choice",
    "text",
)
DEEP = "[" * 900 + "]" * 900


def parse(dialect: Dialect, raw: bytes) -> None:
    """Read a request and make its prompt. Only errors with a status of 4xx may be raised."""
    try:
        request = dialect.read(read_json(raw), offer_of(SESSION))
        if request.given is None:
            json.dumps(make_prompt(CHAT, SESSION, request.conversation, request.mark).ids)
        json.dumps(request.echo, allow_nan=False)
        json.dumps([dict(tool) for tool in request.conversation.tools])
    except ApiError as error:
        assert 400 <= error.status < 500  # noqa: PT017
        json.dumps(dialect.error(error), allow_nan=False)
    except TemplateError:
        pass


@ALL
@settings(max_examples=40, deadline=None)
@given(body=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6), message=PARTS, value=VALUES)
def test_any_json_is_read_or_refused(dialect, body, message, value):
    for fields in (body, {"messages": message}, {"input": message}, {"prompt": value}):
        parse(dialect, json.dumps({"max_tokens": 5, "messages": [USER], **fields}).encode())
    for part in message:
        for role in ("user", "assistant"):
            turn = [{"role": role, "content": message}, {"role": role, **part}]
            parse(dialect, json.dumps({"max_tokens": 5, "messages": [*turn, USER]}).encode())
            parse(dialect, json.dumps({"input": [*turn, *message, USER]}).encode())
        tools = [part, {"type": "function", "function": part}, {"type": "function", **part}, {"type": "custom", **part}]
        for tool in tools:
            parse(dialect, json.dumps({"max_tokens": 5, "messages": [USER], "tools": [tool]}).encode())
            parse(dialect, json.dumps({"input": "x", "tools": [tool]}).encode())
    for field in FIELDS:
        parse(dialect, json.dumps({"max_tokens": 5, "messages": [USER], "input": "x", field: value}).encode())


@ALL
@settings(max_examples=60, deadline=None)
@given(raw=st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_parsed_or_refused(dialect, raw):
    parse(dialect, raw)


def call_with(arguments: str) -> bytes:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    block = {"type": "tool_use", "id": "a", "name": "f", "input": arguments}
    messages = [USER, {"role": "assistant", "content": [block], "tool_calls": [call]}]
    return json.dumps({"max_tokens": 5, "messages": messages, "input": [item]}).encode()


def with_conversation(field: str, value: str) -> bytes:
    conversation = '[{"role": "user", "content": "x"}]'
    fields = f'"messages": {conversation}, "input": {conversation}, "prompt": "x"'
    return f'{{"{field}": {value}, {fields}}}'.encode()


@ALL
@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        with_conversation("temperature", "NaN"),
        with_conversation("temperature", "1e999"),
        with_conversation("max_tokens", "9" * 5000),
        call_with(DEEP),
    ],
    ids=["unclosed", "deep", "nan", "infinite", "long number", "deep arguments"],
)
def test_malicious_json_is_refused(dialect, raw):
    with pytest.raises(ApiError) as caught:
        dialect.read(read_json(raw), offer_of(SESSION))
    assert len(json.dumps(dialect.error(caught.value))) < 1000


def test_lone_surrogates_are_replaced_in_keys_and_text():
    raw = rb'{"a\ud800": ["\ud83d", {"b": "x\udc00"}, "\ud83d\ude00"]}'
    assert read_json(raw) == {"a\ufffd": ["\ufffd", {"b": "x\ufffd"}, "\N{GRINNING FACE}"]}


@ALL
@pytest.mark.parametrize("field", FIELDS)
def test_a_long_value_is_not_repeated_in_the_error(dialect, field):
    value: Any = {"x" * 10_000: "y" * 100_000}
    try:
        dialect.read({"max_tokens": 5, "messages": [USER], "input": "x", field: value}, offer_of(SESSION))
    except ApiError as error:
        assert len(json.dumps(dialect.error(error))) < 2000  # noqa: PT017
