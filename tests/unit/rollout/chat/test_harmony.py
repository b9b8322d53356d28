"""gpt-oss conversations. The library downloads its vocabulary, so most tests use a stand-in for its encoding, which
writes the documented format with one token per character; the last tests run where the vocabulary is available.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai_harmony as harmony
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.chat.harmony import (
    CONTROL_IDS,
    HarmonyRenderer,
    load_encoding,
    parity,
    parse_harmony,
    to_harmony,
)
from lockstep.rollout.chat.template import History
from lockstep.rollout.chat.tool_calls import ToolCall, Turn
from lockstep.rollout.errors import ConfigError, TemplateError
from lockstep.rollout.records import EngineCall, FinishReason

WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "weather in Paris?"}
NAMES = {token: text for text, token in CONTROL_IDS.items()}


class StandInEncoding:
    """Encoding of Harmony as the library documents it: one token per character, control tokens have their own ids."""

    def render_conversation(
        self, conversation: harmony.Conversation, config: harmony.RenderConversationConfig | None = None
    ) -> list[int]:
        messages = list(conversation.messages)
        finals = [index for index, message in enumerate(messages) if message.channel == "final"]
        last_final = finals[-1] if finals and config is not None and config.auto_drop_analysis else -1
        return [
            token
            for index, message in enumerate(messages)
            if not (message.channel == "analysis" and index < last_final)
            for token in self._message(message)
        ]

    def render_conversation_for_completion(
        self,
        conversation: harmony.Conversation,
        next_turn_role: harmony.Role,
        config: harmony.RenderConversationConfig | None = None,
    ) -> list[int]:
        start = [CONTROL_IDS["<|start|>"], *map(ord, next_turn_role.value)]
        return self.render_conversation(conversation, config) + start

    def _message(self, message: harmony.Message) -> list[int]:
        content = message.content[0]
        text = content.text if isinstance(content, harmony.TextContent) else str(content.to_dict())
        header = message.author.name or message.author.role.value
        header += f" to={message.recipient}" if message.recipient else ""
        is_call = message.author.role is harmony.Role.ASSISTANT and message.recipient is not None
        return [
            CONTROL_IDS["<|start|>"],
            *map(ord, header),
            *([CONTROL_IDS["<|channel|>"], *map(ord, message.channel)] if message.channel else []),
            CONTROL_IDS["<|message|>"],
            *map(ord, text),
            CONTROL_IDS["<|call|>" if is_call else "<|end|>"],
        ]


def decoded(ids: Sequence[int]) -> str:
    return "".join(NAMES.get(token) or chr(token) for token in ids)


def encoded(text: str) -> list[int]:
    ids = []
    while text:
        name = next((name for name in CONTROL_IDS if text.startswith(name)), None)
        ids.append(ord(text[0]) if name is None else CONTROL_IDS[name])
        text = text[len(name or " ") :]
    return ids


def a_call(prompt: Sequence[int], sampled: Sequence[int]) -> EngineCall:
    return EngineCall(
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        sampled_logprobs=(-0.5,) * len(sampled),
        finish_reason=FinishReason.STOP,
    )


def renderer(history: History = History.KEEP) -> HarmonyRenderer:
    return HarmonyRenderer(StandInEncoding(), history=history)  # type: ignore[arg-type]


TOOL_TURN = (
    "<|channel|>analysis<|message|>look it up<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary "
    '<|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)
FINAL_TURN = (
    "<|channel|>analysis<|message|>sunny then<|end|><|start|>assistant<|channel|>final<|message|>it is sunny<|return|>"
)


def message_of(text: str) -> dict[str, Any]:
    return parse_harmony(text.removesuffix("<|call|>").removesuffix("<|return|>")).message([0])


def test_a_prompt_has_system_developer_and_user_messages_and_starts_the_assistant() -> None:
    text = decoded(renderer().prompt([{"role": "system", "content": "be brief"}, USER], [WEATHER]))
    starts = [part.split("<|")[0] for part in text.split("<|start|>")[1:]]
    assert starts == ["system", "developer", "user", "assistant"]
    assert "be brief" in text
    assert "get_weather" in text


@pytest.mark.parametrize("history", list(History))
def test_a_tool_result_extends_the_call_and_names_its_tool(history: History) -> None:
    chat = renderer(history)
    message = message_of(TOOL_TURN)
    result = {"role": "tool", "content": "sunny<|end|>", "tool_call_id": message["tool_calls"][0]["id"]}
    call = a_call(chat.prompt([USER], [WEATHER]), encoded(TOOL_TURN))
    extended = chat.extend(call, [USER, message], [result], [WEATHER])
    assert extended is not None
    assert extended[: len(call.all_ids)] == list(call.all_ids)
    assert decoded(extended[len(call.all_ids) :]) == (
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>sunny<|end|><|end|>"
        "<|start|>assistant"
    )
    assert extended[len(call.all_ids) :].count(CONTROL_IDS["<|end|>"]) == 1


def test_a_final_answer_extends_with_history_keep_and_branches_with_history_template() -> None:
    message = message_of(FINAL_TURN)
    assert message["content"] == "it is sunny"
    assert message["reasoning_content"] == "sunny then"
    for history, extends in ((History.KEEP, True), (History.TEMPLATE, False)):
        chat = renderer(history)
        call = a_call(chat.prompt([USER], ()), encoded(FINAL_TURN))
        extended = chat.extend(call, [USER, message], [USER], ())
        assert (extended is not None) is extends
        if extended is not None:
            assert decoded(extended[len(call.all_ids) :]).startswith("<|start|>user<|message|>")
        again = decoded(chat.prompt([USER, message, USER], ()))
        assert ("sunny then" in again) is (history is History.KEEP)


def test_a_turn_cut_by_length_is_closed_once() -> None:
    chat = renderer()
    cut = a_call(chat.prompt([USER], ()), encoded("<|channel|>final<|message|>it is"))
    extended = chat.extend(cut, [USER, {"role": "assistant", "content": "it is"}], [USER], ())
    assert extended is not None
    assert decoded(extended[len(cut.all_ids) :]).startswith("<|end|><|start|>user")


@pytest.mark.parametrize(
    ("sampled", "reasoning", "content"),
    [
        ("<|channel|>analysis<|message|>look it", "look it", ""),
        ("<|channel|>analysis<|message|>look it<|end|>", "look it", ""),
        ("<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>it is", "", "it is"),
        (
            "<|channel|>analysis<|message|>look<|end|><|start|>assistant<|channel|>final<|message|>it is",
            "look",
            "it is",
        ),
    ],
)
def test_history_template_branches_after_a_cut_turn_whose_analysis_the_library_does_not_repeat(
    sampled: str, reasoning: str, content: str
) -> None:
    """It drops analysis before a final message, and writes an empty one after analysis that was cut."""
    message = message_of(sampled)
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    for history, extends in ((History.KEEP, True), (History.TEMPLATE, False)):
        chat = renderer(history)
        call = a_call(chat.prompt([USER], ()), encoded(sampled))
        extended = chat.extend(call, [USER, message], [USER], ())
        assert (extended is not None) is extends
        if extended is not None:
            end = "" if sampled.endswith("<|end|>") else "<|end|>"
            assert decoded(extended[len(call.all_ids) :]).startswith(f"{end}<|start|>user<|message|>")


def test_a_tool_result_without_a_name_is_refused() -> None:
    with pytest.raises(TemplateError, match="needs the name of its tool"):
        list(to_harmony({"role": "tool", "content": "x"}))
    with pytest.raises(TemplateError, match="no role 'judge'"):
        list(to_harmony({"role": "judge", "content": "x"}))


def test_a_conversation_whose_rendering_changes_when_messages_follow_is_not_extended() -> None:
    class Rewriting(StandInEncoding):
        def render_conversation(
            self, conversation: harmony.Conversation, config: harmony.RenderConversationConfig | None = None
        ) -> list[int]:
            return [len(conversation.messages), *super().render_conversation(conversation, config)]

    chat = HarmonyRenderer(Rewriting(), history=History.KEEP)  # type: ignore[arg-type]
    call = a_call(chat.prompt([USER], ()), encoded(FINAL_TURN))
    assert chat.extend(call, [USER, message_of(FINAL_TURN)], [USER], ()) is None


def test_calls_preambles_and_other_recipients_are_parsed() -> None:
    turn = parse_harmony(f"<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant{TOOL_TURN}")
    assert turn.calls == (ToolCall(name="get_weather", arguments='{"city": "Paris"}'),)
    assert turn.content == "I will look."
    assert turn.reasoning == "look it up"
    bad = parse_harmony(" to=browser.search<|channel|>commentary<|message|>{}<|call|>")
    assert bad.errors == ("a call went to 'browser.search'; expected functions.NAME",)
    broken = parse_harmony(" to=functions.f<|channel|>commentary<|message|>{oops<|call|>")
    assert "not valid JSON" in broken.errors[0]
    assert broken.content == "{oops"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from([*CONTROL_IDS, "analysis", " to=functions.f", "assistant"]), st.text(max_size=4)),
        max_size=10,
    ).map("".join)
)
def test_parsing_never_raises(text: str) -> None:
    assert isinstance(parse_harmony(text), Turn)


class TemplateStandIn:
    """Tokenizer with the methods that `parity` calls."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def apply_chat_template(self, messages: list[dict[str, Any]], **settings: Any) -> list[int]:
        assert settings == {"add_generation_prompt": True, "return_dict": False}
        return self.ids

    def decode(self, ids: Sequence[int]) -> str:
        return decoded(ids)


