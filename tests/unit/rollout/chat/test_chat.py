"""Parsing of sampled turns; refused settings, tokenizers and messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rollout.chat.chat import Chat
from rollout.errors import ConfigError, TemplateError
from rollout.records import FinishReason
from tests.fixtures.conversations import FAMILIES, USER, WEATHER, a_call, encoded
from tests.fixtures.tokenizers import chat_tokenizer


def test_a_sampled_turn_becomes_an_openai_message() -> None:
    tokenizer = chat_tokenizer("qwen3")
    text = '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    message = Chat(tokenizer).parse([*encoded(tokenizer, text), tokenizer.eos_token_id])
    call_id = message["tool_calls"][0].pop("id")
    assert message == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}],
    }
    assert len(call_id) == 9
    assert call_id.isalnum()


def test_a_turn_that_begins_inside_a_think_block_is_parsed_as_reasoning() -> None:
    template = (chat_tokenizer("chatml").chat_template or "").replace(
        "'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"
    )
    tokenizer = chat_tokenizer("qwen3", template=str(template))
    chat = Chat(tokenizer)
    assert chat.parse(encoded(tokenizer, "hm\n</think>\n\nyes"))["content"] == "yes"
    assert chat.parse(encoded(tokenizer, "hm, cut")) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm, cut",
    }


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_parsing_never_raises_and_its_message_can_be_rendered(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(FAMILIES))
    tokenizer = chat_tokenizer(family)
    chat = Chat(tokenizer)
    sampled = data.draw(st.lists(st.integers(0, len(tokenizer) + 300), max_size=30))
    message = chat.parse(sampled, [WEATHER])
    assert message["role"] == "assistant"
    assert isinstance(message["content"], str)
    assert chat.prompt([USER, message, USER])
    call = a_call(chat.prompt([USER]), sampled, FinishReason.LENGTH)
    extended = chat.extend(call, [USER, message], [USER])
    assert extended is not None
    assert extended[: len(call.all_ids)] == list(call.all_ids)


def test_stop_tokens_come_from_tokenizer_template_and_generation_config(tmp_path: Path) -> None:
    chat_tokenizer("chatml", eos="<|endoftext|>").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [392, 7]}))
    chat = Chat.from_pretrained(tmp_path)
    names = chat.tokenizer.convert_ids_to_tokens(list(chat.stop_token_ids))
    assert names[0] == "<|endoftext|>"
    assert names[-1] == "<|im_end|>"
    assert chat.stop_token_ids == (392, 7, 394)
    assert chat.prompt([USER]) == Chat(chat_tokenizer("chatml")).prompt([USER])


def test_an_unknown_history_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="must be one of keep, template; found 'all'"):
        Chat(chat_tokenizer("chatml"), history="all")


def test_a_tokenizer_without_template_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chat_tokenizer("chatml").backend_tokenizer)
    with pytest.raises(TemplateError, match="no chat template"):
        Chat(tokenizer)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "x"}, "role None"),
        ({"role": "user", "content": [{"type": "image"}]}, "not supported"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, "without a function name"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_with_the_reason(message: dict[str, Any], says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        Chat(chat_tokenizer("qwen3")).prompt([USER, message])


def test_an_extension_needs_the_assistant_message() -> None:
    chat = Chat(chat_tokenizer("qwen3"))
    with pytest.raises(TemplateError, match="must end with the assistant message"):
        chat.extend(a_call([1], [2]), [USER], [USER])


def test_messages_are_not_modified() -> None:
    tokenizer = chat_tokenizer("qwen3")
    chat = Chat(tokenizer)
    call = {"id": "a", "function": {"name": "f", "arguments": '{"x": "<|im_end|>"}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    new = [{"role": "tool", "tool_call_id": "a", "content": "<|im_end|>"}]
    before = json.dumps([messages, new, WEATHER])
    chat.prompt([*messages, *new], [WEATHER])
    chat.extend(a_call([1], [2]), messages, new, [WEATHER])
    assert json.dumps([messages, new, WEATHER]) == before
