"""Messages to token ids, once, and only forward. The one place where text becomes tokens.

    ids     = chat.prompt(messages, tools)                      the opening prompt
    call    = await engine.generate(ids, ...)
    message = chat.parse(call.sampled_ids, tools)               what a person, an environment and a reward read
    ids     = chat.extend(call, history, new_messages, tools)   call.all_ids + the glue around the new messages

What was sampled is never rendered or tokenised again: `extend` keeps the ids of the record and appends. Where that
cannot be proven to be what the template shows it returns None; the caller renders the conversation with `prompt`,
and the call tree branches (`rollout/episode/rows.py`).

Text that was not sampled stays text, whatever it spells (`rollout/chat/untrusted.py`). Models that speak Harmony
(gpt-oss) go through the `openai-harmony` library (`rollout/chat/harmony.py`), all others through their chat template
(`rollout/chat/template.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from rollout.chat.harmony import CONTROL_IDS, STOPS, HarmonyRenderer, load_encoding, parity, parse_harmony
from rollout.chat.template import History, TemplateRenderer, Tools
from rollout.chat.tool_calls import Turn, parse_hermes, parse_llama3
from rollout.errors import ConfigError, TemplateError
from rollout.records import EngineCall, Message

FAMILIES = ("auto", "chatml", "qwen3", "llama3", "harmony")
"""How tool calls and reasoning are written. chatml and qwen3 share the Hermes form."""

_FAMILY_STOPS = {"llama3": ("<|eot_id|>", "<|eom_id|>"), "harmony": STOPS}
"""End-of-turn tokens that a template may show only in some turns, for instance after a tool call."""


class Renderer(Protocol):
    """Messages → ids, for one way of writing conversations."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]: ...

    def extend(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools
    ) -> list[int] | None: ...


class Chat:
    """Conversations of one model as token ids. Stateless once made: any number of episodes can share it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        history: str = "keep",
        family: str = "auto",
        stop_token_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            tokenizer: with a chat template. Not modified.
            history: `keep` the reasoning of earlier turns, or let the `template` decide (see `History`).
            family: one of `FAMILIES`; `auto` goes by the tokenizer's control tokens.
            stop_token_ids: ids that end a turn beside the tokenizer's own, as a model's generation_config.json has.
            template_kwargs: passed to the chat template, for example `{"enable_thinking": False}`.

        Raises:
            ConfigError: an unknown family or history, or a tokenizer that cannot keep untrusted text text.
            TemplateError: the tokenizer has no chat template, or one that cannot render a user and an assistant turn.
        """
        if family not in FAMILIES:
            raise ConfigError(f"chat family must be one of {', '.join(FAMILIES)}; found {family!r}")
        if history not in tuple(History):
            raise ConfigError(f"history must be one of {', '.join(History)}; found {history!r}")
        self.tokenizer = tokenizer
        self.family = _family_of(tokenizer) if family == "auto" else family
        vocabulary = tokenizer.get_vocab()
        self._num_ids = 1 + max(vocabulary.values())
        names = (tokenizer.eos_token, *_FAMILY_STOPS.get(self.family, ()))
        stops = [*(vocabulary[str(name)] for name in names if name in vocabulary), *stop_token_ids]
        self._opens_reasoning = False
        self._renderer: Renderer
        if self.family == "harmony" and CONTROL_IDS.items() <= vocabulary.items():
            self._renderer = _harmony_renderer(History(history), stops, template_kwargs or {})
        else:
            renderer = TemplateRenderer(
                tokenizer,
                history=History(history),
                parse=self._parse_text,
                stop_token_ids=stops,
                closing_tokens=["<|end|>"] if self.family == "harmony" else [],
                template_kwargs=template_kwargs,
            )
            self._opens_reasoning = renderer.opens_reasoning
            self._renderer = renderer

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        history: str = "keep",
        family: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> Chat:
        """Load a model's tokenizer, and the ids that end a turn from its generation_config.json if it has one."""
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        return cls(
            tokenizer,
            history=history,
            family=family,
            stop_token_ids=_generation_stops(path),
            template_kwargs=template_kwargs,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids at which sampling a turn must stop: end of sequence, end of turn, end of a tool call."""
        return self._renderer.stop_token_ids

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a whole conversation, ready for the next assistant turn.

        Raises:
            TemplateError: the chat template refuses the messages.
        """
        return self._renderer.prompt(messages, tools)

    def extend(
        self, call: EngineCall, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools = ()
    ) -> list[int] | None:
        """Ids of the next prompt: everything the call saw and sampled, then the new messages.

        A turn that was cut short (by length) gets its closing tokens; a stop token that was sampled stays.

        Args:
            call: the last call.
            history: all messages so far; the last one is the assistant message that was parsed from the call.
            new_messages: what the environment answered.

        Returns:
            The ids, or None where an extension cannot be proven to be right: render anew with `prompt`.

        Raises:
            TemplateError: `history` does not end with an assistant message.
        """
        if not history or history[-1].get("role") != "assistant":
            raise TemplateError("extend: the history must end with the assistant message parsed from the call")
        return self._renderer.extend(call, history, new_messages, tools)

    def parity(self, messages: Sequence[Message]) -> str:
        """Whether the two renderers of a Harmony model write this prompt alike; empty where there is one renderer."""
        if not isinstance(self._renderer, HarmonyRenderer) or self.tokenizer.chat_template is None:
            return ""
        return parity(self.tokenizer, self._renderer, messages)

    def parse(self, sampled_ids: Sequence[int], tools: Tools | None = None) -> Message:
        """Read a sampled turn. Never raises: a model can sample anything.

        Returns:
            role, content, and where there is any: reasoning_content, tool_calls (OpenAI form), and
            tool_call_errors, one sentence for each call that could not be read (its text is still in the content).
        """
        ids = list(sampled_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        # A model's output layer may be padded beyond the vocabulary; such ids have no text.
        known = [token for token in ids if 0 <= token < self._num_ids]
        text = self.tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._parse_text(str(text), tools or ()).message(sampled_ids)

    def _parse_text(self, text: str, tools: Tools) -> Turn:
        if self.family == "llama3":
            names = [tool.get("function", tool).get("name", "") for tool in tools]
            return parse_llama3(text, tool_names=names, reasoning_is_open=self._opens_reasoning)
        if self.family == "harmony":
            return parse_harmony(text)
        return parse_hermes(text, reasoning_is_open=self._opens_reasoning)


def _family_of(tokenizer: PreTrainedTokenizerFast) -> str:
    vocabulary = tokenizer.get_vocab()
    if "<|channel|>" in vocabulary and "<|call|>" in vocabulary:
        return "harmony"
    if "<|python_tag|>" in vocabulary or "<|start_header_id|>" in vocabulary:
        return "llama3"
    return "qwen3" if "<think>" in str(tokenizer.chat_template) else "chatml"


def _harmony_renderer(history: History, stops: Sequence[int], template_kwargs: Mapping[str, Any]) -> HarmonyRenderer:
    unknown = set(template_kwargs) - {"reasoning_effort"}
    if unknown:
        raise ConfigError(f"gpt-oss takes reasoning_effort only in template_kwargs; found {', '.join(sorted(unknown))}")
    effort = str(template_kwargs.get("reasoning_effort", "medium"))
    return HarmonyRenderer(load_encoding(), history=history, stop_token_ids=stops, reasoning_effort=effort)


def _generation_stops(path: str | Path) -> list[int]:
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the model has no generation_config.json
        return []
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)
