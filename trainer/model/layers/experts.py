"""Experts in the dtype of autocast, and routers in their own.

Experts are registered with transformers as the implementation `cast_grouped_mm`. transformers computes all experts of a
layer by `grouped_mm`, which autocast leaves alone. Over float32 weights (one process, DDP) it would stay in float32,
without tensor cores, while all other products and the engine are rounded to bfloat16. Under DeepSpeed, weights and
states are bfloat16 already, and nothing is cast.

The routers of DeepSeek and its relatives cast their operands to float32, which autocast would undo: near ties they
would choose other experts than under DeepSpeed and in the engine, which keep float32 logits.

Covered: experts of transformers' `grouped_mm`. Others (Llama 4's, `eager`, `batched_mm`) are products that autocast
knows.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from lockstep.trainer.model.layers.autocast import operand_dtype

GROUPED_MM = "grouped_mm"
CAST_GROUPED_MM = "cast_grouped_mm"
EXPERTS = "experts"
"""Name of the experts inside a sparse block."""


def cast_experts(model: PreTrainedModel) -> None:
    """Make the experts of a model compute in the dtype of autocast, in place; others stay as they are; idempotent."""
    ALL_EXPERTS_FUNCTIONS.register(CAST_GROUPED_MM, _cast_grouped_mm)
    if model.config.get_text_config()._experts_implementation == GROUPED_MM:
        model.set_experts_implementation(CAST_GROUPED_MM)


def keep_float32_routers(model: PreTrainedModel) -> None:
    """Exempt from autocast the routers that cast to float32 themselves, in place."""
    for block in model.modules():
        if EXPERTS in dict(block.named_children()):
            for router in block.children():
                if type(router).__name__.endswith("Router") and _casts_to_float32(router):
                    router.forward = MethodType(_forward_without_autocast, router)


def _casts_to_float32(router: nn.Module) -> bool:
    """Return True if a router with float32 weights takes bfloat16; False also for the shards of ZeRO-3, which has no
    autocast."""
    weight = next(router.parameters())
    try:
        with torch.no_grad():
            router(torch.zeros(1, weight.shape[-1], dtype=torch.bfloat16, device=weight.device))
    except (RuntimeError, IndexError, TypeError):  # other dtypes, shards, further arguments
        return False
    return True


def _forward_without_autocast(router: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(hidden_states.device.type, enabled=False):
        return type(router).forward(router, hidden_states, *args, **kwargs)


class _Cast:
    """Experts as `grouped_mm_experts_forward` reads them: with weights in another dtype, which backward passes on."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) else value


def _cast_grouped_mm(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    dtype = operand_dtype(hidden_states)
    if dtype is None:
        return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    view: Any = _Cast(experts, dtype)
    return grouped_mm_experts_forward(view, hidden_states.to(dtype), top_k_index, top_k_weights)
