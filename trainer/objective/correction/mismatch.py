"""Mismatch between sampler and trainer: the metrics `rollout_correction/*`.

Notation: d = logp_samp − logp_train per trained token; ρ = exp(−d), its log clamped to ±20 before exp; w the applied
correction weights before batch normalization. "Mean" is over trained tokens, "over rollouts" over rollouts with trained
tokens. Sums are float64, over all tokens of the step, which every rank holds; of many tokens each rank sums a part.

Sources: "KL Divergence Analysis" (jphme, gist, 2026); ms-swift docs, "Training-Inference-Mismatch"; verl's
`rollout_corr_helper`. `kl` has the sign of their code (it estimates KL(π_rollout ‖ π_θ)); the formula on the ms-swift
page has the opposite sign.

Undefined metrics are left out, never NaN: all of them without trained tokens; `pearson` if one side does not vary;
`version_*` and `stale_*` if no token carries a weight version; `kl_*_unforced` if every token is forced.

Dimensions: `_T` trained tokens, `_S` rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.trainer.objective.correction.modes import PREFIX, QUANTIZATION_K3
from lockstep.trainer.objective.correction.weights import CorrectionResult
from lockstep.trainer.objective.kl import bounded, k2, k3
from lockstep.trainer.objective.per_rollout import rollout_count

FORCED_LOGPROB = -0.01
"""Smallest sampling logprob of a forced token ("KL Divergence Analysis", jphme, gist, 2026). For metrics only."""

LENGTH_BUCKETS = (64, 256, 1024, 4096, 16384)
"""Inclusive upper ends [trained tokens per rollout] of the buckets of `weight_removed`; the last bucket is open."""

UNKNOWN_VERSION = -1
"""Weight version of a token for which the engine reported none."""

PART_TOKENS = 2**15
"""Number of tokens whose statistics are computed at once: their float64 values stay in a core's cache."""

Statistics = tuple[dict[str, float], dict[str, float]]
"""Sums, and highest values, by name."""
Spread = Callable[[int, Callable[[int], Statistics]], Sequence[Statistics]]
"""Takes a count and a function; returns the results of the function for 0, ..., count − 1."""


def mismatch_metrics(
    logp_train_T: Tensor,
    logp_samp_T: Tensor,
    rollout_T: Tensor,
    num_rollouts: int,
    *,
    correction: CorrectionResult | None = None,
    version_T: Tensor | None = None,
    current_version: int = 0,
    spread: Spread = lambda count, work: [work(index) for index in range(count)],
) -> dict[str, float]:
    """Return the metrics with their prefix; empty without tokens.

    Args:
        logp_train_T, logp_samp_T: logprobs of the same tokens before rejection.
        rollout_T: rollout of each token, in 0..num_rollouts−1.
        correction: weights of these tokens; None: all 1.
        version_T: weight version that sampled each token, or `UNKNOWN_VERSION`.
        current_version: version of the trained weights; the lag is its distance to `version_T`.
        spread: `Distributed.spread`, for several ranks with the same tokens; by default this process does all.
    """
    if not len(logp_train_T):
        return {}
    whole = {"train": logp_train_T.detach(), "samp": logp_samp_T.detach(), "rollout": rollout_T}
    if correction is not None:
        whole |= {"raw": correction.raw_weights_T, "weight": correction.controlled_weights_T}
        whole |= {"clipped": correction.clipped_T}
    if version_T is not None:
        whole |= {"version": version_T}
    if (rollout_T[1:] < rollout_T[:-1]).any():
        order_T = torch.argsort(rollout_T, stable=True)
        whole = {name: x_T[order_T] for name, x_T in whole.items()}
    bounds = _bounds(rollout_count(rollout_T, num_rollouts))

    def part(index: int) -> Statistics:
        tokens = {name: x_T[bounds[index] : bounds[index + 1]] for name, x_T in whole.items()}
        return _statistics(tokens, current_version)

    parts = spread(len(bounds) - 1, part)
    return {PREFIX + name: value for name, value in _metrics(_combined(parts)).items()}


def _bounds(tokens_S: Tensor) -> list[int]:
    """Return the bounds of parts of whole rollouts, each of about `PART_TOKENS` tokens or of one longer rollout.

    They depend on the tokens alone, not on the number of ranks.
    """
    ends_S = tokens_S.cumsum(0)
    total = int(ends_S[-1])
    inner = ends_S[torch.searchsorted(ends_S, torch.tensor(range(PART_TOKENS, total, PART_TOKENS)))]
    return sorted({0, total, *inner.tolist()})


