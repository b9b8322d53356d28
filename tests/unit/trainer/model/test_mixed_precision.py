"""The two kinds of bfloat16, autocast over float32 weights and bfloat16 weights: one head, one residual stream."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer

from lockstep.rollout.models.computed_buffers import set_buffers
from lockstep.trainer.batch.packing import PackedBatch, collate, whole_row
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import FAMILIES

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
    return collate([whole_row(torch.randint(1, 500, (200,), generator=generator).tolist())], [0])


def test_the_head_rounds_the_same_operands_and_keeps_float32_logits() -> None:
    policy, packed = policy_of("qwen3"), pack()
    hidden = torch.randn(packed.num_tokens, SIZES["hidden_size"]).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        cast = policy.score(hidden.float(), packed)
    half = copy.deepcopy(policy).bfloat16().score(hidden, packed)
    for one, other in zip(cast, half, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_half", [False, True], ids=["autocast", "bfloat16 weights"])
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_the_residual_stream_is_bfloat16(family: str, is_half: bool) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=512) if family == "gpt2" else FAMILIES[family]()
    policy = Policy(AutoModelForCausalLM.from_config(config), compute_dtype="bfloat16")
    streams: list[torch.dtype] = []
    for module in policy.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_hook(lambda module, inputs, output: streams.append(_states(output).dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_half), torch.no_grad():
        (policy.bfloat16() if is_half else policy).hidden_states(pack())
    assert len(streams) >= 2
    assert set(streams) == {torch.bfloat16}


def _states(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("family", CONFIGS)
def test_both_come_equally_close_to_a_float32_forward(family: str) -> None:
    """docs/memory.md says so. With frequencies in bfloat16, the error of this long row doubles."""
    policy = policy_of(family)
    half = copy.deepcopy(policy).bfloat16()
    set_buffers(half.causal_lm, lambda name: None)  # as models are loaded
    generator = torch.Generator().manual_seed(1)
    packed = collate([whole_row(torch.randint(1, 500, (4000,), generator=generator).tolist())], [0])
    with torch.no_grad():
        exact, rounded = policy(packed)[0], half(packed)[0]
        with torch.autocast("cpu", torch.bfloat16):
            cast = policy(packed)[0]
    errors = [float((one - exact).abs().mean()) for one in (cast, rounded)]
    assert 0 < max(errors) < 0.05, errors
    if family == "llama":  # whose norms round before they multiply by their weights, here of bfloat16 values
        assert torch.equal(cast, rounded)
    else:
        assert errors[0] == pytest.approx(errors[1], rel=0.15), errors
