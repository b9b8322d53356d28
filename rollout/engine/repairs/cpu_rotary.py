"""Rotary positions on a CPU for queries and keys with a dimension of heads.

vLLM's CPU kernel (`rotary_embedding` in csrc/cpu/pos_encoding.cpp) takes only flat heads, (tokens, heads × head size).
In a tensor (tokens, heads, head size) it takes the stride of a head for that of a token, and so rotates the wrong
elements without an error. The latent attention of DeepSeek-V2 and V3 and the attention of LFM2 pass such tensors; their
logprobs were wrong by 0.4 to 1.2. CUDA's kernel takes both shapes.
"""

from __future__ import annotations

import functools

import torch

_REPAIRED = "_takes_heads"


def install() -> None:
    """Rotate such tensors by vLLM's own torch code, for models built later; may be called repeatedly."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu
    if _REPAIRED in kernel.__dict__:
        return

    @functools.wraps(kernel)
    def forward_cpu(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() == 2 and (key is None or key.dim() == 2):
            return kernel(self, positions, query, key)
        rotated_query, rotated_key = self.forward_native(positions, query, key)
        query.copy_(rotated_query)  # in place, as the kernel
        if key is not None and rotated_key is not None:
            key.copy_(rotated_key)
        return query, key

    forward_cpu.__dict__[_REPAIRED] = True
    RotaryEmbedding.forward_cpu = forward_cpu
