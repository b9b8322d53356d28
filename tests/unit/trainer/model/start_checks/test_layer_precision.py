"""Layers of the trained model against their computation in float32, at the start of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.model.layers import packed_attention
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks import layer_precision
from tests.fixtures.families import FAMILIES, WINDOW, save_family

F32, BF16 = torch.float32, torch.bfloat16
LENGTH = 300
"""Tokens of the row: beyond the windows and chunks of the families."""


def loaded(family: str, directory: Path, mode: str) -> tuple[Policy, Callable[[PackedBatch], object]]:
    """Return a policy and its computation: float32, mixed precision, or weights in bfloat16 as under ZeRO."""
    policy = Policy.from_pretrained(
        save_family(family, directory), compute_dtype="float32" if mode == "float32" else "bfloat16"
    )
    if mode == "bfloat16":
        for parameter in policy.parameters():  # buffers stay as they are
            parameter.data = parameter.data.to(BF16)

    def run(packed: PackedBatch) -> object:
        with torch.autocast("cpu", BF16, enabled=mode == "mixed"):
            return policy(packed, with_entropy=False)

    return policy, run


def worst(policy: Policy, run: Callable[[PackedBatch], object], mode: str = "float32") -> dict[str, float]:
    found = layer_precision.differences(
        policy,
        run,
        length=LENGTH,
        dtype=F32 if mode == "float32" else BF16,
        gather=lambda layer: contextlib.nullcontext(),
    )
    return {one.layer: one.worst for one in found}


@pytest.mark.parametrize("mode", ["float32", "mixed", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_family_are_far_within_the_bound(family: str, mode: str, tmp_path: Path) -> None:
    policy, run = loaded(family, tmp_path, mode)
    found = worst(policy, run, mode)
    assert len(found) >= 2
    assert max(found.values()) < (0.02 if mode == "float32" else 0.3)


def test_the_check_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    policy, run = loaded("gemma3", tmp_path, "mixed")
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    chosen = policy.causal_lm.config._attn_implementation
    worst(policy, run, "mixed")
    assert policy.causal_lm.config._attn_implementation == chosen
    assert policy.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert not any(module._forward_hooks for module in policy.causal_lm.get_decoder().layers)


def test_tokens_without_an_embedding_differ_by_nothing(tmp_path: Path) -> None:
    policy, run = loaded("granite_hybrid", tmp_path, "float32")
    policy.causal_lm.get_input_embeddings().weight.data[:] = 0
    assert max(worst(policy, run).values()) < 0.02


def narrower_window(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("sliding_window"):
        kwargs["sliding_window"] -= WINDOW // 4
    return original(*args, **kwargs)


def wider_scale(original: Callable[..., Any], module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    return original(module, query * 1.2, *args, **kwargs)


def half_of_the_row(
    original: Callable[..., Any], module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """Forget the first keys, as a kernel that cuts at a distance."""
    value = value.clone()
    value[:, :, : LENGTH // 2] = 0
    return original(module, query, key, value, *args, **kwargs)


@pytest.mark.parametrize("mode", ["float32", "mixed", "bfloat16"])
@pytest.mark.parametrize("fault", [narrower_window, wider_scale, half_of_the_row])
def test_a_kernel_with_a_fault_is_named(
    fault: Callable[..., Any], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, run = loaded("mistral", tmp_path, mode)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS[packed_attention.PACKED_ROWS]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, packed_attention.PACKED_ROWS, partial(fault, original))
    with pytest.raises(ConfigError, match=r"layers\.0 differs from its computation in float32 by .* at tokens \d+ to"):
        layer_precision.check(
            policy, run, length=LENGTH, dtype=F32 if mode == "float32" else BF16,
            gather=lambda layer: contextlib.nullcontext(),
        )  # fmt: skip


def test_a_layer_in_half_precision_is_named_in_a_run_in_float32(tmp_path: Path) -> None:
    policy, _ = loaded("qwen3", tmp_path, "float32")
    layer = policy.causal_lm.get_decoder().layers[1]
    inner = layer.mlp.forward
    layer.mlp.forward = lambda states: inner(states.to(BF16).float()).to(BF16).float()
    with pytest.raises(ConfigError, match=r"layers\.1 differs"):
        layer_precision.check(
            policy, lambda packed: policy(packed, with_entropy=False), length=LENGTH, dtype=F32,
            gather=lambda layer: contextlib.nullcontext(),
        )  # fmt: skip


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    policy, run = loaded("qwen3", tmp_path, "float32")
    policy.causal_lm.get_decoder().layers[0].mlp.forward = lambda states: states * torch.nan
    with pytest.raises(ConfigError, match=r"layers\.0 differs from its computation in float32 by nan"):
        layer_precision.check(policy, run, length=LENGTH, dtype=F32, gather=lambda layer: contextlib.nullcontext())


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_rounded_buffer_is_named(family: str, tmp_path: Path) -> None:
    policy, run = loaded(family, tmp_path, "mixed")
    rotary = policy.causal_lm.get_decoder().rotary_emb
    name = next(name for name in rotary._buffers if name.endswith("inv_freq"))
    rotary._buffers[name] = rotary._buffers[name].to(BF16)
    with pytest.raises(ConfigError, match=rf"the buffer model\.rotary_emb\.{name} begins with .* of torch\.bfloat16"):
        layer_precision.check(policy, run, length=LENGTH, dtype=BF16, gather=lambda layer: contextlib.nullcontext())
