"""Planned shapes against loaded modules, and FLOPs of an update against torch's counter."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.model_settings import LoraConfig, ModelConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.critic import with_critic
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.shape import ModelShape, planned_shape, update_flops
from scripts.published.models import published_models
from tests.fixtures.models import tiny_qwen3

LENGTHS = (24, 40)


@pytest.mark.parametrize("tied", [True, False])
def test_update_flops_equal_what_torch_counts(tied: bool) -> None:
    model = tiny_qwen3(tied=tied)
    model.set_attn_implementation("eager")  # the counter does not see the fused kernel on CPU
    with FlopCounterMode(display=False) as counter:
        for length in LENGTHS:
            model(torch.randint(0, 100, (1, length))).logits.sum().backward()
    shape = ModelShape.of(model, model, model.config)
    # Eager attention also computes the masked half, which our count leaves out.
    masked = 6.0 * shape.layers * shape.attention * sum(length**2 for length in LENGTHS)
    assert update_flops(shape, LENGTHS) == pytest.approx(counter.get_total_flops() - masked, rel=0.02)


def test_frozen_weights_cost_no_gradient() -> None:
    model = tiny_qwen3(tied=True)
    shape = ModelShape.of(model, model, model.config)
    frozen = dataclasses.replace(shape, trained=0)
    assert update_flops(shape, LENGTHS) - update_flops(frozen, LENGTHS) == 2.0 * shape.parameters * sum(LENGTHS)


@pytest.mark.parametrize(
    ("algorithm", "critic", "lora"),
    [("grpo", "separate", 0), ("gae", "separate", 0), ("gae", "shared", 0), ("grpo", "separate", 4)],
)
def test_the_planned_shape_is_that_of_the_loaded_modules(
    tmp_path: Path, algorithm: str, critic: str, lora: int
) -> None:
    tiny_qwen3(tied=True).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), critic=critic, lora=LoraConfig(rank=lora))
    config = Config(model=model, algorithm=AlgorithmConfig(advantage=algorithm))
    has_critic = config.plan.has_critic
    policy = Policy.from_pretrained(tmp_path, lora=model.lora)
    module = with_critic(policy, model, has_critic=has_critic, engine_context=None)
    (tmp_path / "model.safetensors").unlink()  # planning reads no weights
    shape = planned_shape(model, config.algorithm, has_critic=has_critic)
    assert shape == ModelShape.of(module, policy.model, policy.causal_lm.config)


@pytest.mark.parametrize("name", published_models())
def test_a_published_config_has_a_shape_or_a_refusal(name: str, tmp_path: Path) -> None:
    """Before weights are read: lists with a number per layer, layers counted by a pattern, names of one family."""
    published = published_models()[name]
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    config = Config()
    config.model.path = str(tmp_path)
    try:
        shape = planned_shape(config.model, config.algorithm)
    except ConfigError as refusal:
        assert "model" in str(refusal)  # noqa: PT017
        return
    small = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert shape.hidden == small.hidden_size
    assert shape.layers == small.num_hidden_layers
    assert shape.parameters > shape.vocabulary * shape.hidden
