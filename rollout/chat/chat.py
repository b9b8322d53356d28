"""Conversion of messages to token ids, done once and never repeated for a sampled turn.

    ids     = chat.prompt(messages, tools)                      the opening prompt
    call    = await engine.generate(ids, ...)
    message = chat.parse(call.sampled_ids, tools)               read by people, environments and rewards
    ids     = chat.extend(call, history, new_messages, tools)   call.all_ids + the glue around the new messages

A sampled turn is never rendered or tokenized again: `extend` keeps the ids of the record and appends to them. Where
that cannot be proven to match the template, the call tree branches (`rollout/episode/rows.py`).

Text that was not sampled cannot become control tokens (`rollout/chat/untrusted.py`). Harmony models (gpt-oss) use the
`openai-harmony` library (`rollout/chat/harmony.py`), all others their chat template (`rollout/chat/template.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.chat.template import History, TemplateRenderer
from lockstep.rollout.chat.template_files import CONTROL_TOKENS, template_text
from lockstep.rollout.chat.tool_calls import HARMONY_STOPS, Turn, parse_hermes, parse_llama3
from lockstep.rollout.errors import ConfigError, TemplateError
from lockstep.rollout.records import EngineCall, Message, PromptIds
from lockstep.rollout.safe_text import error_text

if TYPE_CHECKING:
    from lockstep.rollout.chat.harmony import HarmonyRenderer  # with openai_harmony, for models of this format
    from lockstep.rollout.media.processing import ImageProcessing  # with PIL, for models that see images

_STOPS = {"llama3": ("<|eot_id|>", "<|eom_id|>"), "harmony": HARMONY_STOPS, "hermes": ()}
"""End-of-turn tokens of each format that a template may show only in some turns, for example after a tool call."""


class Chat:
    """Converter between the messages and the token ids of one model. Stateless: episodes can share it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        history: str = "keep",
        stop_token_ids: Sequence[int] = (),
        images: ImageProcessing | None = None,
    ) -> None:
        """history: see `History`. stop_token_ids: ids that end a turn beside the tokenizer's own. images: those of a
        model that sees them; without it messages with images are refused.

        Raises:
            ConfigError: an unknown history, or a tokenizer that cannot encode text without control tokens.
            TemplateError: the tokenizer has no chat template, or one that cannot render a user and an assistant turn.
        """
        if history not in tuple(History):
            raise ConfigError(f"history must be one of {', '.join(History)}; found {history!r}")
        self.tokenizer, self.images = tokenizer, images
        vocabulary = tokenizer.get_vocab()
        self._num_ids = 1 + max(vocabulary.values())
        self._format = _format_of(vocabulary)
        names = (tokenizer.eos_token, *_STOPS[self._format])
        stops = [*(vocabulary[str(name)] for name in names if name in vocabulary), *stop_token_ids]
        self._opens_reasoning = False
        self._shows_tools = False
        """True once a prompt with tools differed from the one without them."""
        self._renderer: HarmonyRenderer | TemplateRenderer
        if self._format == "harmony":
            from lockstep.rollout.chat.harmony import CONTROL_IDS, HarmonyRenderer, load_encoding

            if CONTROL_IDS.items() <= vocabulary.items():
                self._renderer = HarmonyRenderer(load_encoding(), history=History(history), stop_token_ids=stops)
                return
        self._renderer = TemplateRenderer(
            tokenizer,
            history=History(history),
            parse=self._parse_text,
            read=self._read,
            stop_token_ids=stops,
            closing_tokens=["<|end|>"] if self._format == "harmony" else [],
            images=images,
        )
        self._opens_reasoning = self._renderer.opens_reasoning

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        history: str = "keep",
        trust_remote_code: bool = False,
        template: str | None = None,
        images: ImageProcessing | None = None,
    ) -> Chat:
        """Load a model's tokenizer, and the ids that end a turn from its generation_config.json if it has one.

        template: a shipped template or a file, in place of the tokenizer's own (`rollout/chat/template_files.py`).
        Raises `ConfigError` if one of them cannot be read, or the tokenizer lacks control tokens of the template.
        """
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code, template=template)
        return cls(tokenizer, history=history, stop_token_ids=generation_stops(path), images=images)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids at which sampling a turn must stop: end of sequence, end of turn, end of a tool call."""
        return self._renderer.stop_token_ids

    def with_digests(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with digests in place of images, which go into the store of images.

        Raises `TemplateError` for an image that cannot be read. A model without images returns the messages.
        """
        return messages if self.images is None else self.images.with_digests(messages)

    def save_pretrained(self, directory: Path) -> None:
        """Write tokenizer and chat template, and the image processor of a model that sees images."""
        self.tokenizer.save_pretrained(directory)
        if self.images is not None:
            self.images.save_pretrained(directory)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> PromptIds:
        """Return the ids of a conversation, up to the start of the next assistant turn, and its images.

        Raises `TemplateError`.
        """
        return self._renderer.prompt(self.with_digests(messages), tools)

    def require_tools(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raise `ConfigError` if the template drops the tools: then the prompt is the same without them.

        Without this check a model would be trained on tools that it never hears of. Rendered once per `Chat`.
        """
        if self._shows_tools or not tools:
            return
        if self.prompt(messages, tools) != self.prompt(messages, ()):
            self._shows_tools = True
            return
        names = ", ".join(str(tool.get("function", tool).get("name", "?")) for tool in tools)
        vocabulary = self.tokenizer.get_vocab()
        fitting = [name for name, tokens in CONTROL_TOKENS.items() if all(token in vocabulary for token in tokens)]
        remedy = " or ".join([*(f"model.chat_template={name}" for name in fitting), "model.chat_template=<file.jinja>"])
        raise ConfigError(
            f"the chat template of {self.tokenizer.name_or_path or 'the model'} drops the tools "
            f"({names}): the prompt is the same with and without them, expected a template that lists `tools`; "
            f"set {remedy}, or take a model whose template lists them"
        )

    def extend(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools = ()
    ) -> PromptIds | None:
        """Return the next prompt: the ids and images of the last call, its sampled ids, then the new messages.

        A turn that was cut by length gets its closing tokens; a sampled stop token stays. None if the extension cannot
        be proven correct: render the conversation with `prompt`. Raises `TemplateError` unless `history`, all messages
        so far, ends with the assistant message that was parsed from the call.
        """
        if not history or history[-1].get("role") != "assistant":
            raise TemplateError("extend: the history must end with the assistant message parsed from the call")
        return self._renderer.extend(call, self.with_digests(history), self.with_digests(new_messages), tools)

    def turn(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of the last message, an assistant turn, as the model would have sampled them after `prompt`.

        They end with the token that ends the turn. Raises `TemplateError` if the template does not continue its own
        prompt with this turn, does not show all of it, or ends it with no token at which sampling stops.
        """
        if not messages or messages[-1].get("role") != "assistant":
            raise TemplateError("a turn must be an assistant message, the last one of its conversation")
        return self._renderer.turn(self.with_digests(messages), tools)

    def parity(self, messages: Sequence[Message]) -> str:
        """Compare the two renderers of a Harmony model on a prompt, in a sentence; "" for a model with one renderer."""
        if isinstance(self._renderer, TemplateRenderer) or self.tokenizer.chat_template is None:
            return ""
        from lockstep.rollout.chat.harmony import parity

        return parity(self.tokenizer, self._renderer, messages)

    def parse(
        self, sampled_ids: Sequence[int], tools: Tools | None = None, *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Parse a sampled turn. Never raises: a model can sample anything.

        The message has role, content, and if present reasoning_content, tool_calls (OpenAI form) and tool_call_errors,
        one sentence for each malformed call (its text is still in the content). With `prompt_ids`, the prompt of the
        turn, the ids of tool calls are unique in the conversation.
        """
        return self._read(sampled_ids, tools or ()).message(sampled_ids, prompt_ids=prompt_ids)

    def has_called(self, sampled_ids: Sequence[int], tools: Tools) -> bool:
        """Return True if a complete call is in the turn, also if the turn goes on with an incomplete one."""
        turn = self._read(sampled_ids, tools)
        return bool(turn.calls) or turn.is_broken_after_call

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        # A model's output layer may be padded beyond the vocabulary; such ids have no text.
        known_ids = [token for token in ids if 0 <= token < self._num_ids]
        return str(self.tokenizer.decode(known_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _read(self, sampled_ids: Sequence[int], tools: Tools) -> Turn:
        ids = list(sampled_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self._parse_text(self.decode(ids), tools)

    def _parse_text(self, text: str, tools: Tools) -> Turn:
        if self._format == "llama3":
            names = [tool.get("function", tool).get("name", "") for tool in tools]
            return parse_llama3(text, tool_names=names, reasoning_is_open=self._opens_reasoning)
        if self._format == "harmony":
            from lockstep.rollout.chat.harmony import parse_harmony

            return parse_harmony(text)
        return parse_hermes(text, reasoning_is_open=self._opens_reasoning)


def _format_of(vocabulary: Mapping[str, int]) -> str:
    """Return the format in which a model with these control tokens writes tool calls and reasoning."""
    if "<|channel|>" in vocabulary and "<|call|>" in vocabulary:
        return "harmony"
    if "<|python_tag|>" in vocabulary or "<|start_header_id|>" in vocabulary:
        return "llama3"
    return "hermes"


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool, template: str | None, setting: str = "model.path"
) -> PreTrainedTokenizerFast:
    """Load a model's tokenizer with its chat template, or with `template`. Raises as `Chat.from_pretrained`.

    setting: name of the path's setting, for errors.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers and tokenizers raise many kinds for damaged files
        reason, *_ = error_text(error).splitlines() or [""]
        raise ConfigError(
            f"{setting}={path}: no loadable tokenizer ({type(error).__name__}: {reason}); set {setting} to a "
            "directory with the files of a tokenizer, or to a hub id that can be reached from here"
        ) from error
    if template is not None:
        tokenizer.chat_template = template_text(template)
        lacking = [token for token in CONTROL_TOKENS.get(template, ()) if token not in tokenizer.get_vocab()]
        if lacking:
            raise ConfigError(
                f"model.chat_template={template} writes {' and '.join(lacking)}, which the tokenizer of {path} "
                "does not have; set model.chat_template=<file.jinja with the control tokens of this model>"
            )
    return tokenizer


def vocabulary_difference(own: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Return in words how many tokens have other ids in two vocabularies, with an example; None if all are equal."""
    differing = [token for token, number in own.items() if other.get(token) != number]
    differing += sorted(other.keys() - own.keys())
    if not differing:
        return None
    example = differing[0]
    return f"{len(differing)} tokens differ, such as {example!r} with id {other.get(example)} and {own.get(example)}"


def generation_stops(path: str | Path) -> list[int]:
    """Return the ids that end a text in a model's generation_config.json; none without the file.

    Raises `ConfigError` for values that are no ids.
    """
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the model has no generation_config.json
        eos = None
    stops = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(stop) is int and stop >= 0 for stop in stops):
        raise ConfigError(
            f"{path}: generation_config.json has eos_token_id={eos!r:.80}, expected the id of a token, or a list of "
            "them; correct the file"
        )
    return stops
