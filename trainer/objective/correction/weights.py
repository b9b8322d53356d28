"""Rollout correction: importance weights between the sampling and the old policy.

The engine samples from π_samp, the trainer computes π_old with the same or newer weights; the two differ by kernels,
precision and staleness. Tokens are therefore weighted with the importance ratio

    log ρ_t = logp_old − logp_samp,     ρ = exp(log ρ clamped to ±20),     detached

in a granularity (token, sequence, sequence product) and under a control (truncate, mask);
`trainer/objective/correction/modes.py` defines the combinations and names their sources.

A *weight mask* sets weights to 0, and the token stays in every denominator of the loss. *Rejection* removes the token
from the loss mask, and so from the denominators.

In `bypass` mode (π_old := π_samp, one update per rollout batch) log ρ is 0 and the ratio of the policy loss carries the
mismatch; correction weights would all be 1.

Dimensions: `_T` trained tokens, `_S` rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.rollout.errors import EvidenceError
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES, Control, Granularity
from lockstep.trainer.objective.correction.rejection import rejection_mask
from lockstep.trainer.objective.kl import bounded
from lockstep.trainer.objective.per_rollout import rollout_count, rollout_mean, rollout_sum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorrectionResult:
    """Weights and loss mask of a step's trained tokens, detached."""

    weights_T: Tensor
    """Factor of each token's policy loss."""
    raw_weights_T: Tensor
    """Ratios before control and batch normalization."""
    controlled_weights_T: Tensor
    """Ratios after control, before batch normalization; metrics of the applied weights use them."""
    clipped_T: Tensor
    """bool: True where control changed the weight."""
    keep_T: Tensor
    """bool: False for rejected tokens."""
    metrics: dict[str, float]
    """Shares of rejected tokens and rollouts; empty without rejection criteria."""

    def uncontrolled(self) -> CorrectionResult:
        """Return the result with the raw ratios as applied weights: in bypass mode the loss applies them."""
        return replace(self, controlled_weights_T=self.raw_weights_T, clipped_T=torch.zeros_like(self.clipped_T))


def correction_weights(
    logp_old_T: Tensor,
    logp_samp_T: Tensor,
    rollout_T: Tensor,
    num_rollouts: int,
    *,
    mode: str,
    bounds: tuple[float, float],
    rejection: Mapping[str, float] | None = None,
    batch_normalize: bool = False,
) -> CorrectionResult:
    """Return weights and keep mask for the trained tokens of a step, in the dtype of `logp_old_T`.

    Args:
        logp_old_T: trainer's logprobs at the start of the update.
        logp_samp_T: engine's logprobs.
        rollout_T: int64 rollout of each token, in 0..num_rollouts−1.
        mode: a key of `CORRECTION_MODES`.
        bounds: (low, high), both inside.
        rejection: criterion → threshold (`REJECTION_CRITERIA`); a token must pass all. Weights are computed over all
            tokens first, so rejecting a token does not change the sequence ratio of its rollout.
        batch_normalize: divide the weights by their mean over the step (token granularity: over tokens; sequence
            granularities: over rollouts that have tokens), before rejection, as verl does. Weights that are all 0
            stay 0.

    Raises:
        EvidenceError: logprobs that are not finite or whose shapes differ.
    """
    correction_mode = CORRECTION_MODES[mode]
    _check_evidence(logp_old_T, logp_samp_T, rollout_T)
    with torch.no_grad():
        log_ratio_T = (logp_old_T - logp_samp_T).detach()
        raw_T = _raw_weights(log_ratio_T, rollout_T, num_rollouts, correction_mode.granularity)
        controlled_T, clipped_T = _controlled(raw_T, correction_mode.control, *bounds)
        weights_T = controlled_T
        if batch_normalize and correction_mode.control is not None:
            weights_T = _normalized(controlled_T, rollout_T, num_rollouts, correction_mode.granularity)
        keep_T, metrics = rejection_mask(log_ratio_T, rollout_T, num_rollouts, rejection or {})
    return CorrectionResult(
        weights_T=weights_T,
        raw_weights_T=raw_T,
        controlled_weights_T=controlled_T,
        clipped_T=clipped_T,
        keep_T=keep_T,
        metrics=metrics,
    )


