"""Selections by rank that do not depend on the rounding of the values.

Packs and ranks change the last digits of logprobs and entropies. Values that are equal in exact arithmetic, for example
those of two rollouts with the same tokens, must not be told apart by these digits: values within `TIE` of a threshold
count as equal to it, and share its fate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TIE = 1e-5
"""Relative above 1, absolute below; far above the rounding of float32 logprobs."""


def threshold_below(value: Tensor) -> Tensor:
    """Return the threshold that is passed by the value and by all that tie with it."""
    return value - TIE * value.abs().clamp(min=1.0)


def largest(x_N: Tensor, count: int) -> Tensor:
    """Return the (N,) bool mask of the `count` largest values, and of those that tie with the smallest of them."""
    if not len(x_N) or count < 1:
        return x_N.new_zeros(len(x_N)).bool()
    x_N = x_N.double()
    smallest = x_N.topk(min(count, len(x_N))).values[-1]
    return x_N >= threshold_below(smallest)


def covariances(logp_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Return the float64 terms of the covariance of logprob and advantage over the step (Cui et al. 2025, eq. 10)."""
    logp_N, advantages_N = logp_N.double(), advantages_N.double()
    if not len(logp_N):
        return logp_N
    return (logp_N - logp_N.mean()) * (advantages_N - advantages_N.mean())
