"""Architectures of the demo's model: small random decoders of families that are trained today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    FalconH1Config,
    GptOssConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,  # three times the usual: narrow models learn to copy sooner
    "bos_token_id": None,
    "dtype": "float32",
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
UNTIED = {"tie_word_embeddings": False}
"""For families whose models in vLLM always have a head of their own."""

ARCHITECTURES: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen3": lambda **tokens: Qwen3Config(**SIZES, **tokens),
    "qwen3_moe": lambda **tokens: Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, **tokens),
    "falcon_h1": lambda **tokens: FalconH1Config(
        **SIZES, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=32, mamba_n_groups=1,
        mamba_chunk_size=64, **tokens,
    ),
    "qwen3_next": lambda **tokens: Qwen3NextConfig(
        **SIZES | UNTIED, **EXPERTS, norm_topk_prob=True, shared_expert_intermediate_size=192,
        layer_types=["linear_attention", "full_attention"], linear_key_head_dim=32, linear_value_head_dim=32,
        linear_num_key_heads=4, linear_num_value_heads=4, **tokens,
    ),
    "gpt_oss": lambda **tokens: GptOssConfig(
        **SIZES | UNTIED, num_local_experts=4, num_experts_per_tok=2, sliding_window=128, **tokens
    ),
}  # fmt: skip
"""By model type: the config for a tokenizer (`vocab_size`, `eos_token_id`, `pad_token_id`)."""
