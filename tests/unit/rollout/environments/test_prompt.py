"""The first messages of an episode, read from a data row."""

from __future__ import annotations

import pytest

from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.errors import DataError


def test_a_text_column_becomes_a_user_turn():
    assert PromptReader().messages({"question": "why?"}) == ({"role": "user", "content": "why?"},)


def test_messages_are_read_before_prompt_and_prompt_before_question():
    row = {"question": "q", "prompt": "p", "messages": [{"role": "user", "content": "m"}]}
    assert PromptReader().messages(row)[0]["content"] == "m"
    assert PromptReader().messages({**row, "messages": None})[0]["content"] == "p"
    assert PromptReader(column="question").messages(row)[0]["content"] == "q"


def test_a_system_prompt_is_added_only_to_rows_without_one():
    prompt = PromptReader(system="be brief")
    assert [turn["role"] for turn in prompt.messages({"question": "q"})] == ["system", "user"]
    row = {"messages": [{"role": "system", "content": "be long"}, {"role": "user", "content": "q"}]}
    assert [turn["content"] for turn in prompt.messages(row)] == ["be long", "q"]


def test_empty_keys_that_columnar_files_add_are_left_out():
    row = {"messages": [{"role": "user", "content": "q", "tool_calls": None, "name": None}]}
    assert PromptReader().messages(row) == ({"role": "user", "content": "q"},)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "q"}, "it has text"),
        ({"messages": []}, "list of messages"),
        ({"prompt": 7}, "list of messages"),
        ({"messages": [{"from": "human", "value": "q"}]}, "role and content"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "assistant turn"),
        ({"messages": '[{"role": "user", "content": "q"}]'}, "column messages: found the JSON text of messages"),
        ({"prompt": ' [{"role": "user", "content": "q"}]\n'}, "column prompt: found the JSON text of messages"),
        ({"messages": [{"role": "human", "content": "q"}]}, "the role 'human', expected 'user'"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "gpt", "content": "a"}]},
            "the role 'gpt', expected 'assistant'",
        ),
        ({"prompt": " ", "answer": "5"}, r"prompt \(empty\), answer; fill it, or leave the row out"),
    ],
)
def test_a_row_without_a_prompt_that_can_be_answered_is_refused_with_the_reason(row, says):
    with pytest.raises(DataError, match=says):
        PromptReader().messages(row)


@pytest.mark.parametrize("text", ["[1, 2, 3]", "[", "[" * 100_000, '[{"name": "role"}]', '{"role": "user"}'])
def test_other_json_is_a_text_of_a_user(text: str) -> None:
    assert PromptReader().messages({"prompt": text}) == ({"role": "user", "content": text},)


def test_a_template_surrounds_texts_and_not_messages():
    prompt = PromptReader(template="{prompt} Answer in one word.")
    assert prompt.messages({"question": "why?"})[0]["content"] == "why? Answer in one word."
    assert prompt.messages({"messages": [{"role": "user", "content": "why?"}]})[0]["content"] == "why?"
