"""Experts that compute in the dtype of autocast, registered with transformers as the implementation `cast_grouped_mm`.

transformers computes all experts of a layer by `grouped_mm`, which autocast leaves alone. Over float32 weights
(one process, DDP) it would stay in float32, without tensor cores, while all other products and the engine are rounded
to bfloat16. Under DeepSpeed, weights and states are bfloat16 already, and nothing is cast.

Covered: experts of transformers' `grouped_mm`. Others (Llama 4's, `eager`, `batched_mm`) are products that autocast
knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from lockstep.trainer.model.layers.autocast import operand_dtype

GROUPED_MM = "grouped_mm"
CAST_GROUPED_MM = "cast_grouped_mm"


def cast_experts(model: PreTrainedModel) -> None:
    """Make the experts of a model compute in the dtype of autocast, in place; others stay as they are; idempotent."""
    ALL_EXPERTS_FUNCTIONS.register(CAST_GROUPED_MM, _cast_grouped_mm)
    if model.config.get_text_config()._experts_implementation == GROUPED_MM:
        model.set_experts_implementation(CAST_GROUPED_MM)


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
