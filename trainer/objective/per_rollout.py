"""Sums, means and maxima per rollout, and what it takes to make them global.

Everything in the objective is flat: a `_T` tensor has one entry per trained token, a `_S` tensor one per
rollout of the optimizer step, and `rollout_T` says to which rollout a token belongs. A rollout may have several
rows (branches), so its tokens can lie in several microbatches and on several ranks. Whatever is said "per
rollout" is therefore a sum over ranks of `_S` vectors, which `RankReduction` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReduction:
    """How a tensor of the same shape on every rank becomes one value, the same on every rank.

    Functions that take one call it equally often on every rank, also on a rank that holds no token, so that
    it can be a collective operation.
    """

    sum: Callable[[Tensor], Tensor] = _unchanged
    max: Callable[[Tensor], Tensor] = _unchanged


LOCAL = RankReduction()
"""One process holds all tokens."""


def rollout_sum(x_T: Tensor, rollout_T: Tensor, num_rollouts: int) -> Tensor:
    """(S,) sum over the tokens of each rollout; 0 for a rollout without tokens here."""
    return x_T.new_zeros(num_rollouts).index_add(0, rollout_T, x_T)


def rollout_count(rollout_T: Tensor, num_rollouts: int) -> Tensor:
    """(S,) int64 number of tokens of each rollout."""
    return torch.bincount(rollout_T, minlength=num_rollouts)


def rollout_max(x_T: Tensor, rollout_T: Tensor, num_rollouts: int) -> Tensor:
    """(S,) maximum over the tokens of each rollout; −inf for a rollout without tokens here."""
    return x_T.new_full((num_rollouts,), -torch.inf).scatter_reduce(0, rollout_T, x_T, reduce="amax")


def rollout_mean(x_T: Tensor, rollout_T: Tensor, num_rollouts: int, *, over_ranks: RankReduction = LOCAL) -> Tensor:
    """(S,) mean over all tokens of each rollout, on all ranks; 0 for a rollout without tokens.

    Accumulated in float64, so that the order in which tokens arrive does not show in float32 results.
    """
    sums_S = over_ranks.sum(rollout_sum(x_T.double(), rollout_T, num_rollouts))
    count_S = over_ranks.sum(rollout_count(rollout_T, num_rollouts))
    return (sums_S / count_S.clamp(min=1)).to(x_T.dtype)
