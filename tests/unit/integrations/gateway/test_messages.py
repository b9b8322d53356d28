"""Tests of the reduction of messages and tools to the keys that a chat template may see."""

from __future__ import annotations

import pytest

from lockstep.integrations.gateway.messages import forget_ids, read_last_ids, read_message, read_tools


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "a", "name": "n", "x": 1, "tool_calls": 5}, {"content": "a", "name": "n"}),
        ({"role": "system", "content": [{"type": "text", "text": t} for t in "ab"]}, {"content": "ab"}),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "assistant", "content": None, "refusal": None, "tool_calls": []}, {"content": ""}),
        ({"role": "assistant", "reasoning": "r"}, {"content": "", "reasoning_content": "r"}),
        (
            {"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "s"},
            {"content": "", "reasoning_content": "s"},
        ),
        ({"role": "tool", "content": "a", "tool_call_id": "b"}, {"content": "a", "tool_call_id": "b"}),
    ],
)
def test_only_known_keys_reach_a_chat_template(message, expected):
    assert read_message(message, "messages[0]") == {"role": message["role"], **expected}


def test_a_tool_call_keeps_its_id_name_and_arguments():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "not JSON"}}
    sent = {**call, "index": 0, "function": {**call["function"], "x": 1}}
    message = read_message({"role": "assistant", "tool_calls": [sent]}, "messages[0]")
    assert message["tool_calls"] == [call]


def test_messages_lose_their_token_evidence_and_only_the_last_sampled_ids_are_read():
    evidence = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    said, user = {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}
    messages = [{**said, **evidence}, user, {**said, **evidence, "generation_token_ids": [3]}, user]
    forget_ids(messages)
    assert messages == [said, user, {**said, "generation_token_ids": [3]}, user]
    assert read_last_ids(messages) == (3,)
    assert read_message(messages[2], "messages[2]") == said


def test_a_tool_keeps_its_function_and_gets_parameters():
    function = {"strict": True, "name": "f", "description": None}
    (tool,) = read_tools([{"type": "function", "function": function, "x": 1}])
    assert tool == {"type": "function", "function": {**function, "parameters": {"type": "object", "properties": {}}}}
