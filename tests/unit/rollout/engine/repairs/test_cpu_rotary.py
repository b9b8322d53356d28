"""Rotary positions of vLLM on a CPU. With an engine: tests/integration/test_model_families.py (deepseek_v3)."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from lockstep.rollout.engine.plugin import register

TOKENS, HEADS, PASSED, ROTATED = 5, 3, 8, 16
POSITIONS = torch.arange(TOKENS) + 7


def rotary(*, is_neox_style: bool) -> RotaryEmbedding:
    register()
    with set_current_vllm_config(VllmConfig()):
        return RotaryEmbedding(ROTATED, ROTATED, 64, 10000.0, is_neox_style, torch.float32)


def expected(layer: RotaryEmbedding, heads: torch.Tensor) -> torch.Tensor:
    """Rotate (tokens, heads, size) in float64, from the definition."""
    frequencies = 10000.0 ** (-torch.arange(0, ROTATED, 2, dtype=torch.float64) / ROTATED)
    angles = (POSITIONS[:, None] * frequencies)[:, None]
    if layer.is_neox_style:
        first, second = heads.double().chunk(2, -1)
    else:
        first, second = heads.double()[..., ::2], heads.double()[..., 1::2]
    rotated = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(rotated, -1) if layer.is_neox_style else torch.stack(rotated, -1).flatten(-2)


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_heads_are_rotated_in_place(is_neox_style: bool) -> None:
    """As multi-head latent attention calls it: parts of the queries' heads, and one key for all heads."""
    layer = rotary(is_neox_style=is_neox_style)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS, HEADS, PASSED + ROTATED, generator=generator)
    key = torch.randn(TOKENS, PASSED + ROTATED, generator=generator)
    before, key_before = query.clone(), key.clone()
    part, key_part = query[..., PASSED:], key[:, PASSED:].unsqueeze(1)
    found, found_key = layer.forward_cpu(POSITIONS, part, key_part)
    assert found_key is not None
    torch.testing.assert_close(found.double(), expected(layer, before[..., PASSED:]), atol=1e-6, rtol=0)
    torch.testing.assert_close(found_key.double(), expected(layer, key_before[:, None, PASSED:]), atol=1e-6, rtol=0)
    assert torch.equal(query[..., PASSED:], found), "callers may ignore what is returned"
    assert torch.equal(key[:, None, PASSED:], found_key)
    assert torch.equal(query[..., :PASSED], before[..., :PASSED])
    assert torch.equal(key[:, :PASSED], key_before[:, :PASSED])


def test_queries_without_a_key_are_rotated() -> None:
    layer = rotary(is_neox_style=True)
    query = torch.randn(TOKENS, HEADS, ROTATED, generator=torch.Generator().manual_seed(0))
    before = query.clone()
    found, found_key = layer.forward_cpu(POSITIONS, query)
    assert found_key is None
    torch.testing.assert_close(found.double(), expected(layer, before), atol=1e-6, rtol=0)


def test_flat_heads_are_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = rotary(is_neox_style=True)
    monkeypatch.setattr(layer, "forward_native", None)
    heads = torch.randn(TOKENS, HEADS, ROTATED, generator=torch.Generator().manual_seed(0))
    found, _ = layer.forward_cpu(POSITIONS, heads.flatten(1).clone(), heads.flatten(1).clone())
    torch.testing.assert_close(found.double(), expected(layer, heads).flatten(1), atol=1e-6, rtol=0)
