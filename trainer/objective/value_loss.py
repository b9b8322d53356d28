"""The clipped value loss of PPO, token by token.

    l = ½ max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²)

The maximum, not the minimum: clipping may only ever make the loss larger, so that a value which has moved further than
ε from where it was gets no gradient for moving on.

Source: seed 003, "Clipped value function"; Schulman et al.'s `ppo2`. Dimensions: `_T` trained tokens of a microbatch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    loss_T: Tensor
    """To be summed with the coefficients of `trainer.objective.loss_normalization`, times the value coefficient."""
    metrics: dict[str, Tensor]
    """Sums over the tokens of this microbatch, detached: add them over microbatches and ranks, then divide by N_tok."""


def clipped_value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float | None) -> ValueLoss:
    """Per-token value loss.

    Args:
        values_T: of the critic now, with gradient.
        old_values_T: at the start of the update, detached here.
        returns_T: what values should have been (`gae(...).returns`), detached here.
        clip: ε, in the unit of rewards; None: not clipped.

    Raises ValueError for shapes that differ or a clip that is not positive.
    """
    if not values_T.shape == old_values_T.shape == returns_T.shape:
        raise ValueError(
            f"value loss: values {tuple(values_T.shape)}, old values {tuple(old_values_T.shape)} and returns "
            f"{tuple(returns_T.shape)} must have one shape"
        )
    if clip is not None and not clip > 0:
        raise ValueError(f"value clip is {clip}, expected above 0 (0.2 is usual), or null to leave it off")
    old_values_T, returns_T = old_values_T.detach(), returns_T.detach()
    error_T = (values_T - returns_T).square()
    loss_T, is_clipped_T = error_T, torch.zeros_like(error_T)
    if clip is not None:
        clipped_T = torch.clamp(values_T, old_values_T - clip, old_values_T + clip)
        clipped_error_T = (clipped_T - returns_T).square()
        loss_T = torch.maximum(error_T, clipped_error_T)
        is_clipped_T = (clipped_error_T > error_T).to(error_T.dtype)
    loss_T = 0.5 * loss_T
    metrics = {
        "ppo/value/loss": loss_T.detach().sum(),
        "ppo/value/error": error_T.detach().sum(),
        "ppo/value/clip_frac": is_clipped_T.detach().sum(),
        "ppo/value/vpred": values_T.detach().sum(),
    }
    return ValueLoss(loss_T, metrics)
