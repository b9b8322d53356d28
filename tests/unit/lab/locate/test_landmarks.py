"""The map from the trainer's operators to the engine's, on a tiny model and an invented trace."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.lab.locate.engine_trace import EngineTrace
from lockstep.lab.locate.landmarks import KNOWN, Landmark, Part, map_landmarks, refuse_unknown
from lockstep.rollout.errors import ConfigError
from tests.fixtures.families import FAMILIES

POSITIONS = 7
LAYER = "model.layers.0"


def trace(**columns: int) -> EngineTrace:
    """A trace of modules of layer 0, given by the widths of their outputs; `__` stands for a point."""
    names = {f"{LAYER}.{name.replace('__', '.')}": width for name, width in columns.items()}
    values = {name: torch.randn(POSITIONS, width) for name, width in names.items()}
    return EngineTrace(
        ids=tuple(range(POSITIONS + 1)), num_prompt=4, dtype=torch.float32, temperature=1.0,
        sampled_logprobs=torch.zeros(4), logits=torch.zeros(4, 512),
        inputs={name: (torch.randn(POSITIONS, 64),) for name in values},
        outputs={name: (value,) for name, value in values.items()},
        routes={}, output_sizes={f"{LAYER}.self_attn.qkv_proj": (64, 32, 32)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(FAMILIES["qwen3"]())


def test_a_packed_projection_is_cut_into_its_parts(model: PreTrainedModel) -> None:
    given = trace(self_attn__qkv_proj=128)
    values = map_landmarks(model, given).values
    packed = given.outputs[f"{LAYER}.self_attn.qkv_proj"][0]
    for name, columns in {"q_proj": slice(0, 64), "k_proj": slice(64, 96), "v_proj": slice(96, 128)}.items():
        assert torch.equal(values[Landmark(f"{LAYER}.self_attn.{name}", Part.OUTPUT)], packed[:, columns])


def test_what_has_no_counterpart_is_said(model: PreTrainedModel) -> None:
    found = map_landmarks(model, trace(self_attn__qkv_proj=128))
    assert f"{LAYER}.mlp.down_proj" in found.unmapped
    assert f"{LAYER}.self_attn.q_proj" not in found.unmapped


def test_a_function_of_the_same_name_is_not_mapped(model: PreTrainedModel) -> None:
    found = map_landmarks(model, trace(mlp__act_fn=128, mlp__down_proj=64))
    assert Landmark(f"{LAYER}.mlp.act_fn", Part.OUTPUT) not in found.values
    assert Landmark(f"{LAYER}.mlp.down_proj", Part.OUTPUT) in found.values


def test_an_unknown_model_type_is_refused_before_a_name_can_be_wrong() -> None:
    with pytest.raises(ConfigError, match=r"no map .* model type stablelm .*qwen3.*Leave out --locate"):
        refuse_unknown("stablelm")


def test_every_family_of_the_fixture_has_a_map() -> None:
    assert {make().model_type for make in FAMILIES.values()} == KNOWN


@pytest.mark.parametrize(("landmark", "operator", "layer"), [
    (Landmark("model.layers.12.self_attn", Part.QUERY), "self_attn.rotary", 12),
    (Landmark("model.layers.12.self_attn", Part.KEY), "self_attn.rotary", 12),
    (Landmark("model.layers.2.self_attn", Part.ATTENTION), "self_attn.attention", 2),
    (Landmark("model.layers.2.self_attn.o_proj", Part.INPUT), "self_attn.attention", 2),
    (Landmark("model.layers.2.mlp.gate", Part.ROUTES), "mlp.gate", 2),
    (Landmark("model.norm", Part.OUTPUT), "norm", None),
    (Landmark("lm_head", Part.LOGITS), "head", None),
    (Landmark("model.layers.0.mlp.down_proj", Part.INPUT), "input of mlp.down_proj", 0),
])  # fmt: skip
def test_a_landmark_names_its_operator_and_layer(landmark: Landmark, operator: str, layer: int | None) -> None:
    assert (landmark.operator, landmark.layer) == (operator, layer)
