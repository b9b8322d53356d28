"""Evidence on one case: trained tokens with both logprobs, compared with the engine's record and summarized.

d = logp_samp − logp_train per trained token [nats]; estimators as in training
(trainer/objective/correction/mismatch.py). Statistics over no tokens are left out, never NaN.

Shape legend: _N trained tokens of all rows, in the order of `StepBatch.layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.lab.diagnosis.case_distributions import CaseDistributions
from lockstep.lab.diagnosis.token_classes import CLASSES, classify
from lockstep.rollout.episode.rows import is_trainable
from lockstep.rollout.records import Rollout, TrainingRow
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.objective.correction.mismatch import PREFIX, mismatch_metrics
from lockstep.trainer.objective.correction.weights import correction_weights
from lockstep.trainer.observe.token_texts import TokenTexts

NOISE_METRICS = ("kl_v1", "kl_v2", "k3_kl", "logp_diff_abs_mean", "logp_diff_abs_max")
MISMATCH_METRICS = (*NOISE_METRICS, "pearson", "kl_v1_unforced", "kl_v2_unforced", "forced_token_ratio", "ess")
"""`*_unforced` and `forced_token_ratio` follow the two-stage mask of "KL Divergence Analysis" (jphme, gist, 2026). They
stand beside the unfiltered numbers and decide nothing."""

OFFSETS = (-1, 0, 1)
CONTEXT_CHARS = 48
MAX_WORST = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredTokens:
    """Trained tokens of a batch with the logprobs of both sides."""

    batch: StepBatch
    train_N: Tensor
    """Trainer's logprobs, packed as in training."""
    again_N: Tensor | None = None
    """Trainer's logprobs from a second pass with each row alone; None if it was not made."""
    texts: TokenTexts
    correction: CorrectionConfig

    @property
    def samp_N(self) -> Tensor:
        """Engine's logprobs, as recorded."""
        return self.batch.sampling_logprobs_N

    @cached_property
    def diff_N(self) -> Tensor:
        """float64 d."""
        return self.samp_N.double() - self.train_N.double()

    @cached_property
    def weight_N(self) -> Tensor:
        """float64 importance weights that rollout correction would apply."""
        return correction_weights(
            self.train_N.double(),
            self.samp_N.double(),
            self.batch.rollout_N,
            self.batch.num_rollouts,
            mode=self.correction.mode,
            bounds=(self.correction.low, self.correction.high),
        ).controlled_weights_T

    @cached_property
    def class_N(self) -> Tensor:
        """int64 index into `CLASSES`."""
        return _concatenated(classify(row, self.texts) for row in self.batch.rows)

    @cached_property
    def row_N(self) -> Tensor:
        """int64 index of the token's row."""
        return _concatenated(np.full(row.num_trained, index) for index, row in enumerate(self.batch.rows))

    @cached_property
    def position_N(self) -> Tensor:
        """int64 position of the token in its row."""
        return _concatenated(np.flatnonzero(row.loss_mask) for row in self.batch.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMatch:
    """Numbers of tokens in rows and record. Rows are exact by construction (docs/tokens.md): no tolerance is needed."""

    sampled: int
    """Number in the record."""
    trained: int
    """Number in the rows."""
    same_id: int
    """Trained tokens with the id that the engine sampled at that place of the turn."""
    same: int
    """Trained tokens that also have the engine's logprob."""
    lost_ends: int = 0
    """Sampled tokens missing at the end of turns whose beginning is right."""

    @property
    def match_rate(self) -> float:
        """Share of trained tokens with the engine's id and logprob; 1 without trained tokens."""
        return self.same / self.trained if self.trained else 1.0

    @property
    def id_match_rate(self) -> float:
        return self.same_id / self.trained if self.trained else 1.0

    @property
    def coverage(self) -> float:
        """Trained over sampled tokens."""
        return self.trained / self.sampled if self.sampled else 1.0

    @property
    def is_exact(self) -> bool:
        return self.sampled == self.trained == self.same


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """Second opinion of the engine on some rows: mean |Δ log π| over their trained tokens [nats]."""

    tokens: int
    record_vs_trainer: float
    """Logprobs recorded at sampling against the trainer, at the sampling temperature."""
    engine_vs_trainer: float
    """The engine's logprobs now against the trainer, at temperature 1."""
    engine_vs_record: float | None
    """The engine's logprobs now against its record; None unless sampling was at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Measurements that the verdict on a case rests on."""

    match: TokenMatch
    mismatch: Mapping[str, float]
    """`MISMATCH_METRICS`; empty without trained tokens."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """`noise_floor`; empty if rows were scored once."""
    abs_diff_by_offset: Mapping[int, float] = field(default_factory=dict)
    engine: EngineCheck | None = None
    """None if the engine was not asked (no engine, or no row that fits into its context)."""
    whole: CaseDistributions | None = None
    """None as for `engine`, or because the engine cannot send distributions."""


def match_rows(rollouts: Iterable[Rollout], rows: Sequence[TrainingRow]) -> TokenMatch:
    """Compare the trained tokens of rows with the sampled tokens of the rollouts' calls, turn by turn, in order."""
    num_sampled = num_trained = num_same_id = num_same = lost_ends = 0
    for rollout in rollouts:
        own = [row for row in rows if row.rollout_id == rollout.rollout_id]
        for turn, call in enumerate(rollout.calls):
            if not is_trainable(call):
                continue
            places = [(row, row.loss_mask & (row.turns == turn)) for row in own]
            ids = [token for row, mask in places for token in row.ids[mask]]
            logprobs = [logprob for row, mask in places for logprob in row.sampling_logprobs[mask]]
            both = min(len(ids), len(call.sampled_ids))
            same_id = np.equal(ids[:both], call.sampled_ids[:both])
            same_logprob = np.equal(logprobs[:both], np.array(call.sampled_logprobs[:both], dtype=np.float32))
            num_sampled, num_trained = num_sampled + len(call.sampled_ids), num_trained + len(ids)
            num_same_id, num_same = num_same_id + same_id.sum(), num_same + (same_id & same_logprob).sum()
            lost_ends += len(call.sampled_ids) - both if same_id.all() else 0
    return TokenMatch(
        sampled=num_sampled, trained=num_trained, same_id=int(num_same_id), same=int(num_same), lost_ends=lost_ends
    )


def mismatch(train_N: Tensor, samp_N: Tensor) -> dict[str, float]:
    """Return `MISMATCH_METRICS` of the tokens, without the prefix of training."""
    one_rollout_N = torch.zeros_like(train_N, dtype=torch.long)
    metrics = mismatch_metrics(train_N, samp_N, one_rollout_N, 1)
    return {name: metrics[PREFIX + name] for name in MISMATCH_METRICS if PREFIX + name in metrics}


def noise_floor(cases: Sequence[ScoredTokens]) -> dict[str, float]:
    """Compare the trainer with itself on the same rows in two packings; a mismatch below this says nothing."""
    again = [case.again_N for case in cases if case.again_N is not None]
    if not again:
        return {}
    metrics = mismatch(torch.cat([case.train_N for case in cases]), torch.cat(again))
    return {name: metrics[name] for name in NOISE_METRICS if name in metrics}


def by_class(scored: ScoredTokens) -> dict[str, dict[str, float]]:
    """Return the number of tokens, kl_v1 and kl_v2 of each token class that occurs."""
    return _by(scored, scored.class_N, lambda index: CLASSES[index])


def by_turn(scored: ScoredTokens) -> dict[str, dict[str, float]]:
    """Return the same for each turn: the index of the call that sampled the token."""
    return _by(scored, scored.batch.turns_N, str)


def abs_diff_by_offset(scored: ScoredTokens) -> dict[int, float]:
    """Return the mean |logp_samp[i + offset] − logp_train[i]| for offsets −1, 0, +1 within turns.

    Right rows are best at 0, logprobs stored one position late at +1, one position early at −1. Shifted inputs and
    targets are an error that "KL Divergence Analysis" (jphme, gist, 2026) found. All offsets use the same tokens i,
    those with two neighbors; otherwise their means would not compare.
    """
    row_N, turn_N = scored.row_N, scored.batch.turns_N
    continues = (row_N[1:] == row_N[:-1]) & (turn_N[1:] == turn_N[:-1])
    inner = 1 + torch.nonzero(continues[1:] & continues[:-1]).flatten()
    if not len(inner):
        return {}
    samp_N, train_N = scored.samp_N.double(), scored.train_N.double()
    return {offset: float((samp_N[inner + offset] - train_N[inner]).abs().mean()) for offset in OFFSETS}


def worst_positions(scored: ScoredTokens) -> list[dict[str, Any]]:
    """Return logprobs, place and context of the `MAX_WORST` trained tokens with the largest |d|, largest first."""
    worst = []
    for n in scored.diff_N.abs().argsort(descending=True, stable=True)[:MAX_WORST].tolist():
        index, position = int(scored.row_N[n]), int(scored.position_N[n])
        row = scored.batch.rows[index]
        texts = [scored.texts[token] for token in row.ids.tolist()]
        worst.append(
            {
                "rollout_id": row.rollout_id,
                "row": index,
                "position": position,
                "turn": int(row.turns[position]),
                "token_class": CLASSES[scored.class_N[n]],
                "token_id": int(row.ids[position]),
                "text": texts[position],
                "logp_samp": float(scored.samp_N[n]),
                "logp_train": float(scored.train_N[n]),
                "diff": float(scored.diff_N[n]),
                "before": "".join(texts[:position])[-CONTEXT_CHARS:],
                "after": "".join(texts[position + 1 :])[:CONTEXT_CHARS],
            }
        )
    return worst


def _by(scored: ScoredTokens, part_N: Tensor, name: Callable[[int], str]) -> dict[str, dict[str, float]]:
    parts = {}
    for part in part_N.unique().tolist():
        inside = part_N == part
        metrics = mismatch(scored.train_N[inside], scored.samp_N[inside])
        parts[name(part)] = {"tokens": float(inside.sum()), "kl_v1": metrics["kl_v1"], "kl_v2": metrics["kl_v2"]}
    return parts


def _concatenated(arrays: Iterable[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *arrays]))
