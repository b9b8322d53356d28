"""Whitening: rewards and advantages scaled to variance 1.

    w = (x − mean) · rsqrt(var + 1e-8)        with the population variance

over every entry that the mask keeps. PPO whitens rewards with their mean kept (`shift_mean=False`: their level says how
good the policy is) and advantages without it.

Source: "The N Implementation Details of RLHF with PPO" (Hugging Face blog, 2023), "per-minibatch reward and advantage
whitening"; the sample variance, which `torch.var` computes by default, is the bug that it warns of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

VARIANCE_EPS = 1e-8
"""Under the root, as in the source: entries that are all equal become 0, not NaN."""


class Moments(NamedTuple):
    """Moments of all kept entries: float64 scalars, 0 without entries."""

    mean: Tensor
    variance: Tensor
    """Population variance: the mean squared deviation."""


def moments(x: Tensor, mask: Tensor | None = None) -> Moments:
    """Return mean and population variance of `x` where `mask` is true (None: everywhere), in float64.

    Two passes, because E[x²] − E[x]² cancels for rewards with a large mean. Any shape; entries outside the mask have no
    effect, even NaN.
    """
    kept = (x if mask is None else x[mask.bool()]).double()
    count = max(kept.numel(), 1)
    mean = kept.sum() / count
    return Moments(mean, (kept - mean).square().sum() / count)


def standardize(x: Tensor, statistics: Moments, *, shift_mean: bool) -> Tensor:
    """Scale `x` to variance 1 and, if `shift_mean`, mean 0, else the mean it had; in the dtype of `x`."""
    mean, variance = statistics
    whitened = (x.double() - mean) * (variance + VARIANCE_EPS).rsqrt()
    return (whitened if shift_mean else whitened + mean).to(x.dtype)
