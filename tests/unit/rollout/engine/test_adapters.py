"""Adapters in an engine's worker: staged, checked and kept, before vLLM sees them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from vllm.config.lora import MaxLoRARanks
from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

from lockstep.rollout.engine.adapter_receiver import AdapterReceiver
from lockstep.rollout.engine.adapters import AdapterSettings, refuse_adapter
from lockstep.rollout.engine.protocol import ONLINE_SCHEMES, RANKS, buffer_rank
from lockstep.rollout.errors import EngineError


def receiver() -> AdapterReceiver:
    """Return the receiver of a model with one joined layer of three, and one plain layer."""
    layer = SimpleNamespace(base_layer=SimpleNamespace(input_size=4))
    manager: Any = SimpleNamespace(
        modules={"model.qkv_proj": layer, "model.o_proj": layer},
        packed_modules={"model.qkv_proj": ["model.q_proj", "model.k_proj", "model.v_proj"]},
        lora_config=SimpleNamespace(lora_dtype=torch.float32, max_lora_rank=8),
        model=torch.nn.Module(),
    )
    return AdapterReceiver(manager)


def pair(
    layer: str, *, rank: int = 2, inputs: int = 4, outputs: int = 6, value: float = 1.0
) -> dict[str, torch.Tensor]:
    return {
        f"{layer}.lora_A.weight": torch.full((rank, inputs), value),
        f"{layer}.lora_B.weight": torch.full((outputs, rank), value),
    }


def update(one: AdapterReceiver, tensors: dict[str, torch.Tensor]) -> None:
    one.begin()
    one.load_weights(tensors.items())
    one.finish()


def test_an_adapter_is_kept_and_every_load_gets_its_own_copy() -> None:
    one = receiver()
    update(one, pair("model.q_proj") | pair("model.o_proj", value=3.0))
    first = one.adapter(1)
    first.loras["model.o_proj"].lora_a.zero_()

    again = one.adapter(1)
    assert sorted(again.loras) == ["model.o_proj", "model.q_proj"]
    assert (again.loras["model.o_proj"].lora_a == 3).all()
    assert (again.rank, again.loras["model.q_proj"].scaling) == (2, 1)


def test_before_the_first_update_the_adapter_changes_nothing() -> None:
    (layer,) = receiver().adapter(1).loras.values()
    assert not layer.lora_a.any()
    assert not layer.lora_b.any()


def test_staged_tensors_do_not_share_the_memory_of_the_transfer() -> None:
    one, buffer = receiver(), pair("model.o_proj")
    one.load_weights(buffer.items())
    for tensor in buffer.values():
        tensor.zero_()
    one.finish()

    assert (one.adapter(1).loras["model.o_proj"].lora_b == 1).all()


def test_a_broken_transfer_leaves_nothing_for_the_next() -> None:
    one = receiver()
    one.load_weights(pair("model.q_proj").items())
    update(one, pair("model.o_proj"))

    assert list(one.adapter(1).loras) == ["model.o_proj"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (pair("model.gate_proj"), r"has no adapters on model\.gate_proj; set model\.lora\.send=merged"),
        (pair("model.o_proj", inputs=5), r"o_proj has 4 inputs, and its adapter came as \(2, 5\)"),
        (pair("model.o_proj", rank=9), "rank 9, and the engine was started for 8; restart it with --max-lora-rank 16"),
        (pair("model.o_proj", value=float("inf")), "not finite"),
        (dict(list(pair("model.o_proj").items())[:1]), "came without its lora_B"),
        (dict(list(pair("model.o_proj").items())[1:]), "expected LoRA tensors"),
        ({"model.norm.weight": torch.ones(4)}, r"expected LoRA tensors, found model\.norm\.weight"),
        ({}, "no tensors arrived"),
    ],
)
def test_a_wrong_adapter_is_refused_and_the_old_one_stays(tensors: dict[str, torch.Tensor], message: str) -> None:
    one = receiver()
    update(one, pair("model.o_proj", value=5.0))
    with pytest.raises(RuntimeError, match=message):
        update(one, tensors)

    assert (one.adapter(1).loras["model.o_proj"].lora_a == 5).all()


@pytest.mark.parametrize(
    ("layer", "inputs", "message"),
    [
        ("model.o_proj", 4, None),
        ("model.o_proj", 5, r"adapter other: model\.o_proj has 4 inputs, and its adapter came as \(2, 5\)"),
        ("model.layers.9.o_proj", 4, r"adapter other: the model has no layer model\.layers\.9\.o_proj"),
    ],
)
def test_an_adapter_on_disk_must_fit_the_model(layer: str, inputs: int, message: str | None) -> None:
    a, b = pair(layer, inputs=inputs).values()
    loaded: Any = SimpleNamespace(loras={layer: SimpleNamespace(lora_a=a, lora_b=b)})
    with pytest.raises(RuntimeError, match=message) if message else nullcontext():
        receiver().check_loaded("other", loaded)


def test_an_engine_without_adapters_refuses_requests_for_one() -> None:
    for name in ("policy", "base"):
        refuse_adapter(name, source="the engine")
    with pytest.raises(EngineError, match="the engine was started without adapters, and a request is for step_5"):
        refuse_adapter("step_5", source="the engine")


def test_buffers_have_the_ranks_that_vllm_offers() -> None:
    assert [buffer_rank(rank) for rank in (1, 2, 8, 9, 512)] == [1, 8, 8, 16, 512]
    assert get_args(MaxLoRARanks) == RANKS
    with pytest.raises(ValueError, match="up to rank 512, found 513"):
        buffer_rank(513)


def test_requests_name_the_policy_or_another_adapter() -> None:
    settings = AdapterSettings(max_rank=4, others=(("step 5", "/runs/a"),))
    named = {name: settings.request(name) for name in ("base", "policy", "step 5")}

    assert named["base"] is None
    assert [(one.lora_int_id, one.lora_path) for one in named.values() if one] == [
        (1, "lockstep:policy"),
        (2, "/runs/a"),
    ]
    assert settings.arguments() == {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}
    with pytest.raises(EngineError, match="no adapter step 6; it has base, policy, step 5"):
        settings.request("step 6")


def test_offered_quantizations_are_those_that_vllm_applies_on_arrival() -> None:
    assert set(ONLINE_SCHEMES) < set(ONLINE_QUANT_SHORTHAND_NAMES)
