"""Token ids of texts and conversations, for scores. (Only `rollout/chat/chat.py` makes training rows.)"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.rollout.chat.messages import normalize_messages
from lockstep.rollout.chat.template import RENDERING_ERRORS
from lockstep.rollout.chat.untrusted import UntrustedTextEncoder
from lockstep.rollout.errors import DataError, TemplateError
from lockstep.rollout.safe_text import error_text


def text_ids(tokenizer: Any, text: str, *, special_tokens: bool = True) -> list[int]:
    """Tokenize a text, with or without the special tokens that the tokenizer adds.

    Raises `DataError` for half of a surrogate pair, which no tokenizer reads.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"a text has {text[error.start]!r}, half of a surrogate pair; take it out") from None
    return list(tokenizer(text, add_special_tokens=special_tokens)["input_ids"])


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = False) -> list[int]:
    """Tokenize a conversation through the tokenizer's chat template.

    Message text never becomes special tokens (`rollout/chat/untrusted.py`): a policy that is trained on the score must
    not be able to write further turns.

    Raises `ConfigError` for a tokenizer that cannot guarantee this, `TemplateError` for malformed messages, and those
    that the template cannot render.
    """
    encoder = _encoder(tokenizer)
    plain = normalize_messages(messages)
    mask = encoder.mask_for(plain)

    def rendered(conversation: list[dict[str, Any]]) -> str:
        try:
            return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generation_prompt)
        except RENDERING_ERRORS as error:
            raise TemplateError(
                f"the chat template cannot render these messages: {type(error).__name__}: {error_text(error)}"
            ) from error

    return encoder.encode(rendered(encoder.hide_messages(plain, mask)), mask, plain=rendered(plain))


@functools.lru_cache(maxsize=4)
def _encoder(tokenizer: Any) -> UntrustedTextEncoder:
    return UntrustedTextEncoder(tokenizer)
