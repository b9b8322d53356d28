"""Weights that vLLM's CPU build packs for its bfloat16 kernels, so that a weight sync no longer reaches them.

Convolutions of Mamba layers compute with a view of their weight. Packing gives the weight other memory, so the view
keeps the first values: after a sync the engine samples with old convolutions. They stay unpacked here, as their kernels
take them. Latent attention (DeepSeek) releases the weight that it packs, and has none to load into: "shape [...] is
invalid for input of size 0". It is kept here.

Only CPUs with AVX-512 for bfloat16 pack convolutions, and only those with AMX the weights of latent attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_REPAIRED = "_is_reached"


def install() -> None:
    """Repair layers built later; may be called repeatedly."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.layers.mamba.short_conv import ShortConv

    for mixer, name in ((MambaMixer, "conv1d"), (MambaMixer2, "conv1d"), (ShortConv, "conv")):
        if _REPAIRED not in mixer.__init__.__dict__:
            mixer.__init__ = _unpacked(mixer.__init__, name)
    if _REPAIRED not in MLAAttention.process_weights_after_loading.__dict__:
        MLAAttention.process_weights_after_loading = _kept(MLAAttention.process_weights_after_loading)


def _unpacked(initialize: Callable[..., None], name: str) -> Callable[..., None]:
    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        getattr(self, name)._cpu_skip_gemm_dispatch = True

    __init__.__dict__[_REPAIRED] = True
    return __init__


def _kept(process: Callable[[Any, torch.dtype], None]) -> Callable[[Any, torch.dtype], None]:
    @functools.wraps(process)
    def process_weights_after_loading(self: Any, act_dtype: torch.dtype) -> None:
        if not self.is_amx_bmm_enabled:
            return process(self, act_dtype)
        weight = self.kv_b_proj.weight
        process(self, act_dtype)
        self.kv_b_proj.weight = weight
        return None

    process_weights_after_loading.__dict__[_REPAIRED] = True
    return process_weights_after_loading