@torch.no_grad()
def token_weights(logp_old_T: Tensor, logp_samp_T: Tensor, *, mode: str, bounds: tuple[float, float]) -> Tensor:
    """Return (T,) the weights of a microbatch. mode: `off`, `none`, or one of token granularity."""
    correction_mode = CORRECTION_MODES[mode]
    assert correction_mode.granularity is Granularity.TOKEN, f"{mode} needs all tokens of a rollout"
    ratio_T = bounded(logp_old_T - logp_samp_T).exp()
    return _controlled(ratio_T, correction_mode.control, *bounds)[0]


def _controlled(raw_T: Tensor, control: Control | None, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return weights within the bounds, and bool True where control changed them."""
    if control is None:
        return torch.ones_like(raw_T), torch.zeros_like(raw_T, dtype=torch.bool)
    clipped_T = (raw_T < low) | (raw_T > high)
    controlled_T = raw_T.clamp(low, high) if control is Control.TRUNCATE else raw_T.masked_fill(clipped_T, 0.0)
    return controlled_T, clipped_T


def _raw_weights(log_ratio_T: Tensor, rollout_T: Tensor, num_rollouts: int, granularity: Granularity) -> Tensor:
    """Return exp(clamp(log ρ)) per token in the given granularity."""
    if granularity is Granularity.SEQUENCE:
        log_ratio_T = rollout_mean(log_ratio_T, rollout_T, num_rollouts)[rollout_T]
    elif granularity is Granularity.SEQUENCE_PRODUCT:
        sums_S = rollout_sum(log_ratio_T.double(), rollout_T, num_rollouts)
        log_ratio_T = sums_S.to(log_ratio_T.dtype)[rollout_T]
    return bounded(log_ratio_T).exp()


def _normalized(weights_T: Tensor, rollout_T: Tensor, num_rollouts: int, granularity: Granularity) -> Tensor:
    """Return weights with mean 1 over the tokens (or rollouts) of the step."""
    count_S = rollout_count(rollout_T, num_rollouts)
    sum_S = rollout_sum(weights_T.double(), rollout_T, num_rollouts)
    if granularity is Granularity.TOKEN:
        mean = sum_S.sum() / count_S.sum().clamp(min=1)
    else:  # all tokens of a rollout have one weight, so its mean is that weight
        mean = (sum_S / count_S.clamp(min=1)).sum() / (count_S > 0).sum().clamp(min=1)
    return torch.where(mean > 0, weights_T / mean, weights_T).to(weights_T.dtype)


def kl_penalized_advantages(
    advantages_T: Tensor, logp_samp_T: Tensor, logp_train_T: Tensor, *, coef: float, keep_T: Tensor
) -> Tensor:
    """Return A_t + coef · (mean d − d_t) with d = logp_samp − logp_train, detached.

    The penalty of "KL Divergence Analysis" (jphme, gist, 2026). The mean runs over the tokens of the step in the loss
    mask (`keep_T`), so the penalties sum to 0 over them: tokens with d above the mean lose advantage, others gain it.
    """
    diff_T = (logp_samp_T - logp_train_T).detach()
    kept_T = diff_T.double()[keep_T]
    mean = (kept_T.sum() / max(len(kept_T), 1)).to(diff_T.dtype)
    return advantages_T + coef * (mean - diff_T)


def _check_evidence(logp_old_T: Tensor, logp_samp_T: Tensor, rollout_T: Tensor) -> None:
    if not logp_old_T.shape == logp_samp_T.shape == rollout_T.shape or logp_old_T.ndim != 1:
        raise EvidenceError(
            f"rollout correction: logp_old {tuple(logp_old_T.shape)}, logp_samp {tuple(logp_samp_T.shape)} and "
            f"rollout index {tuple(rollout_T.shape)} must be flat and of one length, one entry per trained token"
        )
    for name, logp_T in (("trainer", logp_old_T), ("engine", logp_samp_T)):
        finite_T = torch.isfinite(logp_T)
        if not finite_T.all():
            where = int((~finite_T).nonzero()[0])
            raise EvidenceError(
                f"rollout correction: {int((~finite_T).sum())} of {len(logp_T)} {name} logprobs are not finite; "
                f"the first is {float(logp_T[where])} at trained token {where}, rollout {int(rollout_T[where])}"
            )