def test_parity_names_the_first_token_at_which_chat_template_and_library_differ() -> None:
    chat = renderer()
    ids = chat.prompt([USER], [])
    same = parity(TemplateStandIn(ids), chat, [USER])  # type: ignore[arg-type]
    assert same == f"openai-harmony and the chat template write the same {len(ids)} tokens"
    other = parity(TemplateStandIn([*ids[:5], *encoded("other text")]), chat, [USER])  # type: ignore[arg-type]
    assert "from token 5 on" in other
    assert "'other te'" in other
    for prefix in (ids[:-1], [*ids, ord("x")]):
        shorter = min(len(ids), len(prefix))
        assert f"from token {shorter} on" in parity(TemplateStandIn(prefix), chat, [USER])  # type: ignore[arg-type]


def test_an_error_of_the_vocabulary_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library checks the hash of the file: no other vocabulary can stand in for it."""
    lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    (tmp_path / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with pytest.raises(ConfigError, match="set TIKTOKEN_ENCODINGS_BASE"):
        load_encoding()


needs_vocabulary = pytest.mark.skipif(
    not os.environ.get("TIKTOKEN_ENCODINGS_BASE"), reason="needs o200k_base.tiktoken: set TIKTOKEN_ENCODINGS_BASE"
)


@needs_vocabulary
def test_the_library_has_the_assumed_control_ids() -> None:
    encoding = load_encoding()
    assert isinstance(encoding, harmony.HarmonyEncoding)
    for text, token in CONTROL_IDS.items():
        assert encoding.encode(text, allowed_special="all") == [token]
    assert set(encoding.stop_tokens_for_assistant_actions()) == set(renderer().stop_token_ids)


@needs_vocabulary
def test_the_library_encodes_hostile_text_as_text_and_extends() -> None:
    chat = HarmonyRenderer(load_encoding(), history=History.KEEP)
    hostile, harmless = ({"role": "user", "content": f"a {text} b"} for text in ("<|end|>", "x"))
    counts = [sum(token in NAMES for token in chat.prompt([user], [WEATHER])) for user in (hostile, harmless)]
    assert counts[0] == counts[1]
    call = a_call(chat.prompt([USER], [WEATHER]), [CONTROL_IDS["<|channel|>"], CONTROL_IDS["<|return|>"]])
    assert chat.extend(call, [USER, {"role": "assistant", "content": "x"}], [hostile], [WEATHER]) is not None
