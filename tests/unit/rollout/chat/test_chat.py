"""Parsing of sampled turns; refused settings, tokenizers and messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.errors import ConfigError, TemplateError
from lockstep.rollout.records import FinishReason
from tests.fixtures.conversations import FAMILIES, USER, WEATHER, a_call, encoded
from tests.fixtures.paths import ROOT
from tests.fixtures.tokenizers import TEMPLATES, chat_tokenizer


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


def test_a_tokenizer_that_cannot_be_loaded_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"model\.path=.*: no loadable tokenizer \(.*; set model\.path to"):
            Chat.from_pretrained(path)


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


def test_a_template_that_drops_the_tools_is_refused_with_one_that_shows_them() -> None:
    dropping = Chat(chat_tokenizer("chatml"))
    with pytest.raises(ConfigError, match=r"drops the tools.*\(get_weather\).*set model\.chat_template=hermes or"):
        dropping.require_tools([USER], [WEATHER])
    dropping.require_tools([USER], [])
    Chat(chat_tokenizer("qwen3")).require_tools([USER], [WEATHER])
    other = chat_tokenizer("llama3", template=(TEMPLATES / "llama3.jinja").read_text().replace("tools", "nothing"))
    with pytest.raises(ConfigError, match=r"set model\.chat_template=<file\.jinja>") as refused:
        Chat(other).require_tools([USER], [WEATHER])
    assert "hermes" not in str(refused.value), "its control tokens are not those of this model"


def test_the_shipped_template_shows_tools_and_extends_a_conversation_with_calls(tmp_path: Path) -> None:
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    chat = Chat.from_pretrained(tmp_path, template="hermes")
    chat.require_tools([USER], [WEATHER])
    system = {"role": "system", "content": "Be brief."}
    prompt = chat.prompt([system, USER], [WEATHER])
    assert "Be brief.\n\n# Tools" in chat.decode(prompt)
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    sampled = chat.tokenizer.encode(said, add_special_tokens=False)
    message = chat.parse(sampled, [WEATHER])
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    result = {"role": "tool", "name": "get_weather", "tool_call_id": "1", "content": "sunny"}
    extended = chat.extend(a_call(prompt, sampled), [system, USER, message], [result], [WEATHER])
    assert extended is not None
    assert chat.decode(extended) == chat.decode(chat.prompt([system, USER, message, result], [WEATHER]))


def test_a_template_is_a_file_or_a_shipped_one_for_the_models_control_tokens(tmp_path: Path) -> None:
    chat_tokenizer("llama3").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"hermes writes <\|im_start\|> and <\|im_end\|>, which the tokenizer"):
        Chat.from_pretrained(tmp_path, template="hermes")
    with pytest.raises(ConfigError, match="is neither hermes nor a file"):
        Chat.from_pretrained(tmp_path, template=str(tmp_path / "none.jinja"))
    own = tmp_path / "own.jinja"
    own.write_text((TEMPLATES / "llama3.jinja").read_text() + "{# own #}")
    assert str(Chat.from_pretrained(tmp_path, template=str(own)).tokenizer.chat_template).endswith("{# own #}")


def test_past_tool_calls_of_a_data_row_are_rendered_as_examples(tmp_path: Path) -> None:
    blocks = re.findall(r"```json\n(.+?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    (page,) = (block for block in blocks if "tool_calls" in block)
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    chat = Chat.from_pretrained(tmp_path, template="hermes")
    shown = chat.decode(chat.prompt(json.loads(page)["messages"], [WEATHER]))
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call><|im_end|>'
    assert call in shown
    assert "<tool_response>\n5\n</tool_response>" in shown
    assert shown.endswith("compute 64*22-55<|im_end|>\n<|im_start|>assistant\n")
