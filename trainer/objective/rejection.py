"""Rejection: which tokens leave the loss mask because sampler and trainer disagree too much about them.

A rejected token leaves every denominator as well; a token whose correction weight is masked to 0 does not.
The criteria carry verl's names (`rollout_corr_helper`; Liu, Li et al. 2025, "When speed kills stability").

Dimensions: `_T` trained tokens, `_S` rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import ConfigError
from trainer.objective.kl import LOG_RATIO_BOUND, k1, k2, k3
from trainer.objective.per_rollout import LOCAL, RankReduction, rollout_count, rollout_max, rollout_mean, rollout_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionCriterion:
    """A divergence per token, reduced over the rollout (or not: `token`), that must lie within a threshold."""

    level: str
    """token, seq_sum, seq_mean or seq_max."""
    divergence: Callable[[Tensor], Tensor]


REJECTION_CRITERIA: dict[str, RejectionCriterion] = {
    f"{level}_{divergence.__name__}": RejectionCriterion(level=level, divergence=divergence)
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for divergence in (k1, k2, k3)
    if (level, divergence) != ("seq_max", k1)
}
"""verl's names: token_k1..3, seq_sum_k1..3, seq_mean_k1..3, seq_max_k2..3 (a maximum of the signed k1 would bound one
side only).

Thresholds, also as verl has them. k1: bounds of the *ratio*, (low, high) or a single high, which means (1/high, high);
kept where log(low) <= k1 <= log(high). Since k1 = −log ρ, these bound 1/ρ; symmetric bounds bound both alike.
k2, k3: one upper bound of the divergence itself, in nats; kept where k <= bound.
"""


def rejection_mask(
    log_ratio_T: Tensor,
    rollout_T: Tensor,
    num_rollouts: int,
    criteria: Mapping[str, float | tuple[float, float]],
    *,
    over_ranks: RankReduction = LOCAL,
) -> tuple[Tensor, dict[str, float]]:
    """(keep_T bool, metrics): tokens that pass every criterion. The log ratio is clamped to ±20 first.

    Metrics `rollout_correction/rejected_<name>_frac` (share of tokens that this criterion rejects), and with any
    criterion at all `rejected_frac` (tokens) and `rejected_rollouts_frac` (rollouts that lost a token).
    """
    log_ratio_T = log_ratio_T.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    keep_T = torch.ones_like(rollout_T, dtype=torch.bool)
    if not criteria:
        return keep_T, {}
    rejected: dict[str, Tensor] = {}
    for name, threshold in criteria.items():
        if name not in REJECTION_CRITERIA:
            raise ConfigError(f"unknown rejection criterion {name!r}; expected one of: {', '.join(REJECTION_CRITERIA)}")
        criterion = REJECTION_CRITERIA[name]
        low, high = _divergence_bounds(name, criterion, threshold)
        value_T = _reduce(criterion.divergence(log_ratio_T), rollout_T, num_rollouts, criterion.level, over_ranks)
        passes_T = (value_T >= low) & (value_T <= high)
        rejected[f"rejected_{name}_frac"] = (~passes_T).sum()
        keep_T = keep_T & passes_T
    rejected["rejected_frac"] = (~keep_T).sum()

    count_S = over_ranks.sum(rollout_count(rollout_T, num_rollouts))
    lost_S = over_ranks.sum(rollout_sum((~keep_T).double(), rollout_T, num_rollouts))
    totals = over_ranks.sum(torch.stack(list(rejected.values())).double())
    shares = totals / count_S.sum().clamp(min=1)
    metrics = {f"rollout_correction/{name}": float(share) for name, share in zip(rejected, shares, strict=True)}
    metrics["rollout_correction/rejected_rollouts_frac"] = float((lost_S > 0).sum() / (count_S > 0).sum().clamp(min=1))
    return keep_T, metrics


def _reduce(value_T: Tensor, rollout_T: Tensor, num_rollouts: int, level: str, over_ranks: RankReduction) -> Tensor:
    """The rollout's value at each of its tokens."""
    if level == "token":
        return value_T
    if level == "seq_mean":
        return rollout_mean(value_T, rollout_T, num_rollouts, over_ranks=over_ranks)[rollout_T]
    if level == "seq_sum":
        sums_S = over_ranks.sum(rollout_sum(value_T.double(), rollout_T, num_rollouts))
        return sums_S.to(value_T.dtype)[rollout_T]
    return over_ranks.max(rollout_max(value_T, rollout_T, num_rollouts))[rollout_T]


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
    """(low, high) of a setting that is a single upper bound or a pair; ConfigError if no ratio can lie between."""
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
