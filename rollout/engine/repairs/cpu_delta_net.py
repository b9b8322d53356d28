"""Gated delta nets (Qwen3-Next, Qwen3.5) of vLLM on a CPU in float32.

vLLM 0.32's CPU kernels compute this layer in bfloat16 only, which moves logprobs by 0.01 nats and more. In float32
`float32_delta_net.py` takes their place.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch


def install() -> None:
    """Replace the layer's CPU operator, for engines that are created later; may be called repeatedly."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    in_bfloat16 = gdn_attention.cpu_gdn_attention_core
    if in_bfloat16.__module__ == __name__:
        return

    def core(
        mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: Any
    ) -> None:
        if mixed_qkv.dtype == torch.bfloat16:
            in_bfloat16(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        from lockstep.rollout.engine.repairs.float32_delta_net import delta_net  # other models do not load it

        delta_net(mixed_qkv, b, a, core_attn_out, layer_name)

    core.__annotations__ = get_type_hints(in_bfloat16) | {"return": None}  # from which vLLM declares the operator
    gdn_attention.cpu_gdn_attention_core = core
