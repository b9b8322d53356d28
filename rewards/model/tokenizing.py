"""Token ids of texts and conversations, for scores. (Only `rollout/chat/chat.py` makes training rows.)"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.rollout.chat.messages import normalize_messages
from lockstep.rollout.chat.untrusted import UntrustedTextEncoder


def text_ids(tokenizer: Any, text: str, *, special_tokens: bool = True) -> list[int]:
    """Tokenize a text, with or without the special tokens that the tokenizer adds."""
    return list(tokenizer(text, add_special_tokens=special_tokens)["input_ids"])


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = False) -> list[int]:
    """Tokenize a conversation through the tokenizer's chat template.

    Message text never becomes special tokens (`rollout/chat/untrusted.py`): a policy that is trained on the score must
    not be able to write further turns.

    Raises `ConfigError` for a tokenizer that cannot guarantee this, `TemplateError` for malformed messages.
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
