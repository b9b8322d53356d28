"""Messages in the one form that chat templates read."""

from __future__ import annotations

from lockstep.rollout.chat.messages import normalize_messages


def test_annotations_and_empty_lists_of_calls_do_not_reach_the_template() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [], "tool_call_errors": ["e"]}
    ids = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}
    assert normalize_messages([message | ids]) == [{"role": "assistant", "content": "x"}]


def test_a_tool_result_gets_the_name_of_its_call_and_arguments_become_objects() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}
    turn, result = normalize_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "o"}, {"text": "k\ud800"}]},
        ]
    )
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": "\ufffd"}}
    assert (turn["content"], result["content"], result["name"]) == ("", "ok\ufffd", "f")
