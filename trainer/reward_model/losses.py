"""Losses over comparisons of responses to one query, and their metrics.

    best of K:   −log softmax(s)[best]                            (Ziegler et al. 2019, equation 1; K = 4 there)
    pairwise:    −log σ(s_chosen − s_rejected − margin)           (Bradley-Terry; the margin of Llama 2, equation 2)

With K = 2 and no margin they are the same. Dimensions: `_B` comparisons, `_K` responses of one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class ComparisonLoss(NamedTuple):
    loss_B: Tensor
    metrics: dict[str, Tensor]
    """Sums over comparisons, detached: add them over microbatches and ranks, then divide by their number."""


def best_of_n_loss(
    scores_BK: Tensor, best_B: Tensor, is_there_BK: Tensor | None = None, margin_B: Tensor | None = None
) -> ComparisonLoss:
    """Cross entropy of the labelled response among those of its comparison.

    Args:
        scores_BK: of all responses.
        best_B: int64 index of the response that was preferred.
        is_there_BK: bool; False for responses that a comparison with fewer than K does not have.
        margin_B: subtracted from the preferred score, so that it must win by that much; None: 0.

    Raises ValueError if a preferred response is not there.
    """
    there_BK = torch.ones_like(scores_BK, dtype=torch.bool) if is_there_BK is None else is_there_BK
    rows_B = torch.arange(len(best_B), device=best_B.device)
    if not bool(there_BK[rows_B, best_B].all()):
        raise ValueError("a comparison prefers a response that it does not have")
    scores_BK = scores_BK.masked_fill(~there_BK, -torch.inf)
    best_score_B = scores_BK[rows_B, best_B]
    others_BK = scores_BK.index_put((rows_B, best_B), scores_BK.new_tensor(-torch.inf))
    rival_B = others_BK.amax(1)
    shifted_BK = scores_BK
    if margin_B is not None:
        shifted_BK = scores_BK.index_put((rows_B, best_B), best_score_B - margin_B.to(scores_BK.dtype))
    loss_B = F.cross_entropy(shifted_BK, best_B, reduction="none")
    metrics = {
        "loss": loss_B.detach().sum(),
        "accuracy": (best_score_B > rival_B).detach().to(loss_B.dtype).sum(),
        "margin": (best_score_B - rival_B).detach().sum(),
    }
    return ComparisonLoss(loss_B, metrics)


def pairwise_loss(chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | None = None) -> ComparisonLoss:
    """Bradley-Terry on pairs: `best_of_n_loss` of two."""
    scores_BK = torch.stack([chosen_B, rejected_B], 1)
    best_B = torch.zeros(len(chosen_B), dtype=torch.int64, device=chosen_B.device)
    return best_of_n_loss(scores_BK, best_B, margin_B=margin_B)
