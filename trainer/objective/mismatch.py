"""How far sampler and trainer are apart: the metrics `rollout_correction/*`.

Metrics are finished from sufficient statistics, and those are sums and maxima, so that every partition of the tokens
into microbatches and ranks gives the same numbers: `MismatchStatistics.from_tokens(...)` on each part, then `merge` or
`reduced`, then `finalize()`. What is "per rollout" keeps one row of sums per rollout, because a rollout may be
spread over parts. Statistics are float64.

Notation: d = logp_samp − logp_train per trained token; ρ = exp(−d), its log clamped to ±20 before exp; w the weights
that correction applied (before batch normalisation). "Mean" is over trained tokens, "over rollouts" over rollouts that
have any. Sources: seeds 000 and 001, and verl's `rollout_corr_helper`. `kl` has the sign of their code (it estimates
KL(π_rollout ‖ π_θ)), not of seed 001's formula.

What is undefined is left out, never NaN: everything without trained tokens; `pearson` when one side does not vary;
`version_*` and `stale_*` when no token carries a weight version; `kl_*_unforced` when every token is forced.

Dimensions: `_T` trained tokens, `_S` rollouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objective.correction import CorrectionResult
from trainer.objective.kl import bounded, k2, k3
from trainer.objective.per_rollout import LOCAL, RankReduction, rollout_sum

PREFIX = "rollout_correction/"

FORCED_LOGPROB = -0.01
"""Seed 000 calls a token forced when its sampling logprob is at least this. A diagnostic, never a mask for training."""

LENGTH_BUCKETS = (64, 256, 1024, 4096, 16384)
"""Upper ends (inclusive, trained tokens per rollout) of the buckets of `weight_removed`; one more is open."""

UNKNOWN_VERSION = -1
"""Weight version of a token for which the engine reported none."""

# Weights and ratios crowd around 1, so their moments are kept of w − 1: nothing cancels when the mismatch is 1e-6.
_SUMS = (
    *("tokens", "diff", "half_diff_squared", "k3", "abs_diff", "ratio_minus_1", "ratio_minus_1_squared"),
    *("train", "samp", "train_squared", "samp_squared", "train_samp"),
    *("weight_minus_1", "weight_minus_1_squared", "raw_minus_1", "raw_minus_1_squared", "clipped"),
    *("forced", "unforced_diff", "unforced_half_diff_squared", "versioned", "stale", "lag"),
)
_MAXIMA = ("abs_diff", "weight", "minus_weight", "raw", "minus_raw", "lag")
_PER_ROLLOUT = ("tokens", "train", "samp", "diff", "raw", "removed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MismatchStatistics:
    """Sufficient statistics of all metrics of this module. Read them through `finalize`."""

    sums: Tensor  # (len(_SUMS),)
    maxima: Tensor  # (len(_MAXIMA),), −inf without tokens
    per_rollout: Tensor  # (S, len(_PER_ROLLOUT)) sums

    @classmethod
    def from_tokens(
        cls,
        logp_train_T: Tensor,
        logp_samp_T: Tensor,
        rollout_T: Tensor,
        num_rollouts: int,
        *,
        correction: CorrectionResult | None = None,
        version_T: Tensor | None = None,
        current_version: int = 0,
    ) -> MismatchStatistics:
        """Statistics of some of the step's trained tokens: before rejection, which would hide what it rejects.

        Args:
            logp_train_T, logp_samp_T: logprobs of the same sampled tokens, detached here.
            rollout_T: rollout index of each token in 0..num_rollouts−1, the same numbering in every part.
            correction: the weights of these same tokens; None means that all applied weights are 1.
            version_T: weight version that sampled each token, or `UNKNOWN_VERSION`.
            current_version: version of the weights that now train; the lag is its distance to `version_T`.
        """
        train_T, samp_T = logp_train_T.detach().double(), logp_samp_T.detach().double()
        diff_T = samp_T - train_T
        log_ratio_T = bounded(-diff_T)
        ratio_minus_1_T = torch.expm1(log_ratio_T)
        raw_T = log_ratio_T.exp() if correction is None else correction.raw_weights_T.double()
        weight_T = torch.ones_like(raw_T) if correction is None else correction.controlled_weights_T.double()
        clipped_T = torch.zeros_like(raw_T) if correction is None else correction.clipped_T.double()
        forced_T = (samp_T >= FORCED_LOGPROB).double()
        if version_T is None:
            version_T = torch.full_like(rollout_T, UNKNOWN_VERSION)
        versioned_T = (version_T != UNKNOWN_VERSION).double()
        lag_T = (current_version - version_T).double() * versioned_T

        tokens_T = torch.ones_like(diff_T)
        sums = {
            "tokens": tokens_T,
            "diff": diff_T,
            "half_diff_squared": k2(diff_T),
            "k3": k3(log_ratio_T),
            "abs_diff": diff_T.abs(),
            "ratio_minus_1": ratio_minus_1_T,
            "ratio_minus_1_squared": ratio_minus_1_T.square(),
            "train": train_T,
            "samp": samp_T,
            "train_squared": train_T.square(),
            "samp_squared": samp_T.square(),
            "train_samp": train_T * samp_T,
            "weight_minus_1": weight_T - 1,
            "weight_minus_1_squared": (weight_T - 1).square(),
            "raw_minus_1": raw_T - 1,
            "raw_minus_1_squared": (raw_T - 1).square(),
            "clipped": clipped_T,
            "forced": forced_T,
            "unforced_diff": diff_T * (1 - forced_T),
            "unforced_half_diff_squared": k2(diff_T) * (1 - forced_T),
            "versioned": versioned_T,
            "stale": (lag_T > 0).double(),
            "lag": lag_T,
        }
        maxima = {
            "abs_diff": diff_T.abs(),
            "weight": weight_T,
            "minus_weight": -weight_T,
            "raw": raw_T,
            "minus_raw": -raw_T,
            "lag": lag_T,
        }
        per_rollout = {
            "tokens": tokens_T,
            "train": train_T,
            "samp": samp_T,
            "diff": diff_T,
            "raw": raw_T,
            "removed": (raw_T - weight_T).clamp(min=0) * clipped_T,
        }
        nothing = diff_T.new_full((1,), -torch.inf)  # amax of no tokens is an error
        return cls(
            sums=torch.stack([sums[name].sum() for name in _SUMS]),
            maxima=torch.stack([torch.cat([maxima[name], nothing]).amax() for name in _MAXIMA]),
            per_rollout=torch.stack(
                [rollout_sum(per_rollout[name], rollout_T, num_rollouts) for name in _PER_ROLLOUT], dim=1
            ),
        )

    def merge(self, other: MismatchStatistics) -> MismatchStatistics:
        """Statistics of both parts together; both number the rollouts of the step alike."""
        return MismatchStatistics(
            sums=self.sums + other.sums,
            maxima=torch.maximum(self.maxima, other.maxima),
            per_rollout=self.per_rollout + other.per_rollout,
        )

    def reduced(self, over_ranks: RankReduction) -> MismatchStatistics:
        """Statistics of all ranks together, the same on each of them."""
        return MismatchStatistics(
            sums=over_ranks.sum(self.sums),
            maxima=over_ranks.max(self.maxima),
            per_rollout=over_ranks.sum(self.per_rollout),
        )

    def finalize(self) -> dict[str, float]:
        """The metrics, with their prefix. Empty without trained tokens."""
        total = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        largest = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        if total["tokens"] == 0:
            return {}
        mean = {name: value / total["tokens"] for name, value in total.items()}
        metrics = {
            "kl": mean["diff"],
            "kl_v1": mean["diff"],
            "kl_v2": mean["half_diff_squared"],
            "k3_kl": mean["k3"],
            "chi2_token": mean["ratio_minus_1_squared"] + 2 * mean["ratio_minus_1"],  # E[ρ²] − 1
            "clipped_frac": mean["clipped"],
            "logp_diff_abs_mean": mean["abs_diff"],
            "logp_diff_abs_max": largest["abs_diff"],
            "forced_token_ratio": mean["forced"],
        }
        metrics |= _weight_metrics(
            mean["weight_minus_1"], mean["weight_minus_1_squared"], largest["weight"], -largest["minus_weight"]
        )
        raw = _weight_metrics(mean["raw_minus_1"], mean["raw_minus_1_squared"], largest["raw"], -largest["minus_raw"])
        metrics |= {f"raw_{name}": value for name, value in raw.items()}
        metrics |= _pearson(mean) | _rollout_metrics(self.per_rollout) | _weight_removed(self.per_rollout)
        if unforced := total["tokens"] - total["forced"]:
            metrics["kl_v1_unforced"] = total["unforced_diff"] / unforced
            metrics["kl_v2_unforced"] = total["unforced_half_diff_squared"] / unforced
        if total["versioned"]:
            metrics["stale_tokens_frac"] = total["stale"] / total["versioned"]
            metrics["version_lag_mean"] = total["lag"] / total["versioned"]
            metrics["version_lag_max"] = largest["lag"]
        return {PREFIX + name: value for name, value in metrics.items()}


def noise_floor(logp_a_T: Tensor, logp_b_T: Tensor, *, over_ranks: RankReduction = LOCAL) -> dict[str, float]:
    """`noise_floor_kl` and `noise_floor_k3`: the trainer against itself, the same tokens scored in two packings.

    Below these, `kl` and `k3_kl` say nothing. Empty without tokens.
    """
    rollout_T = torch.zeros_like(logp_a_T, dtype=torch.long)
    metrics = MismatchStatistics.from_tokens(logp_a_T, logp_b_T, rollout_T, 1).reduced(over_ranks).finalize()
    if not metrics:
        return {}
    return {
        PREFIX + "noise_floor_kl": metrics[PREFIX + "kl"],
        PREFIX + "noise_floor_k3": metrics[PREFIX + "k3_kl"],
    }


def _weight_metrics(mean_minus_1: float, mean_square: float, largest: float, smallest: float) -> dict[str, float]:
    """From the first two moments of w − 1. Population standard deviation; ess is 0 when all weights are 0."""
    mean = 1 + mean_minus_1
    variance = max(mean_square - mean_minus_1**2, 0.0)
    return {
        "is_weight_mean": mean,
        "is_weight_std": math.sqrt(variance),
        "is_weight_max": largest,
        "is_weight_min": smallest,
        "ess": mean**2 / (mean**2 + variance) if largest > 0 else 0.0,  # 1 / E[(w / E[w])²]
    }


def _pearson(mean: dict[str, float]) -> dict[str, float]:
    """Correlation of the two logprobs over tokens."""
    train_variance = mean["train_squared"] - mean["train"] ** 2
    samp_variance = mean["samp_squared"] - mean["samp"] ** 2
    # A variance within the rounding of its two terms is no variance.
    if train_variance <= 1e-12 * mean["train_squared"] or samp_variance <= 1e-12 * mean["samp_squared"]:
        return {}
    covariance = mean["train_samp"] - mean["train"] * mean["samp"]
    return {"pearson": max(-1.0, min(1.0, covariance / math.sqrt(train_variance * samp_variance)))}


def _rollout_metrics(per_rollout: Tensor) -> dict[str, float]:
    """Perplexities: per rollout first, then over rollouts that have trained tokens."""
    rows = per_rollout[per_rollout[:, 0] > 0]
    means = dict(zip(_PER_ROLLOUT, (rows / rows[:, :1]).unbind(dim=1), strict=True))
    train_S, samp_S, diff_S = means["train"], means["samp"], means["diff"]
    ratio_minus_1_S = torch.expm1(bounded(-diff_S))  # of the geometric mean ratio
    return {
        "training_ppl": float((-train_S).exp().mean()),
        "rollout_ppl": float((-samp_S).exp().mean()),
        "training_log_ppl": float(-train_S.mean()),
        "rollout_log_ppl": float(-samp_S.mean()),
        "log_ppl_diff": float(diff_S.mean()),
        "log_ppl_abs_diff": float(diff_S.abs().mean()),
        "log_ppl_diff_max": float(diff_S.max()),
        "log_ppl_diff_min": float(diff_S.min()),
        "ppl_ratio": float(diff_S.exp().mean()),
        "chi2_seq": float(ratio_minus_1_S.square().mean() + 2 * ratio_minus_1_S.mean()),
    }


def _weight_removed(per_rollout: Tensor) -> dict[str, float]:
    """Share of the raw weight that control took away, by length of the rollout; only buckets that have any."""
    columns = dict(zip(_PER_ROLLOUT, per_rollout.unbind(dim=1), strict=True))
    metrics: dict[str, float] = {}
    lows = (0, *LENGTH_BUCKETS)
    for low, high in zip(lows, (*LENGTH_BUCKETS, math.inf), strict=True):
        inside_S = (columns["tokens"] > low) & (columns["tokens"] <= high)
        raw = float(columns["raw"][inside_S].sum())
        if raw > 0:
            name = f"len_{low + 1}-{high}" if high != math.inf else f"len_{low + 1}+"
            metrics[f"weight_removed/{name}"] = float(columns["removed"][inside_S].sum()) / raw
    return metrics
