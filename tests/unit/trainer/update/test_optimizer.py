"""Optimizers by name: their parameters, their steps, and their state across a checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.lora import add_adapters
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.optimizers.optimizer import Together, make_optimizer
from tests.fixtures.models import tiny_qwen3

NAMES = ("adamw", "adamw_tf", "muon", "sgd")


def policy() -> Policy:
    return Policy(tiny_qwen3(tied=False))


def parameters_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def update(distributed: Distributed, policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator)
    distributed.step(1e-3, distributed.gradient_norm())


def prepared(name: str, settings: OptimizerConfig | None = None) -> tuple[Distributed, Policy]:
    made = policy()
    distributed = Distributed.start(dtype="float32", max_grad_norm=1.0)
    distributed.prepare(made, make_optimizer(made, settings or OptimizerConfig(name=name, weight_decay=0.1)))
    return distributed, made


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_optimizer_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    distributed, whole = prepared(name)
    for seed in range(2):
        update(distributed, whole, seed)
    distributed.save_state(tmp_path)
    halfway = parameters_of(whole)
    for seed in range(2, 5):
        update(distributed, whole, seed)

    distributed, restored = prepared(name)
    distributed.load_state(tmp_path)
    for name_, tensor in parameters_of(restored).items():
        assert torch.equal(tensor, halfway[name_])
    for seed in range(2, 5):
        update(distributed, restored, seed)
    for name_, tensor in parameters_of(restored).items():
        assert torch.equal(tensor, parameters_of(whole)[name_]), name_
        assert not torch.equal(tensor, halfway[name_]), f"{name_} did not move, so nothing was compared"


@pytest.mark.parametrize("name", NAMES)
def test_changed_settings_are_used_after_a_restart(name: str, tmp_path: Path) -> None:
    distributed, whole = prepared(name)
    update(distributed, whole, 0)
    distributed.save_state(tmp_path)
    settings = OptimizerConfig(name=name, weight_decay=0.5, betas=[0.5, 0.6], eps=1e-3, momentum=0.7)
    distributed, restored = prepared(name, settings)
    distributed.load_state(tmp_path)
    fresh = make_optimizer(policy(), settings)
    for found, expected in zip(distributed._optimizer.param_groups, fresh.param_groups, strict=True):
        assert {**found, "params": 0} == {**expected, "params": 0}
    update(distributed, restored, 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_learning_rate_of_the_step_reaches_every_parameter(name: str) -> None:
    distributed, made = prepared(name)
    before = parameters_of(made)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    distributed.step(0.0, distributed.gradient_norm())
    for parameter_name, tensor in parameters_of(made).items():
        assert torch.equal(tensor, before[parameter_name]), parameter_name


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest() -> None:
    made = policy()
    optimizer = make_optimizer(made, OptimizerConfig(name="muon"))
    assert isinstance(optimizer, Together)
    of_muon = {id(p) for group in optimizer.parts[0].param_groups for p in group["params"]}
    of_adam = {id(p) for group in optimizer.parts[1].param_groups for p in group["params"]}
    for name, parameter in made.named_parameters():
        in_layer = ".layers." in name and parameter.ndim == 2
        assert (id(parameter) in of_muon) == in_layer, name
        assert (id(parameter) in of_adam) != in_layer, name


def test_muons_step_is_orthogonal() -> None:
    """All singular values of its first step are similar, for any gradient."""
    made = policy()
    distributed = Distributed.start(dtype="float32", max_grad_norm=0.0)
    distributed.prepare(made, make_optimizer(made, OptimizerConfig(name="muon")))
    matrix = made.get_parameter("model.model.layers.0.self_attn.q_proj.weight")
    before = matrix.detach().clone()
    for parameter in made.parameters():
        parameter.grad = torch.randn_like(parameter)
    assert matrix.grad is not None
    matrix.grad[:, :8] *= 100
    distributed.step(1e-2, distributed.gradient_norm())
    values = torch.linalg.svdvals(matrix.detach() - before)
    assert values.max() / values.min() < 3
    assert values.min() > 0


def test_only_matrices_decay() -> None:
    made = policy()
    for group in make_optimizer(made, OptimizerConfig(weight_decay=0.1)).param_groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0)


def test_only_adapters_are_optimized_if_there_are_any() -> None:
    made = Policy(add_adapters(tiny_qwen3(tied=True), LoraConfig(rank=2)))
    optimized = {id(p) for group in make_optimizer(made, OptimizerConfig()).param_groups for p in group["params"]}
    adapters = {id(p) for name, p in made.named_parameters() if "lora_" in name}
    assert optimized == adapters != set()


def test_impossible_optimizers_are_refused_with_an_override() -> None:
    with pytest.raises(ConfigError, match=r"adamw_8bit .* set optimizer\.name=adamw"):
        make_optimizer(policy(), OptimizerConfig(name="adamw_8bit"))  # without bitsandbytes or a GPU
    with pytest.raises(ConfigError, match=r"muon .* configs/accelerate/ddp\.yaml"):
        make_optimizer(policy(), OptimizerConfig(name="muon"), is_sharded=True)
