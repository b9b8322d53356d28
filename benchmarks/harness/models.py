"""Models with random weights, because time and memory do not depend on the weights."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config


def small_qwen3(*, hidden: int, layers: int, vocab: int, max_positions: int = 4096) -> PreTrainedModel:
    """Make a Qwen3 with heads of 32 (128 from a width of 1,024), half as many KV heads, and tied embeddings."""
    head_dim = 128 if hidden >= 1024 else 32
    heads = max(1, hidden // head_dim)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        Qwen3Config(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            head_dim=head_dim,
            vocab_size=vocab,
            max_position_embeddings=max_positions,
            tie_word_embeddings=True,
        )
    )