def _statistics(tokens: Mapping[str, Tensor], current_version: int) -> Statistics:
    """Return sums over the tokens, over their rollouts and over rollouts by length, and the highest values.

    tokens: (T,) values by name of whole rollouts, one rollout after the other.
    """
    train_T, samp_T = tokens["train"].double(), tokens["samp"].double()
    diff_T = samp_T - train_T
    log_ratio_T = bounded(-diff_T)
    raw_T = tokens["raw"].double() if "raw" in tokens else log_ratio_T.exp()
    weight_T = tokens.get("weight", torch.ones(1)).double().expand_as(raw_T)
    clipped_T = tokens.get("clipped", torch.zeros(1)).double().expand_as(raw_T)
    version_T = tokens.get("version", torch.tensor([UNKNOWN_VERSION])).expand_as(raw_T)
    excess_T = log_ratio_T.expm1()
    free_T = samp_T < FORCED_LOGPROB
    known_T = version_T != UNKNOWN_VERSION
    lag_T = (current_version - version_T) * known_T
    removed_T = (raw_T - weight_T).clamp(min=0) * clipped_T

    _, tokens_S = torch.unique_consecutive(tokens["rollout"], return_counts=True)
    over_rollout = {"train": train_T, "samp": samp_T, "diff": diff_T, "raw": raw_T, "removed": removed_T}
    sum_S = {name: torch.segment_reduce(x_T, "sum", lengths=tokens_S) for name, x_T in over_rollout.items()}
    train_S, samp_S, diff_S = (sum_S[name] / tokens_S for name in ("train", "samp", "diff"))
    excess_S = bounded(-diff_S).expm1()
    bucket_S = torch.bucketize(tokens_S, torch.tensor(LENGTH_BUCKETS))

    sums = {
        "tokens": torch.ones_like(raw_T),
        "diff": diff_T,
        "k2": k2(diff_T),
        "k3": excess_T - log_ratio_T,
        "excess": excess_T,
        "excess_square": excess_T.square(),
        "clipped": clipped_T,
        "abs_diff": diff_T.abs(),
        "forced": ~free_T,
        "free_diff": diff_T * free_T,
        "free_k2": k2(diff_T) * free_T,
        "train": train_T,
        "samp": samp_T,
        "train_square": train_T.square(),
        "samp_square": samp_T.square(),
        "product": train_T * samp_T,
        "known": known_T,
        "stale": lag_T > 0,
        "lag": lag_T,
        **dict(zip(("weight_minus_1", "weight_minus_1_square"), _moments(weight_T), strict=True)),
        **dict(zip(("raw_minus_1", "raw_minus_1_square"), _moments(raw_T), strict=True)),
        "rollouts": torch.ones_like(diff_S),
        "train_ppl": (-train_S).exp(),
        "samp_ppl": (-samp_S).exp(),
        "train_mean": train_S,
        "samp_mean": samp_S,
        "diff_mean": diff_S,
        "abs_diff_mean": diff_S.abs(),
        "ppl_ratio": diff_S.exp(),
        "excess_mean": excess_S,
        "excess_mean_square": excess_S.square(),
    }
    for bucket in range(len(LENGTH_BUCKETS) + 1):
        sums |= {f"{name}_in_{bucket}": sum_S[name][bucket_S == bucket] for name in ("raw", "removed")}
    highest = {
        "abs_diff": diff_T.abs(),
        "weight": weight_T,
        "-weight": -weight_T,
        "raw": raw_T,
        "-raw": -raw_T,
        "diff_mean": diff_S,
        "-diff_mean": -diff_S,
        "lag": lag_T[known_T] if known_T.any() else lag_T,
    }
    return (
        {name: float(x.sum(dtype=torch.float64)) for name, x in sums.items()},
        {name: float(x.amax()) for name, x in highest.items()},
    )


def _combined(parts: Sequence[Statistics]) -> Statistics:
    return (
        {name: sum(sums[name] for sums, _ in parts) for name in parts[0][0]},
        {name: max(highest[name] for _, highest in parts) for name in parts[0][1]},
    )


