"""Conversations with gpt-oss, through the `openai-harmony` library.

The library renders; nothing here writes Harmony by hand. It encodes all message text as text, so a literal `<|end|>`
in a tool result is no end. What is added is the same promise as for chat templates: a sampled turn is never rendered
again, and what follows it is found by rendering a dummy conversation with and without the new messages.

History `keep`: analysis stays, and a sampled `<|return|>` stays where it was sampled.
History `template`: as the library does by default, analysis before a final answer is dropped and its `<|return|>`
becomes `<|end|>`; both change what was sampled, so a conversation branches after each final answer.

The library needs the vocabulary `o200k_base.tiktoken`, which it downloads at first use. Without a network, put the
file into a directory and name that in TIKTOKEN_ENCODINGS_BASE (the library checks its hash, so no other file will do).

Not covered: the built-in browser and python tools, and calls to recipients other than `functions.*`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import openai_harmony as harmony
from transformers import PreTrainedTokenizerBase

from rollout.chat.messages import normalised
from rollout.chat.template import History, Tools
from rollout.chat.tool_calls import ToolCall, Turn, read_arguments
from rollout.chat.untrusted import word_not_in
from rollout.errors import ConfigError, TemplateError
from rollout.records import EngineCall, Message

CONTROL_IDS: Mapping[str, int] = {
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
"""Control tokens of the o200k_harmony encoding. A tokenizer that has these ids is gpt-oss's."""

STOPS = ("<|return|>", "<|call|>")
"""What ends a turn. `<|end|>` does not: it closes a message, and a turn may hold several (analysis, then final)."""

_CALL_RECIPIENT = "functions."


class Encoding(Protocol):
    """The part of `openai_harmony.HarmonyEncoding` that is used."""

    def render_conversation(
        self, conversation: harmony.Conversation, config: harmony.RenderConversationConfig | None = None
    ) -> list[int]: ...

    def render_conversation_for_completion(
        self,
        conversation: harmony.Conversation,
        next_turn_role: harmony.Role,
        config: harmony.RenderConversationConfig | None = None,
    ) -> list[int]: ...


def load_encoding() -> Encoding:
    """The gpt-oss encoding. Raises `ConfigError` if its vocabulary is neither cached nor to be downloaded."""
    try:
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except harmony.HarmonyError as error:
        raise ConfigError(
            f"openai-harmony cannot load the gpt-oss vocabulary ({error}); connect to the network once, or put "
            "o200k_base.tiktoken into a directory and set TIKTOKEN_ENCODINGS_BASE to it"
        ) from error


