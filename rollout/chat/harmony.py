"""Conversations with gpt-oss, rendered by the `openai-harmony` library.

The library encodes all message text as text, so a literal `<|end|>` in a tool result does not end a message. The ids
that follow a sampled turn are found as for chat templates (`rollout/chat/template.py`).

History `keep`: analysis stays, and a sampled `<|return|>` stays where it was sampled.
History `template`: as by the library's default, analysis before a final answer is dropped and its `<|return|>` becomes
`<|end|>`. Both change sampled tokens, so a conversation branches after each final answer.

The library downloads the vocabulary `o200k_base.tiktoken` at first use. Without a network, put the file into a
directory and set TIKTOKEN_ENCODINGS_BASE to it (the library checks the hash of the file).

Not covered: the built-in browser and python tools, and calls to recipients other than `functions.*`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import openai_harmony as harmony
from transformers import PreTrainedTokenizerBase

from lockstep.rollout.chat.messages import Tools, normalize_messages
from lockstep.rollout.chat.template import History
from lockstep.rollout.chat.tool_calls import HARMONY_STOPS, ToolCall, Turn, read_arguments
from lockstep.rollout.chat.untrusted import word_not_in
from lockstep.rollout.errors import ConfigError, TemplateError
from lockstep.rollout.records import EngineCall, Message, PromptIds

CONTROL_IDS: Mapping[str, int] = {
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
"""Control tokens of the o200k_harmony encoding. A tokenizer with these ids is that of gpt-oss."""

_CALL_RECIPIENT = "functions."


def load_encoding() -> harmony.HarmonyEncoding:
    """Load the gpt-oss encoding. Raises `ConfigError` if its vocabulary is neither cached nor can be downloaded."""
    try:
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except harmony.HarmonyError as error:
        raise ConfigError(
            f"openai-harmony cannot load the gpt-oss vocabulary ({error}); connect to the network once, or put "
            "o200k_base.tiktoken into a directory and set TIKTOKEN_ENCODINGS_BASE to it"
        ) from error


class HarmonyRenderer:
    """Renderer of messages to token ids by the `openai-harmony` library."""

    def __init__(
        self, encoding: harmony.HarmonyEncoding, *, history: History, stop_token_ids: Sequence[int] = ()
    ) -> None:
        own_stops = [CONTROL_IDS[text] for text in HARMONY_STOPS]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own_stops, *stop_token_ids]))
        self._encoding = encoding
        self._history = history
        self._config = harmony.RenderConversationConfig(auto_drop_analysis=history is History.TEMPLATE)

    def prompt(self, messages: Sequence[Message], tools: Tools) -> PromptIds:
        return PromptIds(self._render(normalize_messages(messages), tools, opens_turn=True))

    def extend(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools
    ) -> PromptIds | None:
        _, *new = normalize_messages([history[-1], *new_messages])
        glue = self._glue(new, tools)
        if glue is None:
            return None
        if self._history is History.TEMPLATE and not self._library_keeps_history(call, history, new_messages, tools):
            return None
        is_closed = bool(call.sampled_ids) and call.sampled_ids[-1] in (*self.stop_token_ids, CONTROL_IDS["<|end|>"])
        closing = [] if is_closed else [CONTROL_IDS["<|end|>"]]
        return PromptIds([*call.all_ids, *closing, *glue])

    def turn(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids of the assistant turn that ends these messages; see `Chat.turn`."""
        conversation = normalize_messages(messages)
        prompt = self._render(conversation[:-1], tools, opens_turn=True)
        whole = self._render(conversation, tools)
        turn = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt or not turn or len(conversation[-1].get("tool_calls", ())) > 1:
            raise TemplateError(
                f"message {len(conversation) - 1}: Harmony cannot write this turn as one that was sampled; expected a "
                "final message or one tool call"
            )
        if turn[-1] == CONTROL_IDS["<|end|>"]:  # sampled, the last message of a turn ends in another way
            turn[-1] = CONTROL_IDS["<|return|>"]
        if turn[-1] not in self.stop_token_ids:
            raise TemplateError(f"message {len(conversation) - 1}: the rendered turn ends with no stop token")
        return turn

    def _glue(self, new: Sequence[Mapping[str, Any]], tools: Tools) -> list[int] | None:
        """Return the ids of new messages and of the start of the next turn, after a closed one; None if unproven."""
        marker = {"role": "assistant", "content": word_not_in([new, tools])}
        dummy = [{"role": "user", "content": "x"}, marker]
        dummy_ids = self._render(dummy, tools)
        extended_ids = self._render([*dummy, *new], tools, opens_turn=True)
        return extended_ids[len(dummy_ids) :] if extended_ids[: len(dummy_ids)] == dummy_ids else None

    def _library_keeps_history(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools
    ) -> bool:
        """Return True if the library renders the last prompt and the last turn unchanged before the new messages."""
        if call.sampled_ids[-1:] == (CONTROL_IDS["<|return|>"],):
            return False  # rendered as <|end|> once messages follow
        conversation = normalize_messages([*history, *new_messages])
        *before, turn = conversation[: len(history)]
        prompt = self._render(before, tools, opens_turn=True)
        with_turn = self._render([*before, turn], tools)
        whole = self._render(conversation, tools, opens_turn=True)
        reasoning = turn.pop("reasoning_content", None)
        if reasoning is not None and with_turn == self._render([*before, turn], tools):
            return False  # the analysis is dropped
        if reasoning is not None and not turn["content"] and "tool_calls" not in turn:
            return False  # the turn was cut in its analysis, after which an empty final message is rendered
        return with_turn[: len(prompt)] == prompt and whole[: len(with_turn)] == with_turn

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, opens_turn: bool = False) -> list[int]:
        conversation = _conversation(messages, tools)
        try:
            if not opens_turn:
                return self._encoding.render_conversation(conversation, config=self._config)
            return self._encoding.render_conversation_for_completion(
                conversation, harmony.Role.ASSISTANT, config=self._config
            )
        except harmony.HarmonyError as error:
            raise TemplateError(f"openai-harmony cannot render these messages: {error}") from error


