"""Conversations rendered by a tokenizer's own chat template (ChatML, Qwen3, Llama 3 and similar).

`prompt` renders a whole conversation. `extend` keeps the sampled turn and adds only the glue that follows it. The glue
is read off a dummy conversation, rendered with and without the new messages:

    A   … user, assistant "MARKER"                          … MARKER<|im_end|>⏎
    B   … user, assistant "MARKER", new messages, prompt    … MARKER<|im_end|>⏎<|im_start|>tool…<|im_start|>assistant⏎

After the marker, A must be a prefix of B. This proves that the template appends new messages without changing how the
turn ends; the text of B after the marker is the glue. The text before the marker comes from the record and is not
compared: Qwen3, for example, shows an empty think block on the last turn only.

A template may also move a new message to the front (system messages: DeepSeek-V3, Cohere2) or drop it (tool results:
Phi-3). So B is rendered once more with each new text between two words. The glue must have all words, and be the same
without them: then each new message stands in it, whole.

Where a proof fails, the caller renders the whole conversation. A message that the template drops from that, too, is
reported once in the log.

History `template` requires more: with the new messages present, the template must still render the earlier prompt as
the model saw it and the turn as the model said it. If it strips reasoning or edits an earlier turn, the conversation
is not extended. The spacing and quoting of tool calls are not compared, their content is. Reasoning that was cut by its
length limit is another turn than the closed reasoning of a template.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import jinja2
from transformers import PreTrainedTokenizerFast

from lockstep.rollout.chat.messages import Tools, map_text, normalize_messages
from lockstep.rollout.chat.tool_calls import THINK_CLOSE, THINK_OPEN, Turn
from lockstep.rollout.chat.untrusted import Mask, UntrustedTextEncoder, word_not_in
from lockstep.rollout.errors import TemplateError
from lockstep.rollout.records import EngineCall, Message, PromptIds

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing

log = logging.getLogger(__name__)

_QUESTION = {"role": "user", "content": "x"}
"""Message before the turn of a dummy conversation."""

CACHED_PROMPTS = 64
"""Groups that are likely to begin at the same time; a prompt of a thousand tokens takes some 10 kB."""

RENDERING_ERRORS = (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError)


class History(StrEnum):
    """Treatment of earlier turns when a conversation goes on."""

    KEEP = "keep"
    """They stay as sampled, reasoning included: an extension wherever the glue can be proven.

    Nothing is written into a turn. Reasoning that was cut by its length limit stays open: the end of the turn follows,
    without a `</think>` that the model did not sample."""
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
        read: Callable[[Sequence[int], Tools], Turn],
        stop_token_ids: Sequence[int],
        closing_tokens: Sequence[str] = (),
        images: ImageProcessing | None = None,
    ) -> None:
        """Raises `TemplateError` without a chat template that can render one user and one assistant turn.

        parse, read: parsers of an assistant turn's text and of its sampled ids; used under history `template`.
        stop_token_ids: known to end a turn. The end-of-turn token of the template is added.
        closing_tokens: further tokens that may close a turn in a rendering, though sampling goes on after them.
        images: those of a model that sees them, which messages name by digests.
        """
        if not tokenizer.chat_template:
            raise TemplateError(
                "the tokenizer has no chat template; use an instruction-tuned model, or put a chat_template.jinja "
                "into the model's directory"
            )
        self._tokenizer, self._images = tokenizer, images
        self._history = history
        self._parse, self._read = parse, read
        self._encoder = UntrustedTextEncoder(tokenizer)
        self._shows_the_time = "strftime_now" in str(tokenizer.chat_template)
        # The rollouts of a group begin with one prompt, which is rendered once.
        self._cached_prompt = functools.lru_cache(maxsize=CACHED_PROMPTS)(self._prompt_from_json)
        closing_ids = {self._encoder.controls[text] for text in closing_tokens if text in self._encoder.controls}
        self._roles_dropped: set[str] = set()
        end_of_turn, self._after_content = self._end_of_turn()
        stops = [*stop_token_ids, *([] if end_of_turn is None or end_of_turn in closing_ids else [end_of_turn])]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        self._closing_ids = frozenset(stops) | closing_ids
        opening = self._render([_QUESTION], (), opens_turn=True)
        self.opens_reasoning: bool = opening.rfind(THINK_OPEN) > opening.rfind(THINK_CLOSE)
        """True if the generation prompt ends inside a think block, so that a sampled turn begins in one."""

    def prompt(self, messages: Sequence[Message], tools: Tools) -> PromptIds:
        """Return the ids of the conversation, up to the start of the next assistant turn, and its images.

        Raises `TemplateError`.
        """
        conversation = self._normalized(messages)
        return self._with_images(self._rendered_prompt(conversation, tools), conversation)

    def _rendered_prompt(self, conversation: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        if self._shows_the_time:
            return self._prompt(conversation, tools)
        try:
            as_json = json.dumps([conversation, list(tools)], ensure_ascii=False)
        except (TypeError, ValueError):  # a tool schema with values that are not JSON: rendered, but not cached
            return self._prompt(conversation, tools)
        return list(self._cached_prompt(as_json))

    def _normalized(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return normalize_messages(messages, sees_images=self._images is not None)

    def _with_images(self, ids: list[int], messages: Sequence[Mapping[str, Any]]) -> PromptIds:
        """Return the ids of a rendering of these messages, with as many for each image as stand for it."""
        return PromptIds(ids) if self._images is None else self._images.expanded(ids, messages)

    def _prompt_from_json(self, as_json: str) -> tuple[int, ...]:
        return tuple(self._prompt(*json.loads(as_json)))

    def _prompt(self, conversation: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        mask = self._encoder.mask_for([conversation, tools])
        plain = self._render(conversation, tools, opens_turn=True)
        masked_text = self._render_masked(conversation, tools, mask, opens_turn=True) if mask.placeholders else plain
        ids = self._encoder.encode(masked_text, mask, plain=plain)
        if not ids:
            raise TemplateError(f"the chat template renders {len(conversation)} messages to nothing")
        return ids

    def turn(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids of the assistant turn that ends these messages; see `Chat.turn`.

        The prompt and the turn are encoded apart, since the model reads a finished prompt when it samples: a token
        across the boundary could not have been sampled.
        """
        conversation = self._normalized(messages)
        number, last = len(conversation) - 1, conversation[-1]
        mask = self._encoder.mask_for([conversation, tools])
        prompt = self._render_masked(conversation[:-1], tools, mask, opens_turn=True)
        whole = self._render_masked(conversation, tools, mask, opens_turn=False)
        if not whole.startswith(prompt):
            raise TemplateError(
                f"message {number}: the chat template renders this turn in another way than it opens one for sampling, "
                "so no rollout could have these tokens; give the turn as the model writes it (for example with "
                "reasoning_content), or set model.chat_template=<file.jinja>"
            )
        rest = whole[len(prompt) :]
        end = self._encoder.first_control(rest, frozenset(self.stop_token_ids))
        if end is None:
            raise TemplateError(
                f"message {number}: the chat template ends this turn with no token at which sampling stops; expected "
                "one such as <|im_end|>; set model.chat_template=<file.jinja>"
            )
        _refuse_hidden(mask.restore(rest[: end.start()]), last, number)
        return self._encoder.encode_continuation(rest[: end.end()], mask)

    def extend(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools
    ) -> PromptIds | None:
        """Return the ids of the call, closing tokens, new messages and generation prompt; None if unproven."""
        turn, *new = self._normalized([history[-1], *new_messages])
        glue = self._glue(call, turn, new, tools)
        if glue is None:
            return None
        text, ids, closes = glue
        if self._history is History.TEMPLATE and not self._template_keeps_history(
            call, history, new_messages, tools, text
        ):
            return None
        stop = call.sampled_ids[-1] if call.sampled_ids else None
        if stop in self.stop_token_ids and (ids[0] == stop or (closes and ids[0] in self._closing_ids)):
            ids = ids[1:]  # the sampled stop token stays and is not doubled
        all_ids, glue_ids = call.all_ids, self._with_images(ids, new)
        new_images = (image.shifted(len(all_ids)) for image in glue_ids.images)
        return PromptIds((*all_ids, *glue_ids), (*call.images, *new_images))

    def _glue(
        self, call: EngineCall, turn: Mapping[str, Any], new: Sequence[Mapping[str, Any]], tools: Tools
    ) -> tuple[str, list[int], bool] | None:
        """Return text and ids that follow an assistant turn, from its closing token on; None if unproven.

        The last value is True if they begin with a closing token. Otherwise a stop token may begin the next message:
        GLM-4.5 ends turns by `<|user|>` and `<|observation|>`.
        """
        marker = word_not_in([turn, new, tools])
        word = word_not_in([marker, turn, new, tools])
        between_words, num_words = _between_words(new, word)
        turn = _dummy_turn(turn, marker)
        mask = self._encoder.mask_for([turn, between_words, tools])
        try:
            turn, ending = self._render_ended(turn, tools, mask)
            dummy = [_QUESTION, turn]
            extension = self._render_masked([*dummy, *new], tools, mask, opens_turn=True)
            with_words = self._render_masked([*dummy, *between_words], tools, mask, opens_turn=True)
        except TemplateError:
            return None
        if any(marker not in text for text in (ending, extension, with_words)):
            return None
        self._warn_of_dropped(between_words, with_words, word)
        ending, extension, with_words = (_after(marker, text) for text in (ending, extension, with_words))
        if not _is_whole(extension, with_words, word, num_words):
            return None
        # Some templates put the end-of-sequence token after the last turn.
        end_of_text = str(self._tokenizer.eos_token or "")
        end = self._encoder.first_control(ending, self._closing_ids)
        extension_end = self._encoder.first_control(extension, self._closing_ids)
        if end is not None and extension_end is not None:
            is_same_turn = ending[: end.start()] == extension[: extension_end.start()]
            after = ending[end.end() :].removesuffix(end_of_text)
            is_proven = is_same_turn and extension[extension_end.end() :].startswith(after)
            text = extension[extension_end.start() :]
        else:
            # Without a closing token, a turn with calls ends with the text that ends a turn without calls.
            closing = self._after_content if "tool_calls" in turn else ending
            is_proven = end is None and extension.startswith(ending) and ending.endswith(closing)
            text = extension[len(ending) - len(closing) :]
        if not is_proven or not text:
            return None
        names = [mask.hide(name) for name in _names(tools)]
        if self._history is History.KEEP and names and all(name in text for name in names):
            with contextlib.suppress(TemplateError):
                without_tools = _after(marker, self._render_masked([*dummy, *new], (), mask, opens_turn=True))
                without_tools = without_tools[len(extension) - len(text) :]
                if self._repeats_tools(text, without_tools, names, call, mask):
                    text = without_tools
        return mask.restore(text), self._encoder.encode_continuation(text, mask), end is not None

    def _repeats_tools(self, text: str, without_tools: str, names: Sequence[str], call: EngineCall, mask: Mask) -> bool:
        """Return True if the glue has a tool list that the prompt has too.

        Mistral 7B v0.3, for example, shows the tools before the last user turn only. Where the earlier list stays, each
        user turn would add another one.
        """
        ids, ids_without = (self._encoder.encode_continuation(part, mask) for part in (text, without_tools))
        # If the list ends like the text before it, or begins like that behind it, its place is not known, but its core.
        core = ids[_num_common(ids, ids_without) : len(ids) - _num_common(ids[::-1], ids_without[::-1])]
        start = _num_common(text, without_tools)
        num_added = len(text) - len(without_tools)
        is_insertion = num_added > 0 and text[start + num_added :] == without_tools[start:]
        if not is_insertion or not all(name in text[start : start + num_added] for name in names) or len(core) < 3:
            return False
        # The text around the list may change its outer tokens.
        return array("q", core[1:-1]).tobytes() in array("q", call.prompt_ids).tobytes()

    def _render_ended(self, turn: dict[str, Any], tools: Tools, mask: Mask) -> tuple[dict[str, Any], str]:
        """Render a dummy that ends with this turn; without its calls only if the template refuses them.

        Llama 3.1, for example, refuses parallel calls. Returns the turn as it was rendered.
        """
        try:
            return turn, self._render_masked([_QUESTION, turn], tools, mask, opens_turn=False)
        except TemplateError:
            turn = {key: value for key, value in turn.items() if key != "tool_calls"}
            return turn, self._render_masked([_QUESTION, turn], tools, mask, opens_turn=False)

    def _warn_of_dropped(self, between_words: Sequence[Mapping[str, Any]], rendered: str, word: str) -> None:
        """Log once per role that a rendering of messages between words shows a content nowhere."""
        for message in between_words:
            match = re.search(f"{word}x[0-9]+x", _joined_text(message["content"]))
            role = str(message["role"])
            if match and match[0] not in rendered and role not in self._roles_dropped:
                self._roles_dropped.add(role)
                log.warning(
                    "the chat template drops a message of role %r, so the model does not read it; use a model or a "
                    "chat_template.jinja that shows such messages",
                    role,
                )

    def _template_keeps_history(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools, glue: str
    ) -> bool:
        """Return True if the template renders the last prompt and the last turn unchanged before the new messages."""
        conversation = self._normalized([*history, *new_messages])
        prompt = self._render(conversation[: len(history) - 1], tools, opens_turn=True)
        whole = self._render(conversation, tools, opens_turn=True)
        if not whole.startswith(prompt) or not whole[len(prompt) :].endswith(glue):
            return False
        template_turn = self._parse(whole[len(prompt) :].removesuffix(glue), tools)
        return _trimmed(template_turn) == _trimmed(self._read(call.sampled_ids, tools))

    def _end_of_turn(self) -> tuple[int | None, str]:
        """Return the control token that follows the content of an assistant turn, or None, and all text after it."""
        marker = word_not_in([])
        rendering = self._render([_QUESTION, {"role": "assistant", "content": marker}], (), opens_turn=False)
        if marker not in rendering:
            raise TemplateError("the chat template does not show the content of an assistant turn")
        after = _after(marker, rendering)
        match = self._encoder.first_control(after, frozenset(self._encoder.controls.values()))
        return None if match is None else self._encoder.controls[match[0]], after

    def _render_masked(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools, mask: Mask, *, opens_turn: bool
    ) -> str:
        hidden = self._encoder.hide_messages(messages, mask)
        return self._render(hidden, map_text(tools, mask.hide), opens_turn=opens_turn)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, opens_turn: bool) -> str:
        try:
            return self._apply_template(messages, tools, opens_turn=opens_turn)
        except RENDERING_ERRORS as error:
            as_text = _with_text_arguments(messages)
            if as_text is not None:
                with contextlib.suppress(*RENDERING_ERRORS):
                    return self._apply_template(as_text, tools, opens_turn=opens_turn)
            roles = " ".join(str(message["role"]) for message in messages[-8:])
            raise TemplateError(
                f"the chat template cannot render these messages (the last roles: {roles}): "
                f"{type(error).__name__}: {error}"
            ) from error

    def _apply_template(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, opens_turn: bool) -> str:
        rendering = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=opens_turn,
            tokenize=False,
        )
        assert isinstance(rendering, str)
        return rendering if self._images is None else self._images.rendered(rendering)


