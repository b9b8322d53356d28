"""Adapters as tensors for an engine that applies them: names, scale, and what cannot be sent."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.rollout.errors import SyncError
from lockstep.rollout.weights.source import ZeroSource
from tests.fixtures.adapted import LAYERS, perturb_adapters, with_lora
from tests.fixtures.models import tiny_qwen3


def sent(model: torch.nn.Module, **settings: object) -> dict[str, torch.Tensor]:
    return dict(ZeroSource(model, adapters_only=True, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8 / 3), (True, 8 / math.sqrt(3))])
def test_the_product_of_what_is_sent_is_the_layers_change(rslora: bool, scale: float) -> None:
    model = with_lora(tiny_qwen3(tied=True), use_rslora=rslora)
    perturb_adapters(model, seed=1)
    found = sent(model)

    assert len(found) == 2 * 4 * len(LAYERS)
    layer = model.base_model.model.model.layers[2].mlp.down_proj
    assert layer.scaling["default"] == pytest.approx(scale)
    a, b = (found[f"model.layers.2.mlp.down_proj.lora_{part}.weight"] for part in "AB")
    assert torch.allclose(b @ a, layer.get_delta_weight("default"), atol=1e-6)
    assert a.shape == (3, 128)
    assert b.shape == (64, 3)


def test_the_scale_is_applied_before_rounding() -> None:
    model = with_lora(tiny_qwen3(tied=True))
    perturb_adapters(model, seed=1)
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"

    assert sent(model, dtype=torch.bfloat16)[name].equal(sent(model)[name].to(torch.bfloat16))


def test_values_are_those_of_the_time_of_sending() -> None:
    model = with_lora(tiny_qwen3(tied=True))
    source = ZeroSource(model, adapters_only=True)
    perturb_adapters(model, seed=2)

    assert all(tensor.abs().max() > 0 for _, tensor in source)


def test_what_no_adapter_holds_is_refused() -> None:
    with pytest.raises(SyncError, match=r"trained parameters are none, first .*lm_head.*model\.lora\.send=merged"):
        sent(with_lora(tiny_qwen3(tied=False), modules_to_save=["lm_head"]))
    with pytest.raises(SyncError, match="DoRA"):
        sent(with_lora(tiny_qwen3(tied=True), use_dora=True))
    with pytest.raises(SyncError, match="not a linear layer"):
        sent(with_lora(tiny_qwen3(tied=False), layers=["embed_tokens"]))
    with pytest.raises(SyncError, match=r"has none; set model\.lora\.rank=16"):
        sent(tiny_qwen3(tied=True))
    model = with_lora(tiny_qwen3(tied=True))
    model.merge_adapter()
    with pytest.raises(SyncError, match="one active, unmerged adapter"):
        sent(model)