class HarmonyRenderer:
    """Messages → token ids by the `openai-harmony` library."""

    def __init__(
        self,
        encoding: Encoding,
        *,
        history: History,
        stop_token_ids: Sequence[int] = (),
        reasoning_effort: str = "medium",
    ) -> None:
        """Raises `ConfigError` for a reasoning effort other than low, medium and high."""
        efforts = {effort.value.lower(): effort for effort in harmony.ReasoningEffort}
        if reasoning_effort not in efforts:
            raise ConfigError(f"reasoning_effort must be one of {', '.join(efforts)}; found {reasoning_effort!r}")
        own_stops = [CONTROL_IDS[text] for text in STOPS]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own_stops, *stop_token_ids]))
        self._encoding = encoding
        self._history = history
        self._effort = efforts[reasoning_effort]
        self._config = harmony.RenderConversationConfig(auto_drop_analysis=history is History.TEMPLATE)

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return self._for_completion(self._conversation(normalised(messages), tools))

    def extend(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        _, *new = normalised([history[-1], *new_messages])
        glue = self._glue(new, tools)
        if glue is None:
            return None
        if self._history is History.TEMPLATE and not self._library_keeps_history(call, history, new_messages, tools):
            return None
        is_closed = bool(call.sampled_ids) and call.sampled_ids[-1] in (*self.stop_token_ids, CONTROL_IDS["<|end|>"])
        closing = [] if is_closed else [CONTROL_IDS["<|end|>"]]
        return [*call.all_ids, *closing, *glue]

    def _glue(self, new: Sequence[Mapping[str, Any]], tools: Tools) -> list[int] | None:
        """Ids of new messages and of the start of the next turn, behind a closed message; None if unproven."""
        marker = {"role": "assistant", "content": word_not_in([new, tools])}
        dummy = [{"role": "user", "content": "x"}, marker]
        ended = self._rendered(self._conversation(dummy, tools))
        going_on = self._for_completion(self._conversation([*dummy, *new], tools))
        return going_on[len(ended) :] if going_on[: len(ended)] == ended else None

    def _library_keeps_history(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools
    ) -> bool:
        """Whether the library, with the new messages there, shows the last prompt and the last turn unchanged."""
        if call.sampled_ids[-1:] == (CONTROL_IDS["<|return|>"],):
            return False  # rendered as <|end|> once the conversation goes on
        conversation = normalised([*history, *new_messages])
        shown = self._for_completion(self._conversation(conversation[: len(history) - 1], tools))
        with_turn = self._rendered(self._conversation(conversation[: len(history)], tools))
        whole = self._for_completion(self._conversation(conversation, tools))
        return with_turn[: len(shown)] == shown and whole[: len(with_turn)] == with_turn

    def _for_completion(self, conversation: harmony.Conversation) -> list[int]:
        try:
            return self._encoding.render_conversation_for_completion(
                conversation, harmony.Role.ASSISTANT, config=self._config
            )
        except harmony.HarmonyError as error:
            raise TemplateError(f"openai-harmony cannot render these messages: {error}") from error

    def _rendered(self, conversation: harmony.Conversation) -> list[int]:
        try:
            return self._encoding.render_conversation(conversation, config=self._config)
        except harmony.HarmonyError as error:
            raise TemplateError(f"openai-harmony cannot render these messages: {error}") from error

    def _conversation(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> harmony.Conversation:
        system = harmony.SystemContent.new().with_reasoning_effort(self._effort)
        rendered = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
        instructions = [message["content"] for message in messages if message["role"] in ("system", "developer")]
        if instructions or tools:
            developer = harmony.DeveloperContent.new()
            if instructions:
                developer = developer.with_instructions("\n\n".join(instructions))
            if tools:
                developer = developer.with_function_tools([_tool_description(tool) for tool in tools])
            rendered.append(harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer))
        for message in messages:
            rendered.extend(to_harmony(message))
        return harmony.Conversation.from_messages(rendered)


def to_harmony(message: Mapping[str, Any]) -> Iterable[harmony.Message]:
    """The Harmony messages of one normalised message. A system message is none: it goes into the developer message."""
    role, content = message["role"], message["content"]
    if role == "user":
        yield harmony.Message.from_role_and_content(harmony.Role.USER, content)
    elif role == "tool":
        if not message.get("name"):
            raise TemplateError(
                "a tool result needs the name of its tool: set `name`, or a `tool_call_id` that an earlier call has"
            )
        author = harmony.Author.new(harmony.Role.TOOL, _CALL_RECIPIENT + message["name"])
        yield (
            harmony.Message.from_author_and_content(author, content)
            .with_channel("commentary")
            .with_recipient("assistant")
        )
    elif role == "assistant":
        yield from _assistant_messages(message)
    elif role not in ("system", "developer"):
        raise TemplateError(f"Harmony has no role {role!r}; expected system, developer, user, assistant or tool")


def _assistant_messages(message: Mapping[str, Any]) -> Iterable[harmony.Message]:
    calls = message.get("tool_calls", ())
    if message.get("reasoning_content"):
        yield _said(message["reasoning_content"]).with_channel("analysis")
    if message["content"] or not calls:
        yield _said(message["content"]).with_channel("commentary" if calls else "final")
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield (
            _said(text)
            .with_channel("commentary")
            .with_recipient(_CALL_RECIPIENT + function["name"])
            .with_content_type("<|constrain|>json")
        )


def _said(text: str) -> harmony.Message:
    return harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text)


def _tool_description(tool: Mapping[str, Any]) -> harmony.ToolDescription:
    function = tool.get("function", tool)
    return harmony.ToolDescription.new(
        function["name"], function.get("description", ""), parameters=function.get("parameters")
    )


_BODY = re.compile(r"(?P<header>.*?)<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def parse_harmony(text: str) -> Turn:
    """Read a turn that was sampled behind `<|start|>assistant`. Never raises.

    Reading is done here and not by the library, whose parser refuses what models that are still learning write.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    for part in text.split("<|start|>"):
        match = _BODY.match(part)
        if match is None:
            content.append(part)
            continue
        header, body = match["header"], match["body"]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            found = _call(recipient[1], body)
            if isinstance(found, ToolCall):
                calls.append(found)
            else:
                errors.append(found)
                content.append(body)
        elif channel is not None and channel[1] == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
    return Turn(
        content="\n".join(filter(None, content)),
        reasoning="\n".join(reasoning) if reasoning else None,
        calls=tuple(calls),
        errors=tuple(errors),
    )


def _call(recipient: str, body: str) -> ToolCall | str:
    name = recipient.removeprefix(_CALL_RECIPIENT)
    if name == recipient or not name:
        return f"a call went to {recipient!r}, which is no function; expected functions.NAME"
    return read_arguments(name, body)


def parity(tokenizer: PreTrainedTokenizerBase, renderer: HarmonyRenderer, messages: Sequence[Message]) -> str:
    """A sentence on whether the tokenizer's chat template writes a prompt as the library does, and if not, where."""
    library = renderer.prompt(messages, ())
    conversation: Any = [dict(message) for message in messages]
    template: Any = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    position = first_difference(template, library)
    if position is None:
        return f"openai-harmony and the chat template write the same {len(library)} tokens"
    shown = [tokenizer.decode(ids[position : position + 8]) for ids in (library, template)]
    return (
        f"from token {position} on openai-harmony writes {shown[0]!r} and the chat template {shown[1]!r}; prompts of "
        "training are the library's"
    )


def first_difference(tokenizer_ids: Sequence[int], library_ids: Sequence[int]) -> int | None:
    """Parity of two renderers of one conversation: the first position at which they differ, None if nowhere."""
    for position, (left, right) in enumerate(zip(tokenizer_ids, library_ids, strict=False)):
        if left != right:
            return position
    shorter = min(len(tokenizer_ids), len(library_ids))
    return None if len(tokenizer_ids) == len(library_ids) else shorter
