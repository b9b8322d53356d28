"""Rejection: tokens leave the loss mask where sampler and trainer disagree too much about them.

A rejected token leaves every denominator as well; a token whose correction weight is masked to 0 does not.
The criteria are `trainer/objective/correction_modes.py`'s.

Dimensions: `_T` trained tokens, `_S` rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rollout.errors import ConfigError
from trainer.objective.correction_modes import REJECTION_CRITERIA, RejectionCriterion
from trainer.objective.kl import bounded, k1
from trainer.objective.per_rollout import rollout_count, rollout_max, rollout_mean, rollout_sum


def rejection_mask(
    log_ratio_T: Tensor,
    rollout_T: Tensor,
    num_rollouts: int,
    criteria: Mapping[str, float | tuple[float, float]],
) -> tuple[Tensor, dict[str, float]]:
    """Return (T,) bool True for tokens that pass every criterion, and metrics. The log ratio is clamped to ±20 first.

    Metrics `rollout_correction/rejected_<name>_frac` (share of tokens that this criterion rejects), and with any
    criterion at all `rejected_frac` (tokens) and `rejected_rollouts_frac` (rollouts that lost a token).
    """
    log_ratio_T = bounded(log_ratio_T.detach())
    keep_T = torch.ones_like(rollout_T, dtype=torch.bool)
    if not criteria:
        return keep_T, {}
    rejected: dict[str, Tensor] = {}
    for name, threshold in criteria.items():
        if name not in REJECTION_CRITERIA:
            raise ConfigError(f"unknown rejection criterion {name!r}; expected one of: {', '.join(REJECTION_CRITERIA)}")
        criterion = REJECTION_CRITERIA[name]
        low, high = _divergence_bounds(name, criterion, threshold)
        value_T = _reduce(criterion.divergence(log_ratio_T), rollout_T, num_rollouts, criterion.level)
        passes_T = (value_T >= low) & (value_T <= high)
        rejected[f"rejected_{name}_frac"] = (~passes_T).sum()
        keep_T = keep_T & passes_T
    rejected["rejected_frac"] = (~keep_T).sum()

    count_S = rollout_count(rollout_T, num_rollouts)
    lost_S = rollout_count(rollout_T[~keep_T], num_rollouts)
    num_tokens, num_rollouts_with_tokens = len(rollout_T), int((count_S > 0).sum())
    metrics = {f"rollout_correction/{name}": int(num) / max(num_tokens, 1) for name, num in rejected.items()}
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


def _divergence_bounds(
    name: str, criterion: RejectionCriterion, threshold: float | tuple[float, float]
) -> tuple[float, float]:
    if criterion.divergence is k1:
        low, high = ratio_bounds(threshold, f"threshold of {name}", low_default=lambda high: 1.0 / high)
        if low <= 0:
            raise ConfigError(f"threshold of {name}: the lower ratio is {low}, expected above 0, for example 0.5")
        return math.log(low), math.log(high)
    if isinstance(threshold, Sequence):
        raise ConfigError(f"threshold of {name}: found {threshold}, expected one upper bound, for example 0.01")
    if not threshold > 0:
        raise ConfigError(f"threshold of {name}: found {threshold}, expected a positive number, for example 0.01")
    return -math.inf, float(threshold)


def ratio_bounds(
    bounds: float | tuple[float, float], name: str, *, low_default: Callable[[float], float]
) -> tuple[float, float]:
    """Return (low, high) of a setting that is an upper bound or a pair. Raises `ConfigError` if no ratio lies
    between."""
    if isinstance(bounds, Sequence):
        if len(bounds) != 2:
            raise ConfigError(f"{name}: found {bounds}, expected a number or [low, high]")
        low, high = (float(bound) for bound in bounds)
    else:
        high = float(bounds)
        low = low_default(high) if high > 0 else 0.0
    if not (0 <= low <= high and high > 0):
        raise ConfigError(f"{name}: found low {low}, high {high}, expected 0 <= low <= high and high > 0")
    return low, high
