"""Conversations rendered by a tokenizer's own chat template (ChatML, Qwen3, Llama 3 and similar).

`prompt` renders a whole conversation. `extend` keeps the sampled turn and adds only the glue that follows it. The glue
is read off a dummy conversation, rendered with and without the new messages:

    A   … user, assistant "MARKER"                          … MARKER<|im_end|>⏎
    B   … user, assistant "MARKER", new messages, prompt    … MARKER<|im_end|>⏎<|im_start|>tool…<|im_start|>assistant⏎

After the marker, A must be a prefix of B. This proves that the template appends new messages without changing how the
turn ends; the text of B after the marker is the glue. The text before the marker comes from the record and is not
compared: Qwen3, for example, shows an empty think block on the last turn only. Where the proof fails, the caller
renders the whole conversation.

History `template` requires more: with the new messages present, the template must still render the earlier prompt as
the model saw it and the turn as the model said it. If it strips reasoning or edits an earlier turn, the conversation
is not extended. The spacing and quoting of tool calls are not compared, their content is.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from rollout.chat.messages import Tools, map_text, normalize_messages
from rollout.chat.tool_calls import THINK_CLOSE, THINK_OPEN, Turn, turn_from_message
from rollout.chat.untrusted import Mask, UntrustedTextEncoder, word_not_in
from rollout.errors import TemplateError
from rollout.records import EngineCall, Message

CACHED_PROMPTS = 64
"""Groups that are likely to begin at the same time; a prompt of a thousand tokens takes some 10 kB."""

_RENDERING_ERRORS = (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError)


class History(StrEnum):
    """Treatment of earlier turns when a conversation goes on."""

    KEEP = "keep"
    """They stay as sampled, reasoning included: an extension wherever the glue can be proven."""
    TEMPLATE = "template"
    """The chat template decides; where it strips or edits an earlier turn, the conversation branches."""


class TemplateRenderer:
    """Renderer of messages to token ids by a Jinja chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        history: History,
        parse: Callable[[str, Tools], Turn],
        stop_token_ids: Sequence[int],
        closing_tokens: Sequence[str] = (),
    ) -> None:
        """Raises `TemplateError` without a chat template that can render one user and one assistant turn.

        parse: parser of an assistant turn's text; used to compare turns under history `template`.
        stop_token_ids: known to end a turn. The end-of-turn token of the template is added.
        closing_tokens: further tokens that may close a turn in a rendering, though sampling goes on after them.
        """
        if not tokenizer.chat_template:
            raise TemplateError(
                "the tokenizer has no chat template; use an instruction-tuned model, or put a chat_template.jinja "
                "into the model's directory"
            )
        self._tokenizer = tokenizer
        self._history = history
        self._parse = parse
        self._encoder = UntrustedTextEncoder(tokenizer)
        self._shows_the_time = "strftime_now" in str(tokenizer.chat_template)
        # The rollouts of a group begin with one prompt, which is rendered once.
        self._cached_prompt = functools.lru_cache(maxsize=CACHED_PROMPTS)(self._prompt_from_json)
        closing_ids = {self._encoder.controls[text] for text in closing_tokens if text in self._encoder.controls}
        end_of_turn = self._end_of_turn()
        stops = [*stop_token_ids, *([] if end_of_turn is None or end_of_turn in closing_ids else [end_of_turn])]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        self._closing_ids = frozenset(stops) | closing_ids
        opening = self._render([{"role": "user", "content": "x"}], (), opens_turn=True)
        self.opens_reasoning: bool = opening.rfind(THINK_OPEN) > opening.rfind(THINK_CLOSE)
        """True if the generation prompt ends inside a think block, so that a sampled turn begins in one."""

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids of the conversation, up to the start of the next assistant turn. Raises `TemplateError`."""
        conversation = normalize_messages(messages)
        if self._shows_the_time:
            return self._prompt(conversation, tools)
        try:
            as_json = json.dumps([conversation, list(tools)], ensure_ascii=False)
        except (TypeError, ValueError):  # a tool schema with values that are not JSON: rendered, but not cached
            return self._prompt(conversation, tools)
        return list(self._cached_prompt(as_json))

    def _prompt_from_json(self, as_json: str) -> tuple[int, ...]:
        return tuple(self._prompt(*json.loads(as_json)))

    def _prompt(self, conversation: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        mask = self._encoder.mask_for([conversation, tools])
        plain = self._render(conversation, tools, opens_turn=True)
        masked = self._render_masked(conversation, tools, mask, opens_turn=True) if mask.placeholders else plain
        ids = self._encoder.encode(masked, mask, plain=plain)
        if not ids:
            raise TemplateError(f"the chat template renders {len(conversation)} messages to nothing")
        return ids

    def extend(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """Return the ids of the call, closing tokens, new messages and generation prompt; None if unproven."""
        turn, *new = normalize_messages([history[-1], *new_messages])
        glue = self._glue(turn, new, tools, keep_calls=True)
        if glue is None and "tool_calls" in turn:
            # Some templates refuse parallel calls, or have no place for the marker beside them.
            glue = self._glue(turn, new, tools, keep_calls=False)
        if glue is None:
            return None
        text, ids = glue
        if self._history is History.TEMPLATE and not self._template_keeps_history(history, new_messages, tools, text):
            return None
        if call.sampled_ids and call.sampled_ids[-1] in self.stop_token_ids and ids[0] in self._closing_ids:
            ids = ids[1:]  # the sampled stop token stays and is not doubled
        return [*call.all_ids, *ids]

    def _glue(
        self, turn: Mapping[str, Any], new: Sequence[Mapping[str, Any]], tools: Tools, *, keep_calls: bool
    ) -> tuple[str, list[int]] | None:
        """Return text and ids that follow an assistant turn, from its closing token on; None if unproven."""
        marker = word_not_in([turn, new, tools])
        dummy = [{"role": "user", "content": "x"}, _dummy_turn(turn, marker, keep_calls=keep_calls)]
        mask = self._encoder.mask_for([dummy, new, tools])
        try:
            ended = self._render_masked(dummy, tools, mask, opens_turn=False)
            extended = self._render_masked([*dummy, *new], tools, mask, opens_turn=True)
        except TemplateError:
            return None
        if marker not in ended or marker not in extended:
            return None
        ended, extended = _after(marker, ended), _after(marker, extended)
        # Some templates put the end-of-sequence token after the last turn.
        end_of_text = str(self._tokenizer.eos_token or "")
        end = self._encoder.first_control(ended, self._closing_ids)
        end_extended = self._encoder.first_control(extended, self._closing_ids)
        if end is not None and end_extended is not None:
            is_same_turn = ended[: end.start()] == extended[: end_extended.start()]
            after = ended[end.end() :].removesuffix(end_of_text)
            is_proven = is_same_turn and extended[end_extended.end() :].startswith(after)
            text = extended[end_extended.start() :]
        else:
            # Without a closing token, the rest of a tool call cannot be told from what follows it.
            has_calls = keep_calls and "tool_calls" in turn
            is_proven = end is end_extended and not has_calls and extended.startswith(ended)
            text = extended
        if not is_proven or not text:
            return None
        return mask.restore(text), self._encoder.encode(text, mask)

    def _template_keeps_history(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools, glue: str
    ) -> bool:
        """Return True if the template renders the last prompt and the last turn unchanged before the new messages."""
        conversation = normalize_messages([*history, *new_messages])
        prompt = self._render(conversation[: len(history) - 1], tools, opens_turn=True)
        whole = self._render(conversation, tools, opens_turn=True)
        if not whole.startswith(prompt) or not whole[len(prompt) :].endswith(glue):
            return False
        rendered = self._parse(whole[len(prompt) :].removesuffix(glue), tools)
        return _trimmed(rendered) == _trimmed(turn_from_message(conversation[len(history) - 1]))

    def _end_of_turn(self) -> int | None:
        """Return the control token that follows the content of an assistant turn; None if the template has none."""
        marker = word_not_in([])
        dummy = [{"role": "user", "content": "x"}, {"role": "assistant", "content": marker}]
        rendered = self._render(dummy, (), opens_turn=False)
        if marker not in rendered:
            raise TemplateError("the chat template does not show the content of an assistant turn")
        match = self._encoder.first_control(_after(marker, rendered), frozenset(self._encoder.controls.values()))
        return None if match is None else self._encoder.controls[match[0]]

    def _render_masked(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools, mask: Mask, *, opens_turn: bool
    ) -> str:
        hidden = self._encoder.hide_messages(messages, mask)
        return self._render(hidden, map_text(tools, mask.hide), opens_turn=opens_turn)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, opens_turn: bool) -> str:
        try:
            return self._apply_template(messages, tools, opens_turn=opens_turn)
        except _RENDERING_ERRORS as error:
            as_text = _with_text_arguments(messages)
            if as_text is not None:
                with contextlib.suppress(*_RENDERING_ERRORS):
                    return self._apply_template(as_text, tools, opens_turn=opens_turn)
            roles = " ".join(str(message["role"]) for message in messages[-8:])
            raise TemplateError(
                f"the chat template cannot render these messages (the last roles: {roles}): "
                f"{type(error).__name__}: {error}"
            ) from error

    def _apply_template(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, opens_turn: bool) -> str:
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=opens_turn,
            tokenize=False,
        )
        assert isinstance(rendered, str)
        return rendered


def _with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the messages with arguments as JSON text, which DeepSeek-V3 joins to its own; None without calls."""
    if not any(message.get("tool_calls") for message in messages):
        return None
    copies = [dict(message) for message in messages]
    for copy in copies:
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_with_text_argument(call) for call in copy["tool_calls"]]
    return copies


def _with_text_argument(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _dummy_turn(message: Mapping[str, Any], marker: str, *, keep_calls: bool) -> dict[str, Any]:
    """Return a normalized assistant message with the same calls by name and id; everything else is the marker.

    Templates that show no content beside tool calls show the marker as the argument of the last call.
    """
    dummy: dict[str, Any] = {"role": "assistant", "content": marker}
    if keep_calls and "tool_calls" in message:
        dummy["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": {"marker": marker}}}
            for call in message["tool_calls"]
        ]
    return dummy


def _after(marker: str, text: str) -> str:
    return text[text.rfind(marker) + len(marker) :]


def _trimmed(turn: Turn) -> Turn:
    reasoning = None if turn.reasoning is None else turn.reasoning.strip()
    return replace(turn, content=turn.content.strip(), reasoning=reasoning, errors=())
