"""Rollout correction: importance weights for tokens that the engine sampled and the trainer trains.

The engine samples from π_samp, the trainer computes π_old with the same weights (or newer ones), and the two differ by
kernels, precision and staleness. Tokens are therefore weighted with the importance ratio

    log ρ_t = logp_old − logp_samp,     ρ = exp(log ρ clamped to ±20),     detached

in a granularity (token; sequence: the geometric mean exp(mean_t log ρ_t) over all trained tokens of the rollout; or
sequence product) and under a control (truncate: ρ clamped into the bounds; mask: 0 outside the bounds).
`trainer/objective/correction_modes.py` names the combinations and their sources.

Two ways of leaving tokens out differ:

* a *weight mask* sets weights to 0; the token stays in every denominator of the loss normalisation;
* *rejection* takes the token out of the loss mask, and so out of the denominators.

In `bypass` mode (π_old := π_samp, one update per rollout batch) log ρ is 0 everywhere and the ratio of the policy loss
carries the mismatch itself: use mode `off` or `none` there, a second weight would correct nothing.

Dimensions: `_T` trained tokens, `_S` rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout.errors import ConfigError, EvidenceError
from trainer.objective.correction_modes import CORRECTION_MODES, Control, Granularity
from trainer.objective.kl import bounded
from trainer.objective.per_rollout import rollout_count, rollout_mean, rollout_sum
from trainer.objective.rejection import ratio_bounds, rejection_mask

DEFAULT_BOUNDS = (0.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorrectionResult:
    """Weights and loss mask of a step's trained tokens. All tensors are detached."""

    weights_T: Tensor
    """Factor of the policy loss of each token."""
    raw_weights_T: Tensor
    """The same ratios before control and before batch normalization."""
    controlled_weights_T: Tensor
    """The same ratios after control, before batch normalization: metrics of the applied weights are taken from them."""
    clipped_T: Tensor
    """bool: control changed or removed the weight of this token."""
    keep_T: Tensor
    """bool: False where a rejection criterion took the token out of the loss mask."""
    metrics: dict[str, float]
    """Shares of rejected tokens and rollouts; empty without rejection criteria."""

    def uncontrolled(self) -> CorrectionResult:
        """Return the same with the raw ratios as the applied weights: in bypass mode the ratio of the loss applies
        them."""
        return replace(self, controlled_weights_T=self.raw_weights_T, clipped_T=torch.zeros_like(self.clipped_T))


def correction_weights(
    logp_old_T: Tensor,
    logp_samp_T: Tensor,
    rollout_T: Tensor,
    num_rollouts: int,
    *,
    mode: str = "token_truncate",
    bounds: float | tuple[float, float] = DEFAULT_BOUNDS,
    rejection: Mapping[str, float | tuple[float, float]] | None = None,
    batch_normalize: bool = False,
) -> CorrectionResult:
    """Return weights and keep mask for the trained tokens of a step, in the dtype of `logp_old_T`.

    Args:
        logp_old_T: trainer's logprobs at the start of the update.
        logp_samp_T: engine's logprobs.
        rollout_T: int64 rollout of each token, in 0..num_rollouts−1.
        mode: a key of `CORRECTION_MODES`.
        bounds: τ, meaning [0, τ], or (low, high); both ends are inside.
        rejection: criterion → threshold, see `REJECTION_CRITERIA`; a token must pass all of them. Weights are
            computed over all tokens first, so rejection of a token does not change the sequence ratio of its rollout.
        batch_normalize: divide the weights by their mean over the step (token granularity: over tokens; sequence
            granularities: over rollouts that have tokens), before rejection, as verl does. A step whose weights are
            all 0 stays 0.

    Raises:
        ConfigError: unknown names or impossible bounds.
        EvidenceError: logprobs that are not finite or do not fit each other.
    """
    if mode not in CORRECTION_MODES:
        raise ConfigError(f"unknown correction mode {mode!r}; expected one of: {', '.join(CORRECTION_MODES)}")
    chosen = CORRECTION_MODES[mode]
    low, high = ratio_bounds(bounds, "correction bounds", low_default=lambda _: 0.0)
    _check_evidence(logp_old_T, logp_samp_T, rollout_T)
    with torch.no_grad():
        log_ratio_T = (logp_old_T - logp_samp_T).detach()
        raw_T = _raw_weights(log_ratio_T, rollout_T, num_rollouts, chosen.granularity)
        controlled_T, clipped_T = _controlled(raw_T, chosen.control, low, high)
        weights_T = controlled_T
        if batch_normalize and chosen.control is not None:
            weights_T = _normalized(controlled_T, rollout_T, num_rollouts, chosen.granularity)
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
    """Return (T,) the weights of `correction_weights` for modes in which the weight of a token depends on no other
    token.

    mode: `off`, `none`, or one of token granularity. For use inside a microbatch.
    """
    chosen = CORRECTION_MODES[mode]
    assert chosen.granularity is Granularity.TOKEN, f"{mode} needs all tokens of a rollout"
    ratio_T = bounded(logp_old_T - logp_samp_T).exp()
    return _controlled(ratio_T, chosen.control, *bounds)[0]


def _controlled(raw_T: Tensor, control: Control | None, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return weights within the bounds, and bool True for those that control changed or removed."""
    if control is None:
        return torch.ones_like(raw_T), torch.zeros_like(raw_T, dtype=torch.bool)
    clipped_T = (raw_T < low) | (raw_T > high)
    controlled_T = raw_T.clamp(low, high) if control is Control.TRUNCATE else raw_T.masked_fill(clipped_T, 0.0)
    return controlled_T, clipped_T


def _raw_weights(log_ratio_T: Tensor, rollout_T: Tensor, num_rollouts: int, granularity: Granularity) -> Tensor:
    """Return exp(clamp(log ρ)) per token, in the granularity asked for."""
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

    The penalty of "KL Divergence Analysis" (jphme, gist, 2026). The mean runs over the kept tokens of the whole step,
    so the penalties sum to 0 over them: tokens on which the trainer agrees less than average with the sampler lose
    advantage, the others gain it. Prompt and tool tokens have no entry here and get none.

    keep_T: bool, False for tokens that left the loss mask (rejected, or of a masked rollout).
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
