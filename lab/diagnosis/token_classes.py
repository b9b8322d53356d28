"""Token classes: special, first of a turn, part of a tool call, other. Mismatch is rarely spread evenly over them.

"KL Divergence Analysis" (jphme, gist, 2026) found its outliers at Harmony's control tokens, which the model is almost
sure of when it samples and a little less sure of when it trains.
"""

from __future__ import annotations

import re

import numpy as np

from lockstep.rollout.records import TrainingRow
from lockstep.trainer.observe.token_texts import TokenTexts

CLASSES = ("special", "first_of_turn", "tool_call", "other")
"""A partition: a token belongs to the first class that fits."""

SPECIAL, FIRST_OF_TURN, TOOL_CALL, OTHER = range(len(CLASSES))

# Hermes and Qwen3, Llama 3, Harmony. A call that was cut short extends to the end of its turn.
_TOOL_CALL = re.compile(
    r"<tool_call>.*?(?:</tool_call>|$)|<\|python_tag\|>.*$|(?:commentary )?to=functions\..*?(?:<\|call\|>|$)",
    re.DOTALL,
)


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