def _metrics(statistics: Statistics) -> dict[str, float]:
    """Return the metrics without their prefix."""
    sums, highest = statistics
    over_tokens = {name: value / sums["tokens"] for name, value in sums.items()}
    over_rollouts = {name: value / sums["rollouts"] for name, value in sums.items()}
    metrics = {
        "kl": over_tokens["diff"],
        "kl_v1": over_tokens["diff"],
        "kl_v2": over_tokens["k2"],
        "k3_kl": over_tokens["k3"],
        "chi2_token": _chi2(over_tokens["excess"], over_tokens["excess_square"]),
        "clipped_frac": over_tokens["clipped"],
        "logp_diff_abs_mean": over_tokens["abs_diff"],
        "logp_diff_abs_max": highest["abs_diff"],
        "forced_token_ratio": over_tokens["forced"],
        "training_ppl": over_rollouts["train_ppl"],
        "rollout_ppl": over_rollouts["samp_ppl"],
        "training_log_ppl": -over_rollouts["train_mean"],
        "rollout_log_ppl": -over_rollouts["samp_mean"],
        "log_ppl_diff": over_rollouts["diff_mean"],
        "log_ppl_abs_diff": over_rollouts["abs_diff_mean"],
        "log_ppl_diff_max": highest["diff_mean"],
        "log_ppl_diff_min": -highest["-diff_mean"],
        "ppl_ratio": over_rollouts["ppl_ratio"],
        # of the geometric mean ratio
        "chi2_seq": _chi2(over_rollouts["excess_mean"], over_rollouts["excess_mean_square"]),
    }
    for prefix, name in (("", "weight"), ("raw_", "raw")):
        extremes = highest[name], -highest[f"-{name}"]
        weight = _weight_metrics(over_tokens[f"{name}_minus_1"], over_tokens[f"{name}_minus_1_square"], *extremes)
        metrics |= {f"{prefix}{key}": value for key, value in weight.items()}
    metrics |= _pearson(over_tokens) | _weight_removed(sums)
    if num_free := sums["tokens"] - sums["forced"]:
        metrics["kl_v1_unforced"] = sums["free_diff"] / num_free
        metrics["kl_v2_unforced"] = sums["free_k2"] / num_free
    if sums["known"]:
        metrics["stale_tokens_frac"] = sums["stale"] / sums["known"]
        metrics["version_lag_mean"] = sums["lag"] / sums["known"]
        metrics["version_lag_max"] = highest["lag"]
    return metrics


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
    ratio_T = log_ratio_T.exp()
    minus_1, square = map(_mean, _moments(ratio_T))
    ess = _weight_metrics(minus_1, square, float(ratio_T.max()), float(ratio_T.min()))["ess"]
    return {QUANTIZATION_K3: _mean(k3(log_ratio_T)), PREFIX + "quantization_ess": ess}


def _mean(x: Tensor) -> float:
    return float(x.mean())


def _chi2(excess: float, excess_square: float) -> float:
    """Return E[ρ²] − 1 from the means of ρ − 1 and its square, so that nothing cancels at a mismatch of 1e-6."""
    return excess_square + 2 * excess


def _moments(weight_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return w − 1 and its square: the moments are computed from these, because weights are close to 1."""
    return weight_T - 1, (weight_T - 1).square()


def _weight_metrics(mean_minus_1: float, mean_square: float, highest: float, lowest: float) -> dict[str, float]:
    """Return mean, population standard deviation, extremes and effective sample size; ess is 0 for weights of 0.

    mean_minus_1, mean_square: means of `_moments`.
    """
    mean, variance = 1 + mean_minus_1, max(mean_square - mean_minus_1**2, 0.0)
    return {
        "is_weight_mean": mean,
        "is_weight_std": math.sqrt(variance),
        "is_weight_max": highest,
        "is_weight_min": lowest,
        "ess": mean**2 / (mean**2 + variance) if highest > 0 else 0.0,  # 1 / E[(w / E[w])²]
    }


def _pearson(mean: Mapping[str, float]) -> dict[str, float]:
    """Return the correlation of the two logprobs over tokens. mean: of statistics over tokens."""
    train_square, samp_square = mean["train_square"], mean["samp_square"]
    train_variance, samp_variance = train_square - mean["train"] ** 2, samp_square - mean["samp"] ** 2
    # A variance within the rounding of its two terms counts as zero.
    if train_variance <= 1e-12 * train_square or samp_variance <= 1e-12 * samp_square:
        return {}
    covariance = mean["product"] - mean["train"] * mean["samp"]
    return {"pearson": max(-1.0, min(1.0, covariance / math.sqrt(train_variance * samp_variance)))}


def _weight_removed(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the share of the raw weight removed by control, per bucket of rollout lengths that has any."""
    metrics: dict[str, float] = {}
    lows = (0, *LENGTH_BUCKETS)
    for bucket, (low, high) in enumerate(zip(lows, (*LENGTH_BUCKETS, math.inf), strict=True)):
        if (raw := sums[f"raw_in_{bucket}"]) > 0:
            name = f"len_{low + 1}-{high}" if high != math.inf else f"len_{low + 1}+"
            metrics[f"weight_removed/{name}"] = sums[f"removed_in_{bucket}"] / raw
    return metrics
