"""Training rows with the trainer's logprobs beside the engine's: what every number of the diagnosis is made from.

Shape legend: _L tokens of a row, _T its trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rollout.records import TrainingRow
from trainer.diagnosis.classes import TokenTexts, classify
from trainer.objective.correction import correction_weights


class Scorer(Protocol):
    """The trainer's side: log π of the trained tokens of rows under its weights as they are."""

    def __call__(
        self, rows: Sequence[TrainingRow], *, temperature: float | None = None, alone: bool = False
    ) -> list[np.ndarray]:
        """One (T,) array per row.

        Args:
            temperature: that logits are divided by; None: the one that was sampled with.
            alone: every row in a pack of its own, instead of packed as in training.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredRow:
    """A training row and what the trainer makes of it. All `_T` arrays are in the order of the trained tokens."""

    row: TrainingRow
    position_T: np.ndarray
    """int64: where in the row the token is."""
    logp_samp_T: np.ndarray
    """float64: the engine's logprob."""
    logp_train_T: np.ndarray
    """float64: the trainer's, packed as in training."""
    logp_again_T: np.ndarray
    """float64: the trainer's once more, each row alone. Their difference is the noise floor."""
    class_T: np.ndarray
    """int64: index into `CLASSES`."""
    weight_T: np.ndarray
    """float64: the importance weight that rollout correction would apply."""

    @property
    def diff_T(self) -> np.ndarray:
        """logp_samp − logp_train."""
        return self.logp_samp_T - self.logp_train_T

    @property
    def turn_T(self) -> np.ndarray:
        return self.row.turns[self.position_T]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """How the run that is diagnosed weighs its tokens."""

    mode: str = "token_truncate"
    low: float = 0.0
    high: float = 2.0


def score_rows(
    rows: Sequence[TrainingRow], scorer: Scorer, texts: TokenTexts, correction: CorrectionSettings
) -> list[ScoredRow]:
    """Score rows twice, in two packings, and put everything that is known of their trained tokens together."""
    packed = [scores.astype(np.float64) for scores in scorer(rows)]
    again = [scores.astype(np.float64) for scores in scorer(rows, alone=True)]
    weights = _weights(rows, packed, correction)
    scored = []
    for row, train_T, again_T, weight_T in zip(rows, packed, again, weights, strict=True):
        position_T = np.flatnonzero(row.loss_mask)
        scored.append(
            ScoredRow(
                row=row,
                position_T=position_T,
                logp_samp_T=row.sampling_logprobs[position_T].astype(np.float64),
                logp_train_T=train_T,
                logp_again_T=again_T,
                class_T=classify(row, texts),
                weight_T=weight_T,
            )
        )
    return scored


def rollout_index(rows: Sequence[TrainingRow]) -> tuple[list[int], int]:
    """Index of each row's rollout, in order of first appearance, and the number of rollouts."""
    index = {rollout_id: i for i, rollout_id in enumerate(dict.fromkeys(row.rollout_id for row in rows))}
    return [index[row.rollout_id] for row in rows], len(index)


def _weights(
    rows: Sequence[TrainingRow], scores: Sequence[np.ndarray], correction: CorrectionSettings
) -> list[np.ndarray]:
    counts = [row.num_trained for row in rows]
    index, num_rollouts = rollout_index(rows)
    result = correction_weights(
        torch.from_numpy(np.concatenate(scores)) if rows else torch.zeros(0, dtype=torch.float64),
        torch.from_numpy(np.concatenate([row.sampling_logprobs[row.loss_mask] for row in rows]).astype(np.float64))
        if rows
        else torch.zeros(0, dtype=torch.float64),
        torch.from_numpy(np.repeat(np.array(index, dtype=np.int64), counts)),
        num_rollouts,
        mode=correction.mode,
        bounds=(correction.low, correction.high),
    )
    return np.split(result.controlled_weights_T.numpy(), np.cumsum(counts)[:-1]) if rows else []
