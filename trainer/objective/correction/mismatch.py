"""Mismatch between sampler and trainer: the metrics `rollout_correction/*`.

Notation: d = logp_samp − logp_train per trained token; ρ = exp(−d), its log clamped to ±20 before exp; w the applied
correction weights before batch normalization. "Mean" is over trained tokens, "over rollouts" over rollouts with trained
tokens. Sums are float64, over all tokens of the step, which every rank holds.

Sources: "KL Divergence Analysis" (jphme, gist, 2026); ms-swift docs, "Training-Inference-Mismatch"; verl's
`rollout_corr_helper`. `kl` has the sign of their code (it estimates KL(π_rollout ‖ π_θ)); the formula on the ms-swift
page has the opposite sign.

Undefined metrics are left out, never NaN: all of them without trained tokens; `pearson` if one side does not vary;
`version_*` and `stale_*` if no token carries a weight version; `kl_*_unforced` if every token is forced.

Dimensions: `_T` trained tokens, `_S` rollouts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.trainer.objective.correction.modes import PREFIX, QUANTIZATION_K3
from lockstep.trainer.objective.correction.weights import CorrectionResult
from lockstep.trainer.objective.kl import bounded, k2, k3
from lockstep.trainer.objective.per_rollout import rollout_count, rollout_mean, rollout_sum

FORCED_LOGPROB = -0.01
"""Smallest sampling logprob of a forced token ("KL Divergence Analysis", jphme, gist, 2026). For metrics only."""

LENGTH_BUCKETS = (64, 256, 1024, 4096, 16384)
"""Inclusive upper ends [trained tokens per rollout] of the buckets of `weight_removed`; the last bucket is open."""

UNKNOWN_VERSION = -1
"""Weight version of a token for which the engine reported none."""


def mismatch_metrics(
    logp_train_T: Tensor,
    logp_samp_T: Tensor,
    rollout_T: Tensor,
    num_rollouts: int,
    *,
    correction: CorrectionResult | None = None,
    version_T: Tensor | None = None,
    current_version: int = 0,
) -> dict[str, float]:
    """Return the metrics with their prefix; empty without tokens.

    Args:
        logp_train_T, logp_samp_T: logprobs of the same tokens before rejection.
        rollout_T: rollout of each token, in 0..num_rollouts−1.
        correction: weights of these tokens; None: all 1.
        version_T: weight version that sampled each token, or `UNKNOWN_VERSION`.
        current_version: version of the trained weights; the lag is its distance to `version_T`.
    """
    num_tokens = len(logp_train_T)
    if not num_tokens:
        return {}
    train_T, samp_T = logp_train_T.detach().double(), logp_samp_T.detach().double()
    diff_T = samp_T - train_T
    log_ratio_T = bounded(-diff_T)
    raw_T = log_ratio_T.exp() if correction is None else correction.raw_weights_T.double()
    weight_T = torch.ones_like(raw_T) if correction is None else correction.controlled_weights_T.double()
    clipped_T = torch.zeros_like(raw_T) if correction is None else correction.clipped_T.double()
    forced_T = samp_T >= FORCED_LOGPROB
    metrics = {
        "kl": _mean(diff_T),
        "kl_v1": _mean(diff_T),
        "kl_v2": _mean(k2(diff_T)),
        "k3_kl": _mean(k3(log_ratio_T)),
        "chi2_token": _chi2(log_ratio_T),
        "clipped_frac": _mean(clipped_T),
        "logp_diff_abs_mean": _mean(diff_T.abs()),
        "logp_diff_abs_max": float(diff_T.abs().max()),
        "forced_token_ratio": _mean(forced_T.double()),
    }
    metrics |= _weight_metrics(weight_T)
    metrics |= {f"raw_{name}": value for name, value in _weight_metrics(raw_T).items()}
    metrics |= _pearson(train_T, samp_T)
    metrics |= _perplexities(train_T, samp_T, diff_T, rollout_T, num_rollouts)
    removed_T = (raw_T - weight_T).clamp(min=0) * clipped_T
    metrics |= _weight_removed(raw_T, removed_T, rollout_T, num_rollouts)
    if not forced_T.all():
        metrics["kl_v1_unforced"] = _mean(diff_T[~forced_T])
        metrics["kl_v2_unforced"] = _mean(k2(diff_T[~forced_T]))
    if version_T is not None and (is_known_T := version_T != UNKNOWN_VERSION).any():
        lag_T = (current_version - version_T[is_known_T]).double()
        metrics["stale_tokens_frac"] = _mean((lag_T > 0).double())
        metrics["version_lag_mean"] = _mean(lag_T)
        metrics["version_lag_max"] = float(lag_T.max())
    return {PREFIX + name: value for name, value in metrics.items()}


def noise_floor(logp_a_T: Tensor, logp_b_T: Tensor) -> dict[str, float]:
    """Return `noise_floor_kl` and `noise_floor_k3`: the trainer's logprobs of the same tokens in two packings.

    `kl` and `k3_kl` below these carry no information. Empty without tokens.
    """
    if not len(logp_a_T):
        return {}
    diff_T = logp_b_T.detach().double() - logp_a_T.detach().double()
    return {PREFIX + "noise_floor_kl": _mean(diff_T), PREFIX + "noise_floor_k3": _mean(k3(bounded(-diff_T)))}


def quantization_cost(logp_train_T: Tensor, logp_samp_T: Tensor) -> dict[str, float]:
    """Return `quantization_k3` and `quantization_ess` of tokens that a quantized engine sampled with the same weights.

    The ess is that of uncontrolled weights. Empty without tokens.
    """
    if not len(logp_train_T):
        return {}
    log_ratio_T = bounded(logp_train_T.detach().double() - logp_samp_T.detach().double())
    ess = _weight_metrics(log_ratio_T.exp())["ess"]
    return {QUANTIZATION_K3: _mean(k3(log_ratio_T)), PREFIX + "quantization_ess": ess}


def _mean(x: Tensor) -> float:
    return float(x.mean())


def _chi2(log_ratio: Tensor) -> float:
    """Return E[ρ²] − 1, from ρ − 1, so that nothing cancels at a mismatch of 1e-6."""
    ratio_minus_1 = torch.expm1(log_ratio)
    return _mean(ratio_minus_1.square()) + 2 * _mean(ratio_minus_1)


def _weight_metrics(weight_T: Tensor) -> dict[str, float]:
    """Return mean, population standard deviation, extremes and effective sample size; ess is 0 for weights of 0.

    Moments are computed from w − 1, because weights are close to 1.
    """
    mean_minus_1, mean_square = _mean(weight_T - 1), _mean((weight_T - 1).square())
    mean, largest = 1 + mean_minus_1, float(weight_T.max())
    variance = max(mean_square - mean_minus_1**2, 0.0)
    return {
        "is_weight_mean": mean,
        "is_weight_std": math.sqrt(variance),
        "is_weight_max": largest,
        "is_weight_min": float(weight_T.min()),
        "ess": mean**2 / (mean**2 + variance) if largest > 0 else 0.0,  # 1 / E[(w / E[w])²]
    }


def _pearson(train_T: Tensor, samp_T: Tensor) -> dict[str, float]:
    """Return the correlation of the two logprobs over tokens."""
    train_mean, samp_mean = _mean(train_T), _mean(samp_T)
    train_square, samp_square = _mean(train_T.square()), _mean(samp_T.square())
    train_variance, samp_variance = train_square - train_mean**2, samp_square - samp_mean**2
    # A variance within the rounding of its two terms counts as zero.
    if train_variance <= 1e-12 * train_square or samp_variance <= 1e-12 * samp_square:
        return {}
    covariance = _mean(train_T * samp_T) - train_mean * samp_mean
    return {"pearson": max(-1.0, min(1.0, covariance / math.sqrt(train_variance * samp_variance)))}


def _perplexities(
    train_T: Tensor, samp_T: Tensor, diff_T: Tensor, rollout_T: Tensor, num_rollouts: int
) -> dict[str, float]:
    """Return perplexities: means per rollout, then over rollouts with trained tokens."""
    has_tokens_S = rollout_count(rollout_T, num_rollouts) > 0

    def per_rollout(x_T: Tensor) -> Tensor:
        return rollout_mean(x_T, rollout_T, num_rollouts)[has_tokens_S]

    train_S, samp_S, diff_S = per_rollout(train_T), per_rollout(samp_T), per_rollout(diff_T)
    return {
        "training_ppl": _mean((-train_S).exp()),
        "rollout_ppl": _mean((-samp_S).exp()),
        "training_log_ppl": -_mean(train_S),
        "rollout_log_ppl": -_mean(samp_S),
        "log_ppl_diff": _mean(diff_S),
        "log_ppl_abs_diff": _mean(diff_S.abs()),
        "log_ppl_diff_max": float(diff_S.max()),
        "log_ppl_diff_min": float(diff_S.min()),
        "ppl_ratio": _mean(diff_S.exp()),
        "chi2_seq": _chi2(bounded(-diff_S)),  # of the geometric mean ratio
    }


def _weight_removed(raw_T: Tensor, removed_T: Tensor, rollout_T: Tensor, num_rollouts: int) -> dict[str, float]:
    """Return the share of the raw weight removed by control, per bucket of rollout lengths that has any."""
    tokens_S = rollout_count(rollout_T, num_rollouts)
    raw_S, removed_S = (rollout_sum(x_T, rollout_T, num_rollouts) for x_T in (raw_T, removed_T))
    metrics: dict[str, float] = {}
    lows = (0, *LENGTH_BUCKETS)
    for low, high in zip(lows, (*LENGTH_BUCKETS, math.inf), strict=True):
        inside_S = (tokens_S > low) & (tokens_S <= high)
        raw = float(raw_S[inside_S].sum())
        if raw > 0:
            name = f"len_{low + 1}-{high}" if high != math.inf else f"len_{low + 1}+"
            metrics[f"weight_removed/{name}"] = float(removed_S[inside_S].sum()) / raw
    return metrics
