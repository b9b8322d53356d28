"""Rejection: tokens leave the loss mask where the logprobs of sampler and trainer differ by more than a threshold.

A rejected token also leaves every denominator; a token whose correction weight is masked to 0 does not. Criteria and
thresholds: `trainer/objective/correction/modes.py`.

Dimensions: `_T` trained tokens, `_S` rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.trainer.objective.correction.modes import REJECTION_CRITERIA
from lockstep.trainer.objective.kl import bounded, k1
from lockstep.trainer.objective.per_rollout import rollout_count, rollout_max, rollout_mean, rollout_sum


def rejection_mask(
    log_ratio_T: Tensor, rollout_T: Tensor, num_rollouts: int, criteria: Mapping[str, float]
) -> tuple[Tensor, dict[str, float]]:
    """Return (T,) bool True for tokens that pass every criterion, and metrics. The log ratio is clamped to ±20 first.

    Metrics, empty without criteria: `rollout_correction/rejected_<name>_frac` (share of tokens that this criterion
    rejects), `rejected_frac` (share of tokens) and `rejected_rollouts_frac` (share of rollouts that lost a token).
    """
    log_ratio_T = bounded(log_ratio_T.detach())
    keep_T = torch.ones_like(rollout_T, dtype=torch.bool)
    if not criteria:
        return keep_T, {}
    counts: dict[str, Tensor] = {}
    for name, threshold in criteria.items():
        criterion = REJECTION_CRITERIA[name]
        high = math.log(threshold) if criterion.divergence is k1 else threshold
        value_T = _reduce(criterion.divergence(log_ratio_T), rollout_T, num_rollouts, criterion.level)
        passes_T = (value_T >= -high) & (value_T <= high)  # k2 and k3 are never negative
        counts[f"rejected_{name}_frac"] = (~passes_T).sum()
        keep_T = keep_T & passes_T
    counts["rejected_frac"] = (~keep_T).sum()

    count_S = rollout_count(rollout_T, num_rollouts)
    lost_S = rollout_count(rollout_T[~keep_T], num_rollouts)
    num_tokens, num_rollouts_with_tokens = len(rollout_T), int((count_S > 0).sum())
    metrics = {f"rollout_correction/{name}": int(num) / max(num_tokens, 1) for name, num in counts.items()}
    lost_share = int((lost_S > 0).sum()) / max(num_rollouts_with_tokens, 1)
    metrics["rollout_correction/rejected_rollouts_frac"] = lost_share
    return keep_T, metrics


def _reduce(value_T: Tensor, rollout_T: Tensor, num_rollouts: int, level: str) -> Tensor:
    """Return the rollout's value at each of its tokens."""
    if level == "token":
        return value_T
    if level == "seq_mean":
        return rollout_mean(value_T, rollout_T, num_rollouts)[rollout_T]
    if level == "seq_sum":
        return rollout_sum(value_T.double(), rollout_T, num_rollouts).to(value_T.dtype)[rollout_T]
    return rollout_max(value_T, rollout_T, num_rollouts)[rollout_T]
