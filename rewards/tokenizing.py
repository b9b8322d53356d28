"""Text and conversations as token ids, for scores. (Training rows are made by `rollout/chat.py` alone.)

transformers types what a tokenizer returns as a union of everything that it may be; here it is ids, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def text_ids(tokenizer: Any, text: str, *, special_tokens: bool = True) -> list[int]:
    """Ids of a text, with the special tokens that the tokenizer adds to one, or without."""
    return list(tokenizer(text, add_special_tokens=special_tokens)["input_ids"])


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = False) -> list[int]:
    """Ids of a conversation through the tokenizer's chat template."""
    encoded = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, add_generation_prompt=generation_prompt
    )
    return list(encoded["input_ids"])
