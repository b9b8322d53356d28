"""Names of the weight modes and rejection criteria of the rollout correction. Imports nothing heavy.

Sources: modes and the sequence ratio as a geometric mean, ms-swift docs, "Training-Inference-Mismatch"; truncated
importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
rejection criteria and their names, verl `rollout_corr_helper` (Liu, Li et al. 2025, "When speed kills stability").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from lockstep.trainer.objective.kl import k1, k2, k3

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "rollout_correction/"
QUANTIZATION_K3 = PREFIX + "quantization_k3"


class Granularity(StrEnum):
    TOKEN = "token"
    """ρ_t: low variance, biased for rollouts of more than one token."""
    SEQUENCE = "sequence"
    """exp(mean_t log ρ_t), the geometric mean over the rollout."""
    SEQUENCE_PRODUCT = "sequence_product"
    """exp(Σ_t log ρ_t): unbiased, but the weight within the bounds collapses with length. Never a default."""


class Control(StrEnum):
    TRUNCATE = "truncate"
    """ρ clamped into the bounds."""
    MASK = "mask"
    """0 outside the bounds, ρ inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionMode:
    """Combination of granularity and control; without control all weights are 1."""

    granularity: Granularity = Granularity.TOKEN
    control: Control | None = None

    @property
    def corrects_tokens(self) -> bool:
        """True if each token has a weight of its own."""
        return self.control is not None and self.granularity is Granularity.TOKEN


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
    """Divergence per token, reduced over the rollout, that must lie within a threshold."""

    level: str
    """token (no reduction), seq_sum, seq_mean or seq_max."""
    divergence: Callable[[Tensor], Tensor]


REJECTION_CRITERIA: dict[str, RejectionCriterion] = {
    f"{level}_{divergence.__name__}": RejectionCriterion(level=level, divergence=divergence)
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for divergence in (k1, k2, k3)
    if (level, divergence) != ("seq_max", k1)
}
"""token_k1..3, seq_sum_k1..3, seq_mean_k1..3, seq_max_k2..3 (a maximum of the signed k1 would bound one side only).

Thresholds, as in verl. k1: upper bound of the *ratio*, its inverse the lower one; kept where |k1| <= log(threshold).
k2, k3: upper bound of the divergence [nats]; kept where k <= threshold.
"""