def _num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)


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


def _dummy_turn(message: Mapping[str, Any], marker: str) -> dict[str, Any]:
    """Return a normalized assistant message with the same calls by name and id; everything else is the marker.

    Templates that show no content beside tool calls show the marker as the argument of the last call.
    """
    dummy: dict[str, Any] = {"role": "assistant", "content": marker}
    if "tool_calls" in message:
        dummy["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": {"marker": marker}}}
            for call in message["tool_calls"]
        ]
    return dummy


def _between_words(messages: Sequence[Mapping[str, Any]], word: str) -> tuple[list[dict[str, Any]], int]:
    """Return normalized messages with each text between two words, numbered variants of `word`; and their number.

    Texts are the content, and the names and arguments of calls. White space around a text stays outside the words,
    since templates trim it. Reasoning is left alone: templates drop it from turns that were not sampled here.
    """
    numbers = itertools.count()

    def enclose(text: str) -> str:
        body = text.strip()
        before, after = text[: text.index(body)], text[text.index(body) + len(body) :]
        return f"{before}{word}x{next(numbers)}x{body}{word}x{next(numbers)}x{after}"

    def enclose_call(call: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        values = {key: map_text(value, enclose) for key, value in arguments.items()} if arguments else arguments
        return {**call, "function": {"name": enclose(name), "arguments": values}}

    enclosed_messages = []
    for message in messages:
        copy = dict(message)
        if isinstance(message["content"], list):
            copy["content"] = [
                {**part, "text": enclose(part["text"])} if "text" in part else part for part in message["content"]
            ]
        elif message["content"] or "tool_calls" not in message:
            copy["content"] = enclose(message["content"])
        if "tool_calls" in message:
            copy["tool_calls"] = [enclose_call(call) for call in message["tool_calls"]]
        enclosed_messages.append(copy)
    return enclosed_messages, next(numbers)


def _joined_text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _is_whole(text: str, with_words: str, word: str, count: int) -> bool:
    """Return True if the second text has all numbered words and equals the first without them."""
    pattern = re.compile(f"{word}x[0-9]+x")
    return len(set(pattern.findall(with_words))) == count and pattern.sub("", with_words) == text


def _refuse_hidden(turn: str, message: Mapping[str, Any], number: int) -> None:
    """Raise `TemplateError` if the rendered turn lacks a part of its message."""
    calls = message.get("tool_calls", ())
    parts = {
        "reasoning_content": message.get("reasoning_content") or "",
        "content": message["content"].rpartition(THINK_CLOSE)[2],
        **{f"tool_calls[{i}]": call["function"]["name"] for i, call in enumerate(calls)},
    }
    for name, text in parts.items():
        if text.strip() not in turn:
            raise TemplateError(
                f"message {number}: the chat template does not show its {name}, so it could not be trained; leave it "
                "out of the message, or set model.chat_template=<file.jinja> with one that shows it"
            )


def _names(tools: Tools) -> list[str]:
    return [str(tool.get("function", tool).get("name", "")) for tool in tools]


def _after(marker: str, text: str) -> str:
    return text[text.rfind(marker) + len(marker) :]


def _trimmed(turn: Turn) -> Turn:
    reasoning = None if turn.reasoning is None else turn.reasoning.strip()
    return replace(turn, content=turn.content.strip(), reasoning=reasoning, errors=())
