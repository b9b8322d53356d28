"""Adapters: trained parameters, saved files, refused settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollout.errors import ConfigError
from tests.fixtures.models import save_tiny_model, tiny_qwen3
from trainer.config.schema import LoraConfig, OptimizerConfig
from trainer.distributed.distributed import Distributed
from trainer.model.lora import ADAPTER_DIRECTORY, add_adapters, save_merged
from trainer.model.policy import Policy
from trainer.update.optimizer import make_optimizer

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"), tied=request.param)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(IDS).logits


def moved(base: Path) -> tuple[Policy, Distributed]:
    """Make a policy whose adapters change its output."""
    torch.manual_seed(0)
    policy = Policy.from_pretrained(base, lora=LoraConfig(rank=4, alpha=8))
    distributed = Distributed.start(dtype="float32", max_grad_norm=1.0)
    distributed.prepare(policy, make_optimizer(policy, OptimizerConfig()))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return policy, distributed


def test_training_begins_at_the_base_model(base: Path) -> None:
    policy = Policy.from_pretrained(base, lora=LoraConfig(rank=4))
    torch.testing.assert_close(logits(policy.causal_lm), logits(AutoModelForCausalLM.from_pretrained(base)))


def test_all_linear_layers_but_the_head_get_adapters(base: Path) -> None:
    policy = Policy.from_pretrained(base, lora=LoraConfig(rank=4))
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    layers = {name.rsplit(".lora_", 1)[0].rpartition(".")[2] for name in trained}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all("lora_" in name for name in trained)


def test_the_merged_model_and_the_adapter_beside_it_compute_the_same(base: Path, tmp_path: Path) -> None:
    policy, distributed = moved(base)
    assert isinstance(policy.model, PeftModel)
    expected = logits(policy.causal_lm)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert (logits(plain) - expected).abs().max() > 0.1, "the adapters change nothing, so the test would prove nothing"
    save_merged(policy.model, tmp_path, distributed)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected, rtol=1e-4, atol=1e-4)
    with_adapter = PeftModel.from_pretrained(plain, str(tmp_path / ADAPTER_DIRECTORY))
    torch.testing.assert_close(logits(with_adapter), expected, rtol=1e-4, atol=1e-4)


def test_saving_changes_no_parameter(base: Path, tmp_path: Path) -> None:
    policy, distributed = moved(base)
    assert isinstance(policy.model, PeftModel)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    save_merged(policy.model, tmp_path, distributed)
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_missing_layers_and_the_head_are_refused_as_targets() -> None:
    with pytest.raises(ConfigError, match="no linear layer named query; it has down_proj"):
        add_adapters(tiny_qwen3(tied=False), LoraConfig(rank=4, target_modules=["q_proj", "query"]))
    with pytest.raises(ConfigError, match="leave lm_head out"):
        add_adapters(tiny_qwen3(tied=False), LoraConfig(rank=4, target_modules=["lm_head"]))
