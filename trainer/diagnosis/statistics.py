"""How far engine and trainer are apart: in all, by token class, by turn, at neighbouring positions, at the worst ones.

d = logp_samp − logp_train per trained token. The estimators are those of training (trainer/objective/mismatch.py); here
they are taken over parts of the tokens too. What a part without tokens would say is left out, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.diagnosis.classes import CLASSES, TokenTexts
from trainer.diagnosis.scored import ScoredRow
from trainer.objective.mismatch import PREFIX, mismatch_metrics

METRICS = (
    *("kl_v1", "kl_v2", "k3_kl", "logp_diff_abs_mean", "logp_diff_abs_max", "pearson"),
    *("kl_v1_unforced", "kl_v2_unforced", "forced_token_ratio", "ess"),
)
"""Of `mismatch_metrics`, the ones that a diagnosis reads. `*_unforced` and `forced_token_ratio` are seed 000's
two-stage mask: they stand beside the unfiltered numbers and decide nothing."""

OFFSETS = (-1, 0, 1)
CONTEXT_CHARS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstPosition:
    """A trained token on which engine and trainer disagree the most, where a person can find it."""

    rollout_id: int
    row: int
    """Index among the rows of the case."""
    position: int
    turn: int
    token_class: str
    token_id: int
    text: str
    logp_samp: float
    logp_train: float
    diff: float
    before: str
    after: str


def mismatch(scored: Sequence[ScoredRow], *, pick: Callable[[ScoredRow], np.ndarray] | None = None) -> dict[str, float]:
    """`METRICS` without their prefix, over the trained tokens that `pick` chooses ((T,) bool per row; None: all)."""
    chosen = [(s, slice(None) if pick is None else pick(s)) for s in scored]
    return _metrics([s.logp_train_T[inside] for s, inside in chosen], [s.logp_samp_T[inside] for s, inside in chosen])


def noise_floor(scored: Sequence[ScoredRow]) -> dict[str, float]:
    """The trainer against itself: the same rows in two packings. Below this, the mismatch says nothing."""
    metrics = _metrics([s.logp_train_T for s in scored], [s.logp_again_T for s in scored])
    return {name: metrics[name] for name in METRICS[:5] if name in metrics}


def by_class(scored: Sequence[ScoredRow]) -> dict[str, dict[str, float]]:
    """Number of tokens, kl_v1 and kl_v2 of each token class that occurs."""
    return _by(scored, lambda s: s.class_T, CLASSES)


def by_turn(scored: Sequence[ScoredRow]) -> dict[str, dict[str, float]]:
    """The same by turn: index of the call, in order, that sampled the token."""
    last = max((int(s.turn_T.max()) for s in scored if len(s.turn_T)), default=-1)
    return _by(scored, lambda s: s.turn_T, [str(turn) for turn in range(last + 1)])


def abs_diff_by_offset(scored: Sequence[ScoredRow]) -> dict[int, float]:
    """Mean |logp_samp[i + offset] − logp_train[i]| over neighbours of one turn, for offsets −1, 0, +1.

    Right rows are best at 0. If the sampling logprobs were put one position too late (seed 000, issue 3: inputs and
    targets are shifted against each other), they are best at +1; one too early, at −1.
    """
    sums, counts = dict.fromkeys(OFFSETS, 0.0), dict.fromkeys(OFFSETS, 0)
    for s in scored:
        for turn in np.unique(s.turn_T):
            inside = s.turn_T == turn
            samp, train = s.logp_samp_T[inside], s.logp_train_T[inside]
            inner = np.arange(1, len(samp) - 1)  # the same tokens for all offsets, or their means would not compare
            for offset in OFFSETS:
                sums[offset] += float(np.abs(samp[inner + offset] - train[inner]).sum())
                counts[offset] += len(inner)
    return {offset: sums[offset] / counts[offset] for offset in OFFSETS if counts[offset]}


def worst_positions(scored: Sequence[ScoredRow], texts: TokenTexts, *, count: int = 8) -> list[WorstPosition]:
    """The trained tokens with the largest |d|, largest first, with the text around them."""
    places = [(float(abs(d)), r, t) for r, s in enumerate(scored) for t, d in enumerate(s.diff_T)]
    places.sort(key=lambda place: (-place[0], place[1], place[2]))
    return [_worst(scored[r], r, t, texts) for _, r, t in places[:count]]


def _worst(s: ScoredRow, row_index: int, t: int, texts: TokenTexts) -> WorstPosition:
    position = int(s.position_T[t])
    ids = s.row.ids.tolist()
    before = "".join(texts[token] for token in ids[max(0, position - CONTEXT_CHARS) : position])
    after = "".join(texts[token] for token in ids[position + 1 : position + 1 + CONTEXT_CHARS])
    return WorstPosition(
        rollout_id=s.row.rollout_id,
        row=row_index,
        position=position,
        turn=int(s.turn_T[t]),
        token_class=CLASSES[s.class_T[t]],
        token_id=ids[position],
        text=texts[ids[position]],
        logp_samp=float(s.logp_samp_T[t]),
        logp_train=float(s.logp_train_T[t]),
        diff=float(s.diff_T[t]),
        before=before[-CONTEXT_CHARS:],
        after=after[:CONTEXT_CHARS],
    )


def _by(
    scored: Sequence[ScoredRow], key: Callable[[ScoredRow], np.ndarray], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    parts: dict[str, dict[str, float]] = {}
    for index, name in enumerate(names):
        tokens = sum(int((key(s) == index).sum()) for s in scored)
        if tokens:
            metrics = mismatch(scored, pick=lambda s, index=index: key(s) == index)
            parts[name] = {"tokens": float(tokens), "kl_v1": metrics["kl_v1"], "kl_v2": metrics["kl_v2"]}
    return parts


def _metrics(train: Sequence[np.ndarray], samp: Sequence[np.ndarray]) -> dict[str, float]:
    rollout = np.repeat(np.arange(len(train)), [len(part) for part in train]) if train else np.zeros(0, dtype=np.int64)
    metrics = mismatch_metrics(
        torch.from_numpy(np.concatenate([np.zeros(0), *train])),
        torch.from_numpy(np.concatenate([np.zeros(0), *samp])),
        torch.from_numpy(rollout.astype(np.int64)),
        len(train),
    )
    return {name: metrics[PREFIX + name] for name in METRICS if PREFIX + name in metrics}
