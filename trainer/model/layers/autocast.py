"""Autocast for what torch does not cast itself: custom kernels, grouped products, embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def operand_dtype(*operands: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast rounds the operands of a product; None: it is off, or one is float64."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device) or any(operand.dtype == torch.float64 for operand in operands):
        return None
    return torch.get_autocast_dtype(device)


def cast(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the operands of a product as autocast would round them."""
    dtype = operand_dtype(*operands)
    return operands if dtype is None else tuple(operand.to(dtype) for operand in operands)


def cast_embeddings(model: nn.Module) -> None:
    """Make embeddings give the dtype of autocast, in place, and with them the residual stream of all layers.

    A float32 embedding would keep it in float32, where bfloat16 weights (DeepSpeed) and the engine have bfloat16. It
    would come closer to a float32 forward pass, but not to the engine, whose rounding it would not share.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_cast_output)


def _cast_output(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return cast(output)[0]
