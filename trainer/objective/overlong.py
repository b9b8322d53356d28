"""Soft overlong punishment (DAPO, Yu et al. 2025, arXiv 2503.14476, equation 13): length costs reward before it is cut.

    penalty(n) = 0                        n ≤ H − B
               = −((n − (H − B)) / B)     H − B < n ≤ H
               = −1                       n > H

H is the horizon and B the buffer, both in tokens that the model sampled, over all turns.
"""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, horizon: int, buffer: float) -> float:
    """A number in [−1, 0]. buffer: share of the horizon, in (0, 1]."""
    start = (1 - buffer) * horizon
    return -min(max((num_tokens - start) / (horizon - start), 0.0), 1.0)
