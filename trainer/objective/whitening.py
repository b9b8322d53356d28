"""Whitening: rewards and advantages scaled to variance 1.

    w = (x − mean) · rsqrt(var + 1e-8)        with the population variance

over the entries that the mask keeps. PPO keeps the mean of rewards (`shift_mean=False`: their level measures the
policy) and removes that of advantages.

Source: "The N Implementation Details of RLHF with PPO" (Hugging Face blog, 2023), "per-minibatch reward and advantage
whitening"; it warns of the sample variance, torch.var's default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

VARIANCE_EPS = 1e-8
"""Under the root, as in the source: entries that are all equal become 0, not NaN."""


class Moments(NamedTuple):
    """Mean and population variance: float64 scalars, 0 without entries."""

    mean: Tensor
    variance: Tensor


def moments(x: Tensor, mask: Tensor | None = None) -> Moments:
    """Return the moments of `x`, of any shape, where `mask` is true (None: everywhere). NaN outside has no effect."""
    values = (x if mask is None else x[mask.bool()]).double()
    count = max(values.numel(), 1)
    mean = values.sum() / count
    # Two passes, because E[x²] − E[x]² cancels for rewards with a large mean.
    return Moments(mean, (values - mean).square().sum() / count)


def standardize(x: Tensor, statistics: Moments, *, shift_mean: bool) -> Tensor:
    """Return `x` scaled to variance 1, with mean 0 if `shift_mean`, else its own; in the dtype of `x`."""
    mean, variance = statistics
    z_scores = (x.double() - mean) * (variance + VARIANCE_EPS).rsqrt()
    return (z_scores if shift_mean else z_scores + mean).to(x.dtype)
