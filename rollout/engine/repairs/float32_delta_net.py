"""Gated delta nets of vLLM on a CPU in float32: tokens of running requests by one batched step of the recurrence,
prompts sequence by sequence in the chunked form.

Not covered: speculative decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


@torch.no_grad()
def delta_net(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: Any
) -> None:
    """Compute the recurrence of all sequences of a batch, and update their states in vLLM's cache.

    Args:
        mixed_qkv: (tokens, channels) before the convolution; tokens of running requests come first, then prompts.
        b: (tokens, value heads), and a: the same; inputs of the gates.
        core_attn_out: (tokens, value heads, head size), written in place.
        layer_name: of the layer, whose weights and cache are used.
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures memory
        return
    meta: Any = context.attn_metadata[layer.prefix]
    windows, states = layer.kv_cache
    if not is_conv_state_dim_first():
        windows = windows.transpose(1, 2)  # (slots, channels, width - 1)
    slots, heads, v_dim, k_dim = states.shape
    states = states.view(slots, heads, k_dim, v_dim)
    if windows.shape[-1] != layer.conv1d.weight.shape[-1] - 1:
        raise NotImplementedError("float32 gated delta nets with speculative decoding on a CPU")
    starts = meta.non_spec_query_start_loc.tolist()
    own_slots = meta.non_spec_state_indices_tensor
    running = meta.num_decodes
    if running:
        slot = own_slots[:running].long()
        tokens = slice(0, running)
        core_attn_out[tokens] = _advance(
            layer, windows, states, slot, mixed_qkv[tokens, None], a[tokens, None], b[tokens, None], is_new=False
        )[:, 0]
    for index in range(running, running + meta.num_prefills):
        tokens = slice(starts[index], starts[index + 1])
        core_attn_out[tokens] = _advance(
            layer, windows, states, own_slots[index : index + 1].long(), mixed_qkv[None, tokens], a[None, tokens],
            b[None, tokens], is_new=not bool(meta.has_initial_state[index]),
        )[0]  # fmt: skip


def _advance(
    layer: Any,
    windows: torch.Tensor,
    states: torch.Tensor,
    slot: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    is_new: bool,
) -> torch.Tensor:
    """Advance sequences of equal length, x (sequences, length, channels), and return (sequences, length, heads, size).

    slot: (sequences,) their places in the cache. is_new: the sequences begin here.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    count, length, _ = x.shape
    weight = layer.conv1d.weight.view(x.shape[-1], 1, -1)
    before = torch.zeros_like(windows[slot]) if is_new else windows[slot]
    window = torch.cat([before.to(x.dtype), x.transpose(1, 2)], -1)
    windows[slot] = window[..., -windows.shape[-1] :].to(windows.dtype)
    mixed_qkv = F.silu(F.conv1d(window, weight, layer.conv1d.bias, groups=x.shape[-1])).transpose(1, 2)
    query, key, value = (
        part.view(count, length, *part.shape[2:])
        for part in layer.rearrange_mixed_qkv(mixed_qkv.reshape(-1, x.shape[-1]))
    )
    group = value.shape[2] // key.shape[2]
    rule = torch_recurrent_gated_delta_rule if length == 1 else torch_chunk_gated_delta_rule
    output, state = rule(
        query.repeat_interleave(group, 2),
        key.repeat_interleave(group, 2),
        value,
        g=-layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias),
        beta=b.sigmoid(),
        initial_state=None if is_new else states[slot],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states[slot] = state.to(states.dtype)
    return output
