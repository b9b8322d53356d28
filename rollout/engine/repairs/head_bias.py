"""Biases of heads, which vLLM adds to the logits only where a model's code hands them over; PhiMoE's does not."""

from __future__ import annotations

import functools
from typing import Any

import torch

_REPAIRED = "_adds_bias"


def install() -> None:
    """Add the bias that a head has, in models built later; may be called repeatedly."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    compute = LogitsProcessor.forward
    if _REPAIRED in compute.__dict__:
        return

    @functools.wraps(compute)
    def forward(
        self: LogitsProcessor,
        lm_head: Any,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        bias = getattr(lm_head, "bias", None) if embedding_bias is None else embedding_bias
        return compute(self, lm_head, hidden_states, bias, skip_gather)

    forward.__dict__[_REPAIRED] = True
    LogitsProcessor.forward = forward
