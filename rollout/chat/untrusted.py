"""Tokenization of untrusted text without producing control tokens.

A tool result, a web page or a user may spell out `<|im_end|>`. In a rendered conversation, a tokenizer cannot tell it
from the one that the chat template wrote, and the model would read the end of a turn.

Control tokens are all special tokens, and every other added token that looks like markup (`<think>`, `<tool_call>`).
The rule:

1. Render the conversation twice: as it is, and with the first and last characters of control tokens replaced, in all
   untrusted text, by placeholders of letters and digits, which templates, JSON escapes and trimming leave alone. All
   control tokens in the second rendering are therefore the template's own.
2. If the tokens of the first rendering hold exactly these control tokens, in this order, use them.
3. Otherwise cut the second rendering at its control tokens. Encode the text in between, with the placeholders put
   back, by a copy of the tokenizer without control tokens.

An assistant turn may be rendered again (when a conversation branches). Its own markup, think blocks and tool calls,
keeps its tokens; other control tokens in it become text.

Not covered: a template that builds a control token out of two halves, one of which is message text.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from lockstep.rollout.chat.messages import map_text
from lockstep.rollout.chat.tool_calls import THINK_CLOSE, THINK_OPEN, TOOL_CALL_CLOSE, TOOL_CALL_OPEN
from lockstep.rollout.errors import ConfigError

ASSISTANT_MARKUP = (THINK_OPEN, THINK_CLOSE, TOOL_CALL_OPEN, TOOL_CALL_CLOSE)


@dataclass(frozen=True, slots=True)
class Mask:
    """Placeholders for the characters of control tokens."""

    placeholders: Mapping[str, str]
    hides_control_tokens: bool = False
    """True if any untrusted text spells out a whole control token."""

    def hide(self, text: str) -> str:
        for character, placeholder in self.placeholders.items():
            text = text.replace(character, placeholder)
        return text

    def restore(self, text: str) -> str:
        for character, placeholder in self.placeholders.items():
            text = text.replace(placeholder, character)
        return text


class UntrustedTextEncoder:
    """Encoder of rendered conversations by the rule above. One per tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises `ConfigError` for tokenizers that are not backed by the `tokenizers` library."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                f"the tokenizer is a {type(tokenizer).__name__}, expected one backed by the `tokenizers` library "
                "(transformers.PreTrainedTokenizerFast): only there can text be encoded with control tokens off"
            )
        self._tokenizer = tokenizer
        self.controls: dict[str, int] = {
            token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if _is_control(token)
        }
        """Control tokens by their text."""
        self._control_ids = frozenset(self.controls.values())
        is_end = tokenizer.unk_token in (tokenizer.eos_token, tokenizer.bos_token)
        self._unknown = frozenset() if is_end else frozenset({self.controls.get(str(tokenizer.unk_token))})
        """The token for words outside the vocabulary: any text can produce it, and it ends nothing."""
        self._flags = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        self._control_pattern = _any_of(self.controls)
        edges = {text[0] for text in self.controls} | {text[-1] for text in self.controls}
        self._edges = sorted(character for character in edges if not character.isalnum() and not character.isspace())

    def mask_for(self, conversation: object) -> Mask:
        """Return the mask for messages and tools; an empty one if none of their text could form a control token."""
        texts = _texts(conversation)
        if not any(character in text for text in texts for character in self._edges):
            return Mask({})
        word = word_not_in(conversation)
        return Mask(
            {character: f"{word}x{index}x" for index, character in enumerate(self._edges)},
            hides_control_tokens=any(self._control_pattern.search(text) for text in texts),
        )

    def hide_messages(self, messages: Sequence[Mapping[str, Any]], mask: Mask) -> list[dict[str, Any]]:
        """Mask the messages, except for the markup of assistant turns."""
        hidden = []
        for message in messages:
            masked_message = map_text(message, mask.hide)
            if message["role"] == "assistant":
                for key in ("content", "reasoning_content"):
                    if isinstance(message.get(key), str):
                        masked_message[key] = self._hide_all_but_markup(message[key], mask)
            hidden.append(masked_message)
        return hidden

    def encode(self, masked: str, mask: Mask, *, plain: str | None = None) -> list[int]:
        """Return the token ids of a rendering, given with untrusted text hidden by `mask`.

        plain: the rendering with nothing hidden; by default, `masked` restored.
        """
        restored_text = mask.restore(masked)
        text = restored_text if plain is None else plain
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        own = [self.controls[match[0]] for match in self._controls_in(masked)]
        controls = [token for token in ids if token in self._control_ids]
        if not mask.hides_control_tokens:
            own, controls = ([token for token in tokens if token not in self._unknown] for tokens in (own, controls))
        if controls == own and (text == restored_text or not mask.hides_control_tokens):
            return ids
        return self._encode_in_pieces(masked, mask)

    def encode_continuation(self, masked: str, mask: Mask) -> list[int]:
        """Return the token ids of a rendering that continues a text.

        Some tokenizers put a space before the first word of an input; here it would stand inside the text.
        """
        match = next(self._controls_in(masked), None)
        if match is None:
            return self._encode_as_text(mask.restore(masked), self._continuation_encoder)
        piece = mask.restore(masked[: match.start()])
        piece = piece.rstrip() if self._flags[match[0]].lstrip else piece
        return self._encode_as_text(piece, self._continuation_encoder) + self.encode(masked[match.start() :], mask)

    def first_control(self, masked: str, among: frozenset[int]) -> re.Match[str] | None:
        """Find the first control token in a masked rendering whose id is in `among`."""
        return next((match for match in self._controls_in(masked) if self.controls[match[0]] in among), None)

    def _encode_in_pieces(self, masked: str, mask: Mask) -> list[int]:
        ids: list[int] = []
        start = 0
        strip_left = False
        for match in self._controls_in(masked):
            token = self._flags[match[0]]
            piece = mask.restore(masked[start : match.start()])
            piece = piece.lstrip() if strip_left else piece
            piece = piece.rstrip() if token.lstrip else piece
            ids += self._encode_as_text(piece, self._text_encoder, is_first=start == 0)
            ids.append(self.controls[match[0]])
            start, strip_left = match.end(), token.rstrip
        piece = mask.restore(masked[start:])
        piece = piece.lstrip() if strip_left else piece
        return ids + self._encode_as_text(piece, self._text_encoder, is_first=start == 0)

    def _encode_as_text(self, text: str, encoder: _TextEncoder, *, is_first: bool = True) -> list[int]:
        if not text:
            return []
        ids = encoder.encode(text, is_first=is_first)
        controls = self._control_ids - self._unknown
        if controls.isdisjoint(ids):
            return ids
        # A vocabulary that lists its control tokens as ordinary words; a single character cannot be one.
        pieces = (encoder.encode(character, is_first=False) for character in text)
        return [token for piece in pieces for token in piece if token not in controls]

    @functools.cached_property
    def _text_encoder(self) -> _TextEncoder:
        return _TextEncoder(json.loads(self._tokenizer.backend_tokenizer.to_str()), without=self.controls)

    @functools.cached_property
    def _continuation_encoder(self) -> _TextEncoder:
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for step in ("normalizer", "pre_tokenizer"):
            state[step] = _without_prefix(state[step])
        return _TextEncoder(state, without=self.controls)

    def _controls_in(self, text: str) -> Iterator[re.Match[str]]:
        return self._control_pattern.finditer(text)

    def _hide_all_but_markup(self, text: str, mask: Mask) -> str:
        parts = re.split(f"({_any_of(ASSISTANT_MARKUP).pattern})", text)
        return "".join(part if part in ASSISTANT_MARKUP else mask.hide(part) for part in parts)


