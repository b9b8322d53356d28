"""Conversations through a tokenizer's own chat template (ChatML, Qwen3, Llama 3 and their like).

`prompt` renders a whole conversation. `extend` does not: what was sampled stays as it is, and only the glue that
follows it is made. The glue is read off a dummy conversation, rendered with and without the new messages:

    A   … user, assistant "MARKER"                          … MARKER<|im_end|>⏎
    B   … user, assistant "MARKER", new messages, prompt    … MARKER<|im_end|>⏎<|im_start|>tool…<|im_start|>assistant⏎

Behind the marker, A must be a prefix of B. That proves that the template puts new messages after a turn without
touching how the turn ends; what B has behind the marker is the glue. Only the text behind the marker is compared,
because what is before it comes from the record: Qwen3, for one, shows an empty think block on the last turn only, so
that A and B differ where it does not matter. Where nothing can be proven, the caller renders the whole conversation.

History `template` asks more: the template must also show the earlier turns, when the new messages are there, as they
were shown to the model and as the model said them. If it strips reasoning or edits an earlier turn, there is no
extension. How a tool call is spaced or quoted is not compared; what it says is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from rollout.chat.messages import normalised, with_marker
from rollout.chat.tool_calls import THINK_CLOSE, THINK_OPEN, Turn, turn_from_message
from rollout.chat.untrusted import Mask, UntrustedTextEncoder, word_not_in
from rollout.errors import TemplateError
from rollout.records import EngineCall, Message

Tools = Sequence[Mapping[str, Any]]

PROMPTS_REMEMBERED = 64
"""Groups that are likely to begin at the same time; a prompt of a thousand tokens takes some 10 kB."""


class History(StrEnum):
    """What happens to earlier turns when a conversation goes on."""

    KEEP = "keep"
    """They stay as they were sampled, reasoning included: always an extension where the glue can be proven."""
    TEMPLATE = "template"
    """The chat template decides; where it strips or edits an earlier turn, the conversation branches."""


@dataclass(frozen=True, slots=True)
class _Glue:
    """What follows an assistant turn: its closing token, the new messages, the generation prompt."""

    text: str
    ids: list[int]


class TemplateRenderer:
    """Messages → token ids by a jinja chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        history: History,
        parse: Callable[[str, Tools], Turn],
        stop_token_ids: Sequence[int],
        closing_tokens: Sequence[str] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            parse: reads an assistant turn as text; used to compare turns under history `template`.
            stop_token_ids: known to end a turn. The end-of-turn token of the template is added.
            closing_tokens: further tokens that may close a turn in a rendering, though sampling goes on after them.
            template_kwargs: passed to the template, for example `{"enable_thinking": False}`.

        Raises:
            TemplateError: the tokenizer has no chat template, or it cannot render one user and one assistant turn.
        """
        if not tokenizer.chat_template:
            raise TemplateError(
                "the tokenizer has no chat template; use an instruction-tuned model, or put a chat_template.jinja "
                "into the model's directory"
            )
        self._tokenizer = tokenizer
        self._history = history
        self._parse = parse
        self._kwargs = dict(template_kwargs or {})
        self._encoder = UntrustedTextEncoder(tokenizer)
        self._shows_the_time = "strftime_now" in str(tokenizer.chat_template)
        # The rollouts of a group begin with one prompt, which is rendered once.
        self._remembered = functools.lru_cache(maxsize=PROMPTS_REMEMBERED)(self._prompt_as_asked)
        closing_ids = {self._encoder.controls[text] for text in closing_tokens if text in self._encoder.controls}
        end_of_turn = self._end_of_turn()
        stops = [*stop_token_ids, *([] if end_of_turn is None or end_of_turn in closing_ids else [end_of_turn])]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        self._closing_ids = frozenset(stops) | closing_ids
        opening = self._render([{"role": "user", "content": "x"}], (), generation_prompt=True)
        self.opens_reasoning: bool = opening.rfind(THINK_OPEN) > opening.rfind(THINK_CLOSE)
        """Whether the generation prompt ends inside a think block, so that a sampled turn begins in one."""

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of the whole conversation, ready for the next assistant turn. Raises `TemplateError`."""
        conversation = normalised(messages)
        if self._shows_the_time:
            return self._prompt(conversation, tools)
        try:
            asked = json.dumps([conversation, list(tools)], ensure_ascii=False)
        except (TypeError, ValueError):  # a schema with values of its own kind: rendered, but not remembered
            return self._prompt(conversation, tools)
        return list(self._remembered(asked))

    def _prompt_as_asked(self, asked: str) -> tuple[int, ...]:
        return tuple(self._prompt(*json.loads(asked)))

    def _prompt(self, conversation: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        mask = self._encoder.mask_for([conversation, tools])
        plain = self._render(conversation, tools, generation_prompt=True)
        masked = self._render_masked(conversation, tools, mask, generation_prompt=True) if mask.placeholders else plain
        ids = self._encoder.encode(masked, mask, plain=plain)
        if not ids:
            raise TemplateError(f"the chat template renders {len(conversation)} messages to nothing")
        return ids

    def extend(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """Ids of the call followed by closing tokens, new messages and generation prompt; None if unproven."""
        turn, *new = normalised([history[-1], *new_messages])
        glue = self._glue(turn, new, tools, keep_calls=True)
        if glue is None and "tool_calls" in turn:
            # Some templates refuse parallel calls, or show them without a place for the marker.
            glue = self._glue(turn, new, tools, keep_calls=False)
        if glue is None:
            return None
        if self._history is History.TEMPLATE and not self._template_keeps_history(history, new_messages, tools, glue):
            return None
        ids = glue.ids
        if call.sampled_ids and call.sampled_ids[-1] in self.stop_token_ids and ids[0] in self._closing_ids:
            ids = ids[1:]  # the turn's own stop token stays, and is never doubled
        return [*call.all_ids, *ids]

    def _glue(
        self, turn: Mapping[str, Any], new: Sequence[Mapping[str, Any]], tools: Tools, *, keep_calls: bool
    ) -> _Glue | None:
        """What follows an assistant turn, from its closing token on; None if unproven."""
        marker = word_not_in([turn, new, tools])
        dummy = [{"role": "user", "content": "x"}, with_marker(turn, marker, keep_calls=keep_calls)]
        mask = self._encoder.mask_for([dummy, new, tools])
        try:
            ended = self._render_masked(dummy, tools, mask, generation_prompt=False)
            going_on = self._render_masked([*dummy, *new], tools, mask, generation_prompt=True)
        except TemplateError:
            return None
        if marker not in ended or marker not in going_on:
            return None
        ended, going_on = _behind(marker, ended), _behind(marker, going_on)
        # Some templates put the end-of-sequence token behind a conversation that does not go on.
        end_of_text = str(self._tokenizer.eos_token or "")
        end = self._encoder.first_control(ended, self._closing_ids)
        end_going_on = self._encoder.first_control(going_on, self._closing_ids)
        if end is not None and end_going_on is not None:
            is_same_turn = ended[: end.start()] == going_on[: end_going_on.start()]
            after = ended[end.end() :].removesuffix(end_of_text)
            is_proven = is_same_turn and going_on[end_going_on.end() :].startswith(after)
            text = going_on[end_going_on.start() :]
        else:
            # Without a closing token, the rest of a tool call cannot be told from what follows it.
            has_calls = keep_calls and "tool_calls" in turn
            is_proven = end is end_going_on and not has_calls and going_on.startswith(ended)
            text = going_on
        if not is_proven or not text:
            return None
        return _Glue(text=mask.restore(text), ids=self._encoder.encode(text, mask))

    def _template_keeps_history(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools, glue: _Glue
    ) -> bool:
        """Whether the template, with the new messages there, shows the last prompt and the last turn unchanged."""
        conversation = normalised([*history, *new_messages])
        shown = self._render(conversation[: len(history) - 1], tools, generation_prompt=True)
        whole = self._render(conversation, tools, generation_prompt=True)
        if not whole.startswith(shown) or not whole[len(shown) :].endswith(glue.text):
            return False
        rendered = self._parse(whole[len(shown) :].removesuffix(glue.text), tools)
        return _trimmed(rendered) == _trimmed(turn_from_message(conversation[len(history) - 1]))

    def _end_of_turn(self) -> int | None:
        """The control token that follows the content of an assistant turn, if the template has one."""
        marker = word_not_in([])
        dummy = [{"role": "user", "content": "x"}, {"role": "assistant", "content": marker}]
        rendered = self._render(dummy, (), generation_prompt=False)
        if marker not in rendered:
            raise TemplateError("the chat template does not show the content of an assistant turn")
        match = self._encoder.first_control(_behind(marker, rendered), frozenset(self._encoder.controls.values()))
        return None if match is None else self._encoder.controls[match[0]]

    def _render_masked(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools, mask: Mask, *, generation_prompt: bool
    ) -> str:
        return self._render(
            self._encoder.hide_messages(messages, mask),
            self._encoder.hide_tools(tools, mask),
            generation_prompt=generation_prompt,
        )

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, generation_prompt: bool) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            roles = " ".join(str(message["role"]) for message in messages[-8:])
            raise TemplateError(
                f"the chat template cannot render these messages (the last roles: {roles}): "
                f"{type(error).__name__}: {error}"
            ) from error
        assert isinstance(rendered, str)
        return rendered


def _behind(marker: str, text: str) -> str:
    return text[text.rfind(marker) + len(marker) :]


def _trimmed(turn: Turn) -> Turn:
    reasoning = None if turn.reasoning is None else turn.reasoning.strip()
    return replace(turn, content=turn.content.strip(), reasoning=reasoning, errors=())