def _conversation(messages: Sequence[Mapping[str, Any]], tools: Tools) -> harmony.Conversation:
    system = harmony.SystemContent.new().with_reasoning_effort(harmony.ReasoningEffort.MEDIUM)
    harmony_messages = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
    instructions = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    if instructions or tools:
        developer = harmony.DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions("\n\n".join(instructions))
        if tools:
            developer = developer.with_function_tools([_tool_description(tool) for tool in tools])
        harmony_messages.append(harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer))
    for message in messages:
        harmony_messages.extend(to_harmony(message))
    return harmony.Conversation.from_messages(harmony_messages)


def to_harmony(message: Mapping[str, Any]) -> Iterable[harmony.Message]:
    """Yield the Harmony messages of a normalized message; none for a system message, which is part of the developer's.

    Raises `TemplateError`: the role is unknown, or a tool result has no name.
    """
    role, content = message["role"], message["content"]
    if role == "user":
        yield harmony.Message.from_role_and_content(harmony.Role.USER, content)
    elif role == "tool":
        if not message.get("name"):
            raise TemplateError(
                "a tool result needs the name of its tool: set `name`, or a `tool_call_id` that an earlier call has"
            )
        author = harmony.Author.new(harmony.Role.TOOL, _CALL_RECIPIENT + message["name"])
        result = harmony.Message.from_author_and_content(author, content)
        yield result.with_channel("commentary").with_recipient("assistant")
    elif role == "assistant":
        yield from _assistant_messages(message)
    elif role not in ("system", "developer"):
        raise TemplateError(f"Harmony has no role {role!r}; expected system, developer, user, assistant or tool")


def _assistant_messages(message: Mapping[str, Any]) -> Iterable[harmony.Message]:
    calls = message.get("tool_calls", ())
    if message.get("reasoning_content"):
        yield _assistant(message["reasoning_content"], channel="analysis")
    if message["content"] or not calls:
        yield _assistant(message["content"], channel="commentary" if calls else "final")
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        request = _assistant(text, channel="commentary").with_recipient(_CALL_RECIPIENT + function["name"])
        yield request.with_content_type("<|constrain|>json")


def _assistant(text: str, *, channel: str) -> harmony.Message:
    return harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)


def _tool_description(tool: Mapping[str, Any]) -> harmony.ToolDescription:
    function = tool.get("function", tool)
    return harmony.ToolDescription.new(
        function["name"], function.get("description", ""), parameters=function.get("parameters")
    )


_BODY = re.compile(r"(?P<header>.*?)<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def parse_harmony(text: str) -> Turn:
    """Parse a turn that was sampled after `<|start|>assistant`. Never raises.

    The library's own parser is not used: it refuses malformed turns, which models in training write.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    is_reasoning = False
    for part in text.split("<|start|>"):
        match = _BODY.match(part)
        if match is None:
            content.append(part)
            continue
        header, body = match["header"], match["body"]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_reasoning = recipient is None and channel is not None and channel[1] == "analysis"
        if recipient is not None:
            result = _read_call(recipient[1], body)
            if isinstance(result, ToolCall):
                calls.append(result)
            else:
                errors.append(result)
                content.append(body)
        elif is_reasoning:
            reasoning.append(body)
        else:
            content.append(body)
    return Turn(
        content="\n".join(filter(None, content)),
        reasoning="\n".join(reasoning) if reasoning else None,
        calls=tuple(calls),
        errors=tuple(errors),
        ends_in_reasoning=is_reasoning,
    )


def _read_call(recipient: str, body: str) -> ToolCall | str:
    name = recipient.removeprefix(_CALL_RECIPIENT)
    if name == recipient or not name:
        return f"a call went to {recipient!r}; expected functions.NAME"
    return read_arguments(name, body)


def parity(tokenizer: PreTrainedTokenizerBase, renderer: HarmonyRenderer, messages: Sequence[Message]) -> str:
    """Compare the tokenizer's chat template with the library on a prompt; say in a sentence where they differ first."""
    library = renderer.prompt(messages, ())
    conversation: Any = [dict(message) for message in messages]
    template: Any = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    pairs = enumerate(itertools.zip_longest(library, template))
    position = next((index for index, (left, right) in pairs if left != right), None)
    if position is None:
        return f"openai-harmony and the chat template write the same {len(library)} tokens"
    texts = [tokenizer.decode(ids[position : position + 8]) for ids in (library, template)]
    return (
        f"from token {position} on openai-harmony writes {texts[0]!r} and the chat template {texts[1]!r}; prompts of "
        "training are the library's"
    )
