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
    ],
)
def test_a_row_without_a_prompt_that_can_be_answered_is_refused_with_the_reason(row, says):
    with pytest.raises(DataError, match=says):
        PromptReader().messages(row)


def test_a_template_surrounds_texts_and_not_messages():
    prompt = PromptReader(template="{prompt} Answer in one word.")
    assert prompt.messages({"question": "why?"})[0]["content"] == "why? Answer in one word."
    assert prompt.messages({"messages": [{"role": "user", "content": "why?"}]})[0]["content"] == "why?"
