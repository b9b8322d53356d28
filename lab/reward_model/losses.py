"""Loss over comparisons of responses to one query: cross entropy of the preferred response.

    −log softmax(s)[best]                             (Ziegler et al. 2019, equation 1; K = 4 there)

A pair is K = 2, which is Bradley-Terry: −log σ(s_chosen − s_rejected − margin) (the margin of Llama 2, equation 2).

Shape legend: _B comparisons, _K responses of one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class ComparisonLoss(NamedTuple):
    loss_B: Tensor
    metrics: dict[str, Tensor]
    """Detached sums over comparisons: add over microbatches and ranks, then divide by the number of comparisons."""


def best_of_n_loss(scores_BK: Tensor, best_B: Tensor, present_BK: Tensor, margin_B: Tensor) -> ComparisonLoss:
    """Compute the cross entropy of the preferred response among those of its comparison.

    Args:
        scores_BK: scores of all responses.
        best_B: int64 index of the preferred response.
        present_BK: bool; False pads comparisons with fewer than K responses.
        margin_B: amount by which the preferred score must win; subtracted from it.

    Raises ValueError if a preferred response is not present.
    """
    rows_B = torch.arange(len(best_B), device=best_B.device)
    if not bool(present_BK[rows_B, best_B].all()):
        raise ValueError("a comparison prefers a response that it does not have")
    scores_BK = scores_BK.masked_fill(~present_BK, -torch.inf)
    best_score_B = scores_BK[rows_B, best_B]
    rival_B = scores_BK.index_put((rows_B, best_B), scores_BK.new_tensor(-torch.inf)).amax(1)
    shifted_BK = scores_BK.index_put((rows_B, best_B), best_score_B - margin_B.to(scores_BK.dtype))
    loss_B = F.cross_entropy(shifted_BK, best_B, reduction="none")
    metrics = {
        "loss": loss_B.detach().sum(),
        "accuracy": (best_score_B > rival_B).detach().to(loss_B.dtype).sum(),
        "margin": (best_score_B - rival_B).detach().sum(),
    }
    return ComparisonLoss(loss_B, metrics)
