"""Whitening: rewards and advantages brought to variance 1, over all ranks.

    w = (x − mean) · rsqrt(var + 1e-8)        with the population variance

over every entry that the mask keeps, on all ranks: the mean of the parts' statistics would depend on how the tokens
were cut up, so sums travel, not means. PPO whitens rewards with their mean kept (`shift_mean=False`: their level says
how good the policy is) and advantages without it.

Source: seed 003, "Per-minibatch reward and advantage whitening"; the sample variance, which `torch.var` computes by
default, is the bug that it warns of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.objective.per_rollout import LOCAL, RankReduction

VARIANCE_EPS = 1e-8
"""Under the root, as in the source: entries that are all equal become 0, not NaN."""


class Moments(NamedTuple):
    """Of all kept entries on all ranks; float64 scalars, 0 where there are none."""

    mean: Tensor
    variance: Tensor
    """Population variance: the mean squared deviation."""


def moments(x: Tensor, mask: Tensor | None = None, *, over_ranks: RankReduction = LOCAL) -> Moments:
    """Mean and population variance of `x` where `mask` is true (None: everywhere), in float64.

    Two passes, because E[x²] − E[x]² cancels for rewards with a large mean. Any shape; what the mask leaves out has
    no effect, even NaN. Calls `over_ranks.sum` twice.
    """
    kept = (x if mask is None else x[mask.bool()]).double()
    totals = over_ranks.sum(torch.stack([kept.sum(), kept.new_tensor(float(kept.numel()))]))
    count = totals[1].clamp(min=1.0)
    mean = totals[0] / count
    variance = over_ranks.sum((kept - mean).square().sum()) / count
    return Moments(mean, variance)


def whiten(
    x: Tensor, mask: Tensor | None = None, *, shift_mean: bool = True, over_ranks: RankReduction = LOCAL
) -> Tensor:
    """`x` with variance 1 and, if `shift_mean`, mean 0; else with the mean it had. 0 where the mask is false.

    The result has the shape and dtype of `x`.
    """
    whitened = standardize(x, moments(x, mask, over_ranks=over_ranks), shift_mean=shift_mean)
    return whitened if mask is None else whitened.masked_fill(~mask.bool(), 0.0)


def standardize(x: Tensor, statistics: Moments, *, shift_mean: bool) -> Tensor:
    """`whiten` with statistics that were taken elsewhere, in the dtype of `x`."""
    mean, variance = statistics
    whitened = (x.double() - mean) * torch.rsqrt(variance + VARIANCE_EPS)
    return (whitened if shift_mean else whitened + mean).to(x.dtype)