class _TextEncoder:
    """Copy of a tokenizer without its control tokens."""

    def __init__(self, state: dict[str, Any], *, without: Mapping[str, int]) -> None:
        """state: the tokenizer as JSON (its `to_str`)."""
        added_tokens = [token for token in state["added_tokens"] if token["content"] not in without]
        state["added_tokens"] = added_tokens
        state["post_processor"] = state["truncation"] = state["padding"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(state))
        # Some tokenizers treat the start of the input differently (they put a space before it), so a piece from the
        # middle is encoded after a token of its own. It is random, so that no text can contain it.
        self._anchor = f"\ue000{secrets.token_hex(8)}\ue000"
        self._tokenizer.add_special_tokens([AddedToken(self._anchor, special=True, normalized=False)])
        # Without the control tokens, the remaining added words get new numbers.
        self._ids = {self._tokenizer.token_to_id(token["content"]): token["id"] for token in added_tokens}

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        # As a batch of one, because only `encode_batch` releases the GIL: other threads serve other episodes.
        (encoding,) = self._tokenizer.encode_batch(
            [text if is_first else self._anchor + text], add_special_tokens=False
        )
        return [self._ids.get(token, token) for token in (encoding.ids if is_first else encoding.ids[1:])]


def _without_prefix(step: Any) -> Any:
    """Return the normalizer or pre-tokenizer, as JSON, without the space that it puts before an input."""
    if step is None or step["type"] == "Prepend":
        return None
    copy = dict(step)
    for steps in ("normalizers", "pretokenizers"):
        if steps in step:
            copy[steps] = [one for one in map(_without_prefix, step[steps]) if one is not None]
    if "prepend_scheme" in step:
        copy["prepend_scheme"] = "never"
    if "add_prefix_space" in step:
        copy["add_prefix_space"] = False
    return copy


def word_not_in(conversation: object) -> str:
    """Return a word of letters and digits that the conversation does not contain.

    It is a digest of the text, which the text cannot contain. The first letter occurs only there, so that two
    occurrences cannot overlap.
    """
    text = "\0".join(_texts(conversation))
    return "Z" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()


def _is_control(token: AddedToken) -> bool:
    """Return True for special tokens and markup. Added words and runs of spaces are ordinary vocabulary."""
    return token.special or any(not character.isalnum() and not character.isspace() for character in token.content)


def _any_of(texts: Sequence[str] | Mapping[str, int]) -> re.Pattern[str]:
    """Compile a pattern for the longest of the texts at the leftmost place, as tokenizers match; nothing for none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _texts(value: object) -> list[str]:
    texts: list[str] = []
    map_text(value, lambda text: texts.append(text) or text)
    return texts
