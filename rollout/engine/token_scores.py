"""Scores of given tokens by an engine's model: a teacher's evidence about the tokens that a student sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import ENGINE_FILLER_LOGPROB

MAX_LOGPROB = 1e-4
"""Largest logprob that rounding explains, as in `EngineCall`."""
MAX_TOTAL = 1 + 1e-3
"""Largest sum of the probabilities of different tokens that rounding explains, also in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """Logprobs at temperature 1 of the tokens after the first of a sequence, and of the most probable tokens there.

    Raises `EvidenceError` for arrays of other lengths or types, logprobs that are non-finite, positive or the engine's
    filler, ids that occur twice at a position, probabilities that add up to more than 1, and scores of other tokens: a
    token among the most probable ones has the logprob that it has there, another one at most the least of theirs.
    """

    ids: np.ndarray
    """(L,) int64 the sequence."""
    logprobs: np.ndarray
    """(L - 1,) float32 log π(ids[i] | ids[:i]), i >= 1."""
    top_ids: np.ndarray
    """(L - 1, K) int32 the most probable tokens at the same positions, in falling order."""
    top_logprobs: np.ndarray
    """(L - 1, K) float32."""
    version: int
    """Version of the weights."""

    def __post_init__(self) -> None:
        num = len(self.ids) - 1
        shape = (num, *self.top_ids.shape[1:])
        shapes = (self.logprobs.shape, self.top_ids.shape, self.top_logprobs.shape)
        if num < 1 or len(shape) != 2 or shapes != ((num,), shape, shape):
            raise EvidenceError(
                f"token scores: {len(self.ids)} ids, logprobs of shape {self.logprobs.shape}, most probable tokens of "
                f"shapes {self.top_ids.shape} and {self.top_logprobs.shape}; expected one row per id but the first"
            )
        check_values(self.logprobs, self.top_ids, self.top_logprobs)
        check_tokens(self.ids[1:], self.logprobs, self.top_ids, self.top_logprobs)

    @property
    def top_k(self) -> int:
        """K."""
        return self.top_ids.shape[1]


def check_values(logprobs: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray) -> None:
    """Raise `EvidenceError` for values that no scores have: see `TokenScores`. Arrays: (N,), (N, K), (N, K)."""
    types = (logprobs.dtype, top_ids.dtype, top_logprobs.dtype)
    if types != (np.float32, np.int32, np.float32):
        raise EvidenceError(
            f"token scores: arrays of the types {', '.join(map(str, types))}; expected float32, int32, float32"
        )
    for name, values in (("token", logprobs), ("most probable token", top_logprobs)):
        is_bad = ~((values > ENGINE_FILLER_LOGPROB) & (values <= MAX_LOGPROB))  # also NaN
        if is_bad.any():
            position = int(np.argwhere(is_bad)[0, 0])
            raise EvidenceError(
                f"token scores: a {name} at position {position + 1} has logprob {values[position]}; expected "
                f"finite values in ({ENGINE_FILLER_LOGPROB:g}, 0]"
            )
    if not top_ids.size:
        return
    in_order = np.sort(top_ids, 1)
    if (np.diff(in_order, axis=1) == 0).any() or in_order.min() < 0:
        raise EvidenceError("token scores: a most probable token occurs twice at a position, or has a negative id")
    if (np.exp(top_logprobs.astype(np.float64)).sum(1) > MAX_TOTAL).any():
        raise EvidenceError("token scores: probabilities of different tokens add up to more than 1")


def check_tokens(tokens: np.ndarray, logprobs: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray) -> None:
    """Raise `EvidenceError` if the scores cannot be those of the tokens, (N,) int64: see `TokenScores`."""
    if not top_ids.size:
        return
    is_own = top_ids == tokens[:, None]
    own_logprobs = np.where(is_own, top_logprobs, np.float32(0)).sum(1)
    is_listed, least = is_own.any(1), top_logprobs.min(1)
    is_other = np.where(is_listed, own_logprobs != logprobs, logprobs > least)
    if is_other.any():
        position = int(is_other.argmax())
        raise EvidenceError(
            f"token scores: token {tokens[position]} at position {position + 1} has logprob {logprobs[position]}, "
            "which does not agree with the most probable tokens there: the scores belong to other tokens"
        )


def token_scores(
    ids: Sequence[int],
    flat_ids: Sequence[int],
    flat_logprobs: Sequence[float],
    *,
    top_k: int,
    version: int,
    vocab_size: int,
    source: str,
) -> TokenScores:
    """Make the record from vLLM's flat lists: at each position but the first the token, then the `top_k` most probable.

    vocab_size: number of ids that the trained model has. source: name of the engine, for messages. Raises
    `EvidenceError` for lists of other lengths, other tokens, or ids outside the vocabulary.
    """
    shape = (len(ids) - 1, top_k + 1)
    if len(flat_ids) != shape[0] * shape[1] or len(flat_logprobs) != len(flat_ids):
        raise EvidenceError(
            f"{source}: {len(flat_ids)} scored tokens and {len(flat_logprobs)} logprobs, expected {shape[1]} at each "
            f"of {shape[0]} positions"
        )
    table = np.asarray(flat_ids, dtype=np.int64).reshape(shape)
    logprobs = np.asarray(flat_logprobs, dtype=np.float32).reshape(shape)
    sent_ids = np.asarray(ids, dtype=np.int64)
    if (table[:, 0] != sent_ids[1:]).any():
        raise EvidenceError(f"{source}: the logprobs do not belong to the {len(ids)} ids that were sent")
    if table.size and not 0 <= table.min() <= table.max() < vocab_size:
        raise EvidenceError(f"{source}: scored token id {table.max()} is outside the vocabulary of {vocab_size}")
    return TokenScores(
        ids=sent_ids,
        logprobs=logprobs[:, 0],
        top_ids=table[:, 1:].astype(np.int32),
        top_logprobs=logprobs[:, 1:],
        version=version,
    )
