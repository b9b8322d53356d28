"""Histories: earlier turns are kept, or the conversation branches where the template drops part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import EngineCall, FinishReason
from tests.fixtures.conversations import USER, WEATHER, a_call, encoded
from tests.fixtures.tokenizers import chat_tokenizer


def thinking_conversation(history: str) -> tuple[list[EngineCall], list[bool]]:
    """Run a Qwen3 conversation: question, reasoning + tool call, result, reasoning + answer, next question, answer.

    Returns its calls, and for each follow-up True if it extends the call before.
    """
    tokenizer = chat_tokenizer("qwen3")
    chat = Chat(tokenizer, history=history)
    messages: list[Mapping[str, Any]] = [USER]
    turns = [
        '<think>\nlook it up\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
        "<think>\nsunny then\n</think>\n\nit is sunny",
        "<think>\nthanked\n</think>\n\nyou are welcome",
    ]
    answers = [{"role": "tool", "content": "sunny"}, {"role": "user", "content": "thanks"}]
    ids = chat.prompt(messages, [WEATHER])
    calls, extensions = [], []
    for turn, answer in zip(turns, [*answers, None], strict=True):
        call = a_call(ids, [*encoded(tokenizer, turn), tokenizer.eos_token_id])
        calls.append(call)
        messages.append(chat.parse(call.sampled_ids, [WEATHER]))
        if answer is not None:
            extended = chat.extend(call, messages, [answer], [WEATHER])
            extensions.append(extended is not None)
            messages.append(answer)
            ids = chat.prompt(messages, [WEATHER]) if extended is None else extended
    return calls, extensions


def test_history_keep_extends_although_the_template_strips_reasoning() -> None:
    calls, extensions = thinking_conversation("keep")
    assert extensions == [True, True]
    (row,) = rows_from_calls(calls)
    assert row.num_trained == sum(len(call.sampled_ids) for call in calls)


def test_history_template_branches_where_reasoning_is_stripped_and_trains_every_sampled_token() -> None:
    calls, extensions = thinking_conversation("template")
    assert extensions == [True, False]  # kept across the tool result, stripped at the next question
    rows = rows_from_calls(calls)
    assert len(rows) == 2
    assert sum(row.num_trained for row in rows) == sum(len(call.sampled_ids) for call in calls)
    last_prompt = chat_tokenizer("qwen3").decode(calls[-1].prompt_ids)
    assert "look it up" not in last_prompt
    assert "it is sunny" in last_prompt


@pytest.mark.parametrize(("sampled", "extends"), [("fine", True), ("<think>\n\n</think>\n\nfine", False)])
def test_the_empty_think_block_of_the_last_turn_does_not_count_as_history(sampled: str, extends: bool) -> None:
    """Qwen3 shows one on the last turn if it has no reasoning, and none in earlier turns."""
    tokenizer = chat_tokenizer("qwen3")
    chat = Chat(tokenizer, history="template")
    call = a_call(chat.prompt([USER]), [*encoded(tokenizer, sampled), tokenizer.eos_token_id])
    extended = chat.extend(call, [USER, chat.parse(call.sampled_ids)], [USER])
    assert (extended is not None) is extends
    assert Chat(tokenizer).extend(call, [USER, chat.parse(call.sampled_ids)], [USER]) is not None


@pytest.mark.parametrize("sampled", ["<think>\nlook it", "<think>\n<tool_call>", "<think>"])
def test_reasoning_cut_by_length_branches_with_history_template_and_is_not_closed_with_keep(sampled: str) -> None:
    """Qwen3 writes the reasoning before a tool result with </think>, which was not sampled."""
    tokenizer = chat_tokenizer("qwen3")
    keep, follow = Chat(tokenizer), Chat(tokenizer, history="template")
    call = a_call(keep.prompt([USER]), encoded(tokenizer, sampled), FinishReason.LENGTH)
    history = [USER, keep.parse(call.sampled_ids)]
    result = [{"role": "tool", "content": "go on"}]
    assert follow.extend(call, history, result) is None
    extended = keep.extend(call, history, result)
    assert extended is not None
    assert tokenizer.decode(extended[len(call.prompt_ids) :]) == (
        f"{sampled}<|im_end|>\n<|im_start|>user\n<tool_response>\ngo on\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    closed = a_call(call.prompt_ids, [*encoded(tokenizer, "<think>\nlook it\n</think>\n\n"), tokenizer.eos_token_id])
    assert follow.extend(closed, [USER, follow.parse(closed.sampled_ids)], result) is not None


def test_analysis_cut_by_length_branches_with_history_template() -> None:
    """The template would write an empty final message after it."""
    tokenizer = chat_tokenizer("gpt_oss_like")
    keep, follow = Chat(tokenizer), Chat(tokenizer, history="template")
    for end in ("", "<|end|>"):
        sampled = encoded(tokenizer, f"<|channel|>analysis<|message|>look it{end}")
        call = a_call(keep.prompt([USER]), sampled, FinishReason.LENGTH)
        history = [USER, keep.parse(call.sampled_ids)]
        assert history[-1]["reasoning_content"] == "look it"
        assert follow.extend(call, history, [USER]) is None
        assert keep.extend(call, history, [USER]) is not None


def test_history_template_branches_where_an_earlier_turn_is_shown_differently() -> None:
    template = (
        "{%- for m in messages %}{{ '<|im_start|>' + (m.content | upper if messages | length > 2 and loop.first "
        "else m.content) + '<|im_end|>' }}{%- endfor %}{{ '<|im_start|>' if add_generation_prompt else '' }}"
    )
    tokenizer = chat_tokenizer("chatml", template=template)
    chat = Chat(tokenizer, history="template")
    call = a_call(chat.prompt([USER]), [*encoded(tokenizer, "fine"), tokenizer.eos_token_id])
    history = [USER, chat.parse(call.sampled_ids)]
    assert chat.extend(call, history, [USER]) is None
    assert Chat(tokenizer).extend(call, history, [USER]) is not None


def test_a_template_that_switches_thinking_off_extends_with_empty_think_blocks_or_branches() -> None:
    template = str(chat_tokenizer("qwen3").chat_template)
    tokenizer = chat_tokenizer("qwen3", template="{%- set enable_thinking = false %}" + template)
    chat = Chat(tokenizer)
    prompt = chat.prompt([USER])
    assert tokenizer.decode(prompt).endswith("assistant\n<think>\n\n</think>\n\n")
    call = a_call(prompt, [*encoded(tokenizer, "fine"), tokenizer.eos_token_id])
    extended = chat.extend(call, [USER, chat.parse(call.sampled_ids)], [USER])
    assert extended is not None
    assert tokenizer.decode(extended).count("<think>\n\n</think>\n\n") == 2
    follow = Chat(tokenizer, history="template")
    assert follow.extend(call, [USER, chat.parse(call.sampled_ids)], [USER]) is None


def test_history_template_branches_where_analysis_is_dropped_or_the_final_token_rewritten() -> None:
    tokenizer = chat_tokenizer("gpt_oss_like")
    follow, keep = Chat(tokenizer, history="template"), Chat(tokenizer)
    text = "<|channel|>analysis<|message|>look<|end|><|start|>assistant"
    call_text = f'{text} to=functions.get_weather<|channel|>commentary json<|message|>{{"city": "Paris"}}<|call|>'
    call = a_call(keep.prompt([USER]), encoded(tokenizer, call_text))
    message = keep.parse(call.sampled_ids)
    result = {"role": "tool", "content": "sunny", "tool_call_id": message["tool_calls"][0]["id"]}
    extended = follow.extend(call, [USER, message], [result])
    assert extended is not None
    assert extended == keep.extend(call, [USER, message], [result])
    assert tokenizer.decode(extended).endswith(
        '<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
        "<|start|>assistant"
    )
    final = a_call(extended, encoded(tokenizer, f"{text}<|channel|>final<|message|>sun<|return|>"))
    history = [USER, message, result, keep.parse(final.sampled_ids)]
    assert history[-1]["content"] == "sun"
    assert history[-1]["reasoning_content"] == "look"
    assert keep.extend(final, history, [USER]) is not None
    assert follow.extend(final, history, [USER]) is None
