"""Counts, sums, means and maxima per rollout.

Tensors of the objective are flat: `_T` has one entry per trained token, `_S` one per rollout of the optimizer step, and
`rollout_T` holds the rollout of each token. The rows (branches) of a rollout can lie in several microbatches and on
several ranks, so statistics per rollout are taken over all tokens of the step, which every rank holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def rollout_sum(x_T: Tensor, rollout_T: Tensor, num_rollouts: int) -> Tensor:
    """Return (S,) sums over the tokens of each rollout; 0 for a rollout without tokens."""
    return x_T.new_zeros(num_rollouts).index_add(0, rollout_T, x_T)


def rollout_count(rollout_T: Tensor, num_rollouts: int) -> Tensor:
    """Return (S,) int64 numbers of tokens of each rollout."""
    return rollout_T.bincount(minlength=num_rollouts)


def rollout_max(x_T: Tensor, rollout_T: Tensor, num_rollouts: int) -> Tensor:
    """Return (S,) maxima over the tokens of each rollout; −inf for a rollout without tokens."""
    return x_T.new_full((num_rollouts,), -math.inf).scatter_reduce(0, rollout_T, x_T, reduce="amax")


def rollout_mean(x_T: Tensor, rollout_T: Tensor, num_rollouts: int) -> Tensor:
    """Return (S,) means over the tokens of each rollout; 0 for a rollout without tokens.

    Sums are float64, so that float32 results do not depend on the order of the tokens.
    """
    sums_S = rollout_sum(x_T.double(), rollout_T, num_rollouts)
    return (sums_S / rollout_count(rollout_T, num_rollouts).clamp(min=1)).to(x_T.dtype)
