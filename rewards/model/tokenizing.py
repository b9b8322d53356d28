"""Text and conversations as token ids, for scores. (Training rows are made by `rollout/chat/chat.py` alone.)

transformers types what a tokenizer returns as a union of everything that it may be; here it is ids, once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.chat.messages import normalize_messages
from rollout.chat.untrusted import UntrustedTextEncoder


def text_ids(tokenizer: Any, text: str, *, special_tokens: bool = True) -> list[int]:
    """Ids of a text, with the special tokens that the tokenizer adds to one, or without."""
    return list(tokenizer(text, add_special_tokens=special_tokens)["input_ids"])


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = False) -> list[int]:
    """Ids of a conversation through the tokenizer's chat template.

    What anybody wrote stays text, whatever it spells out (`rollout/chat/untrusted.py`): a policy that is paid for the
    score must not be able to write further turns.

    Raises `ConfigError` for a tokenizer with which that cannot be had, `TemplateError` for messages that are none.
    """
    encoder = _encoder(tokenizer)
    plain = normalize_messages(messages)
    mask = encoder.mask_for(plain)

    def rendered(conversation: list[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generation_prompt)

    return encoder.encode(rendered(encoder.hide_messages(plain, mask)), mask, plain=rendered(plain))


@functools.lru_cache(maxsize=4)
def _encoder(tokenizer: Any) -> UntrustedTextEncoder:
    return UntrustedTextEncoder(tokenizer)
