"""The two kinds of bfloat16, autocast over float32 weights and bfloat16 weights: one head, two residual streams."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from lockstep.trainer.batch.packing import PackedBatch, collate, whole_row
from lockstep.trainer.model.policy import Policy

SIZES = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**SIZES),
    "llama": lambda: LlamaConfig(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(**SIZES),
}


def policy_of(family: str) -> Policy:
    """Return a policy whose float32 weights have bfloat16 values, so that only computations differ."""
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(CONFIGS[family]()), compute_dtype="bfloat16")
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3 if "embed" in name else parameter.shape[1] ** -0.5)
            parameter.copy_(parameter.bfloat16())
    return policy


def pack() -> PackedBatch:
    generator = torch.Generator().manual_seed(1)
    return collate([whole_row(torch.randint(1, 1000, (200,), generator=generator).tolist())], [0])


def test_the_head_rounds_the_same_operands_and_keeps_float32_logits() -> None:
    policy, packed = policy_of("qwen3"), pack()
    hidden = torch.randn(packed.num_tokens, SIZES["hidden_size"]).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        cast = policy.score(hidden.float(), packed)
    half = copy.deepcopy(policy).bfloat16().score(hidden, packed)
    for one, other in zip(cast, half, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", CONFIGS)
def test_residuals_are_float32_under_autocast_and_come_closer_to_a_float32_forward(family: str) -> None:
    """docs/memory.md states this difference between one process or DDP, and DeepSpeed."""
    policy, packed = policy_of(family), pack()
    half = copy.deepcopy(policy).bfloat16()
    streams: list[torch.dtype] = []
    for made in (policy, half):
        layers = made.causal_lm.get_decoder().get_submodule("layers")
        for layer in layers.children():
            layer.register_forward_hook(lambda layer, inputs, output: streams.append(output.dtype))

    def scored(made: Policy, *, is_cast: bool = False) -> torch.Tensor:
        streams.clear()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            return made(packed)[0]

    exact = scored(policy)
    cast = scored(policy, is_cast=True)
    assert streams == [torch.float32] * SIZES["num_hidden_layers"]
    rounded = scored(half)
    assert streams == [torch.bfloat16] * SIZES["num_hidden_layers"]
    errors = [float((one - exact).abs().mean()) for one in (cast, rounded)]
    assert 0 < errors[0] < 0.8 * errors[1] < 0.8 * 0.05, errors
