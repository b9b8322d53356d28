"""Names of the rollout correction: modes of its weights, and criteria of rejection. Imports nothing heavy.

Sources: modes and the sequence ratio as a geometric mean, ms-swift docs, "Training-Inference-Mismatch"; truncated
importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
rejection criteria and their names, verl `rollout_corr_helper` (Liu, Li et al. 2025, "When speed kills stability").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trainer.objective.kl import k1, k2, k3

if TYPE_CHECKING:
    from torch import Tensor


class Granularity(StrEnum):
    TOKEN = "token"
    """ρ_t: low variance, biased as soon as a rollout has more than one token."""
    SEQUENCE = "sequence"
    """exp(mean_t log ρ_t), the geometric mean, the same for all tokens of the rollout."""
    SEQUENCE_PRODUCT = "sequence_product"
    """exp(Σ_t log ρ_t): unbiased, but the weight that bounds retain collapses with length. Never a default."""


class Control(StrEnum):
    TRUNCATE = "truncate"
    """Clamp into the bounds: every token keeps some weight."""
    MASK = "mask"
    """0 outside the bounds, ρ inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionMode:
    """A named combination. `control=None`: all weights are 1, and the raw ratios are only measured."""

    granularity: Granularity = Granularity.TOKEN
    control: Control | None = None


CORRECTION_MODES: dict[str, CorrectionMode] = {
    f"{granularity}_{control}": CorrectionMode(granularity=granularity, control=control)
    for granularity in Granularity
    for control in Control
} | {
    "off": CorrectionMode(),
    "none": CorrectionMode(),
}
"""{token, sequence, sequence_product}_{truncate, mask}, `off` (metrics only) and `none` (not even metrics)."""


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
