"""Rollout correction: what to do about tokens that another program sampled than the one that trains.

The engine samples from π_samp, the trainer computes π_old with the same weights (or older ones), and the two differ:
kernels, precision, staleness. Tokens are therefore weighted with the importance ratio

    log ρ_t = logp_old − logp_samp,     ρ = exp(log ρ clamped to ±20),     detached

in a granularity (token; sequence: the geometric mean exp(mean_t log ρ_t) over all trained tokens of the rollout; or
sequence product) and under a control (truncate: ρ clamped into the bounds; mask: 0 outside the bounds).

Two ways of leaving tokens out, which are not the same:

* a *weight mask* sets weights to 0; the token stays in every denominator of the loss normalisation;
* *rejection* takes the token out of the loss mask, and so out of the denominators.

In `bypass` mode (π_old := π_samp, one update per rollout batch) log ρ is 0 everywhere and the ratio of the policy loss
carries the mismatch itself: use mode `off` or `none` there, a second weight would correct nothing.

Sources: seed 001 (modes, sequence ratio as a geometric mean); truncated importance sampling, Yao et al. 2025,
"Your efficient RL framework secretly brings you off-policy RL training"; rejection by divergence and its names,
verl `rollout_corr_helper` (Liu, Li et al. 2025, "When speed kills stability").

Dimensions: `_T` trained tokens, `_S` rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from rollout.errors import ConfigError, EvidenceError
from trainer.objective.kl import LOG_RATIO_BOUND
from trainer.objective.per_rollout import LOCAL, RankReduction, rollout_count, rollout_mean, rollout_sum
from trainer.objective.rejection import ratio_bounds, rejection_mask


class Granularity(StrEnum):
    TOKEN = "token"
    """ρ_t: low variance, biased as soon as a rollout has more than one token."""
    SEQUENCE = "sequence"
    """exp(mean_t log ρ_t), the geometric mean, the same for all tokens of the rollout (seed 001)."""
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
    "none": CorrectionMode(),  # the caller does not measure either
    "off": CorrectionMode(),
} | {
    f"{granularity}_{control}": CorrectionMode(granularity=granularity, control=control)
    for granularity in Granularity
    for control in Control
}
"""`none`, `off` (metrics only), and {token, sequence, sequence_product}_{truncate, mask}."""

DEFAULT_BOUNDS = (0.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorrectionResult:
    """Weights and loss mask of this rank's tokens. All tensors are detached."""

    weights_T: Tensor
    """What multiplies the policy loss of each token."""
    raw_weights_T: Tensor
    """The same ratios before control and before batch normalisation."""
    controlled_weights_T: Tensor
    """After control, before batch normalisation: what metrics of the applied weights are taken from."""
    clipped_T: Tensor
    """bool: control changed or removed the weight of this token."""
    keep_T: Tensor
    """bool: False where a rejection criterion took the token out of the loss mask."""
    metrics: dict[str, float]
    """Shares of rejected tokens and rollouts, over all ranks; empty without rejection criteria."""

    def as_applied_by_the_loss(self) -> CorrectionResult:
        """The same for statistics where the loss's own ratio is the weight (bypass): uncontrolled."""
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
    over_ranks: RankReduction = LOCAL,
) -> CorrectionResult:
    """Weights and keep mask for the trained tokens of this rank.

    Args:
        logp_old_T: trainer's logprobs at the start of the update. logp_samp_T: the engine's.
        rollout_T: int64 index of each token's rollout, in 0..num_rollouts−1, equal on all ranks.
        mode: a key of `CORRECTION_MODES`.
        bounds: τ, meaning [0, τ], or (low, high); both ends are inside.
        rejection: criterion → threshold, see `trainer.objective.rejection.REJECTION_CRITERIA`; a token must pass all of
        them.
            Weights are computed over all tokens first: rejecting a token changes nobody's sequence ratio.
        batch_normalize: divide the weights by their mean over the step (token granularity: over tokens; sequence
            granularities: over rollouts that have tokens), before rejection, as verl does. A step whose weights are
            all 0 stays 0.
        over_ranks: makes per-rollout sums global when a rollout may be spread over ranks.

    Returns dtype of `logp_old_T`. No tokens is fine (empty results).
    Raises ConfigError for unknown names and impossible bounds, EvidenceError for logprobs that are not finite or do
    not fit each other.
    """
    if mode not in CORRECTION_MODES:
        raise ConfigError(f"unknown correction mode {mode!r}; expected one of: {', '.join(CORRECTION_MODES)}")
    chosen = CORRECTION_MODES[mode]
    low, high = ratio_bounds(bounds, "correction bounds", low_default=lambda _: 0.0)
    _check_evidence(logp_old_T, logp_samp_T, rollout_T)
    with torch.no_grad():
        log_ratio_T = (logp_old_T - logp_samp_T).detach()
        raw_T = _raw_weights(log_ratio_T, rollout_T, num_rollouts, chosen.granularity, over_ranks)
        controlled_T, clipped_T = _controlled(raw_T, chosen.control, low, high)
        weights_T = controlled_T
        if batch_normalize and chosen.control is not None:
            weights_T = _normalized(controlled_T, rollout_T, num_rollouts, chosen.granularity, over_ranks)
        keep_T, metrics = rejection_mask(log_ratio_T, rollout_T, num_rollouts, rejection or {}, over_ranks=over_ranks)
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
    """(T,) the weights of `correction_weights` where no token's weight depends on another token.

    mode: `off`, `none`, or one of token granularity. For use inside a microbatch.
    """
    chosen = CORRECTION_MODES[mode]
    assert chosen.granularity is Granularity.TOKEN, f"{mode} needs all tokens of a rollout"
    ratio_T = (logp_old_T - logp_samp_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return _controlled(ratio_T, chosen.control, *bounds)[0]


def _controlled(raw_T: Tensor, control: Control | None, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Weights within the bounds, and (bool) which of them control changed or removed."""
    if control is None:
        return torch.ones_like(raw_T), torch.zeros_like(raw_T, dtype=torch.bool)
    clipped_T = (raw_T < low) | (raw_T > high)
    controlled_T = raw_T.clamp(low, high) if control is Control.TRUNCATE else raw_T.masked_fill(clipped_T, 0.0)
    return controlled_T, clipped_T


def _raw_weights(
    log_ratio_T: Tensor, rollout_T: Tensor, num_rollouts: int, granularity: Granularity, over_ranks: RankReduction
) -> Tensor:
    """exp(clamp(log ρ)) per token, in the granularity asked for."""
    if granularity is Granularity.SEQUENCE:
        log_ratio_T = rollout_mean(log_ratio_T, rollout_T, num_rollouts, over_ranks=over_ranks)[rollout_T]
    elif granularity is Granularity.SEQUENCE_PRODUCT:
        sums_S = over_ranks.sum(rollout_sum(log_ratio_T.double(), rollout_T, num_rollouts))
        log_ratio_T = sums_S.to(log_ratio_T.dtype)[rollout_T]
    return log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _normalized(
    weights_T: Tensor, rollout_T: Tensor, num_rollouts: int, granularity: Granularity, over_ranks: RankReduction
) -> Tensor:
    """Weights with mean 1 over the tokens (or rollouts) of the step."""
    count_S = over_ranks.sum(rollout_count(rollout_T, num_rollouts))
    sum_S = over_ranks.sum(rollout_sum(weights_T.double(), rollout_T, num_rollouts))
    if granularity is Granularity.TOKEN:
        mean = sum_S.sum() / count_S.sum().clamp(min=1)
    else:  # all tokens of a rollout have one weight, so its mean is that weight
        mean = (sum_S / count_S.clamp(min=1)).sum() / (count_S > 0).sum().clamp(min=1)
    return torch.where(mean > 0, weights_T / mean, weights_T).to(weights_T.dtype)


def kl_penalized_advantages(
    advantages_T: Tensor,
    logp_samp_T: Tensor,
    logp_train_T: Tensor,
    *,
    coef: float,
    keep_T: Tensor | None = None,
    over_ranks: RankReduction = LOCAL,
) -> Tensor:
    """A_t + coef · (mean d − d_t) with d = logp_samp − logp_train: seed 000's penalty inside the advantages.

    The mean runs over the trained tokens of the whole step, so the penalties sum to 0 over them: tokens on which the
    trainer agrees less than average with the sampler lose advantage, the others gain it. Prompt and tool tokens
    have no entry here and get none. Detached.

    keep_T: bool, False for tokens that left the loss mask (rejected, or of a masked rollout); None: none did.
    """
    diff_T = (logp_samp_T - logp_train_T).detach()
    kept_T = diff_T.double() if keep_T is None else diff_T.double()[keep_T]
    total, count = over_ranks.sum(torch.stack([kept_T.sum(), kept_T.new_tensor(len(kept_T))]))
    mean = (total / count.clamp(min=1)).to(diff_T.dtype)
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
