"""Autocast for operations that torch does not cast itself: custom kernels and grouped products."""

from __future__ import annotations

import torch


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
