"""Token classes: special, first of a turn, part of a tool call, other. Mismatch is rarely spread evenly over them.

"KL Divergence Analysis" (jphme, gist, 2026) found its outliers at Harmony's control tokens, which the model is almost
sure of when it samples and a little less sure of when it trains.
"""

from __future__ import annotations

import re

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.rollout.records import TrainingRow

CLASSES = ("special", "first_of_turn", "tool_call", "other")
"""A partition: a token belongs to the first class that fits."""

SPECIAL, FIRST_OF_TURN, TOOL_CALL, OTHER = range(len(CLASSES))

# Hermes and Qwen3, Llama 3, Harmony. A call that was cut short extends to the end of its turn.
_TOOL_CALL = re.compile(
    r"<tool_call>.*?(?:</tool_call>|$)|<\|python_tag\|>.*$|(?:commentary )?to=functions\..*?(?:<\|call\|>|$)",
    re.DOTALL,
)


class TokenTexts:
    """Readable text of single tokens. Ids beyond the tokenizer's vocabulary read as `[id]`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self.control_ids = frozenset(
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or any(not character.isalnum() and not character.isspace() for character in token.content)
        )
        """Special tokens, and added markup such as `<tool_call>`."""

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str:
        text = self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        if text and "\ufffd" not in text:
            return text
        # Part of a multi-byte character, or an unknown id.
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        return piece if isinstance(piece, str) and piece else f"[{token_id}]"


def classify(row: TrainingRow, texts: TokenTexts) -> np.ndarray:
    """Return the (T,) int64 index into `CLASSES` of each trained token of the row."""
    ids, turns = row.ids[row.loss_mask], row.turns[row.loss_mask]
    classes = np.full(len(ids), OTHER)
    for turn in np.unique(turns):
        inside = np.flatnonzero(turns == turn)
        pieces = [texts[token] for token in ids[inside].tolist()]
        starts = np.cumsum([0, *map(len, pieces)])[:-1]
        for match in _TOOL_CALL.finditer("".join(pieces)):
            classes[inside[(starts >= match.start()) & (starts < match.end())]] = TOOL_CALL
        classes[inside[0]] = FIRST_OF_TURN
    classes[np.isin(ids, list(texts.control_ids))] = SPECIAL
    return classes
