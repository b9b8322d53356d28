"""PPO's clipped value loss per token.

    l = ½ max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²)

The maximum, not the minimum: clipping may only increase the loss, so that a value that has moved further than ε from
V_old gets no gradient for moving on.

Sources: "The N Implementation Details of RLHF with PPO" (Hugging Face blog, 2023), "Clipped value function";
github.com/openai/baselines, `baselines/ppo2/model.py`. Dimensions: `_T` trained tokens of a microbatch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    loss_T: Tensor
    metrics: dict[str, Tensor]
    """Detached sums over the tokens of the microbatch (`losses.inputs.LossOutputs`)."""


def clipped_value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float | None) -> ValueLoss:
    """Return the value loss of each token, with a gradient for `values_T` only.

    Args:
        old_values_T: values at the start of the update.
        returns_T: targets of the values (`gae(...).returns`).
        clip: ε [reward]; None: not clipped.

    Raises:
        ValueError: shapes that differ.
    """
    if not values_T.shape == old_values_T.shape == returns_T.shape:
        raise ValueError(
            f"value loss: values {tuple(values_T.shape)}, old values {tuple(old_values_T.shape)} and returns "
            f"{tuple(returns_T.shape)} must have one shape"
        )
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
