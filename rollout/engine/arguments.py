"""Arguments of vLLM's engine that depend on the device and on the model's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

CPU_BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache on a CPU, the least that its attention takes."""
BATCH_TOKENS = 8192
"""Tokens of a batch of the engine, in which it also splits longer prompts on a GPU. vLLM's default is 2,048."""
RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "hybrid", "conv"})
"""Types of layers that carry a state from token to token, as transformers names them (`layer_types`)."""


def engine_arguments(
    path: str | Path, *, is_cpu: bool, dtype: str, max_model_len: int | None, trust_remote_code: bool
) -> dict[str, Any]:
    """Return vLLM's engine arguments for this device and the model at `path`, a directory or hub id."""
    arguments: dict[str, Any]
    overrides: dict[str, Any] = {}
    layers, hidden_size = _layers(path, trust_remote_code=trust_remote_code)
    if is_cpu:
        arguments = {
            # A partial prefill of a request with a seed kills the CPU worker, so a whole prompt must fit one step.
            "max_num_batched_tokens": None if max_model_len is None else max(max_model_len, BATCH_TOKENS),
            "enable_chunked_prefill": False,
            # vLLM's 128 would compute most of a prompt again for each sample of its group: whole blocks are shared.
            "block_size": CPU_BLOCK_TOKENS,
        }
        if layers & RECURRENT_LAYERS:
            # vLLM 0.32 caches recurrent states between the chunks of a prompt, and here a prompt is one chunk.
            arguments["enable_prefix_caching"] = False
    else:
        arguments = {"max_num_batched_tokens": BATCH_TOKENS}
        if dtype != "float32":
            # The trainer's logits are float32. Logits of 16 to 32 have steps of 0.125 in bfloat16.
            overrides["head_dtype"] = "float32"
    if "conv" in layers:
        # LFM2's sizes under the names that vLLM reads, which checkpoints of transformers 5 do not have.
        overrides |= {"conv_dim": hidden_size, "block_dim": hidden_size}
    return {**arguments, "hf_overrides": overrides} if overrides else arguments


def _layers(path: str | Path, *, trust_remote_code: bool) -> tuple[frozenset[str], int]:
    """Return the types of a model's layers, where its config names them, and its hidden size."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
    except (OSError, ValueError):  # vLLM reads it again, and says what is wrong
        return frozenset(), 0
    return frozenset(getattr(config, "layer_types", None) or ()), config.hidden_size
