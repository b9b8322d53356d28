"""Adapters: trained parameters, saved files, refused settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from lockstep.rollout.engine.adapters import AdapterSettings
from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checkpoint.run_dir import ADAPTER
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.lora import adapter_settings, add_adapters, save_adapted, save_adapter
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from tests.fixtures.adapted import with_lora
from tests.fixtures.families import save_family
from tests.fixtures.models import save_tiny_model, tiny_qwen3

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def adapters_of(config: Config) -> AdapterSettings | None:
    return adapter_settings(config.model, config.rollout, correction_mode=config.correction.mode)


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
    save_adapted(policy.model, tmp_path, distributed)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected, rtol=1e-4, atol=1e-4)
    with_adapter = PeftModel.from_pretrained(plain, str(tmp_path / ADAPTER))
    torch.testing.assert_close(logits(with_adapter), expected, rtol=1e-4, atol=1e-4)


def test_saving_changes_no_parameter(base: Path, tmp_path: Path) -> None:
    policy, distributed = moved(base)
    assert isinstance(policy.model, PeftModel)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    save_adapted(policy.model, tmp_path, distributed)
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_missing_layers_and_the_head_are_refused_as_targets() -> None:
    with pytest.raises(ConfigError, match="no linear layer named query; it has down_proj"):
        add_adapters(tiny_qwen3(tied=False), LoraConfig(rank=4, target_modules=["q_proj", "query"]))
    with pytest.raises(ConfigError, match="leave lm_head out"):
        add_adapters(tiny_qwen3(tied=False), LoraConfig(rank=4, target_modules=["lm_head"]))


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_the_scale_is_that_of_the_settings(rslora: bool, scale: float) -> None:
    model = add_adapters(tiny_qwen3(tied=True), LoraConfig(rank=4, alpha=8, rslora=rslora))
    assert {layer.scaling["default"] for layer in model.modules() if isinstance(layer, LoraLayer)} == {scale}


def test_a_policy_starts_from_an_adapter_on_disk(base: Path, tmp_path: Path) -> None:
    policy, distributed = moved(base)
    assert isinstance(policy.model, PeftModel)
    save_adapter(policy.model, tmp_path, distributed)
    settings = LoraConfig(rank=4, alpha=8, path=str(tmp_path))
    again = Policy.from_pretrained(base, lora=settings)

    torch.testing.assert_close(logits(again.causal_lm), logits(policy.causal_lm))
    assert all(p.requires_grad == ("lora_" in name) for name, p in again.named_parameters())
    with torch.device("meta"):  # as the memory plan builds it
        add_adapters(tiny_qwen3(tied=True), settings)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 8}, r"set model\.lora\.rank=4$"),
        ({"alpha": 4, "rslora": True}, r"set model\.lora\.alpha=8 model\.lora\.rslora=false$"),
        ({"target_modules": ["q_proj"]}, r"set model\.lora\.target_modules=\[down_proj,gate_proj,k_proj,o_proj,q_proj"),
        ({"path": "/nowhere"}, "has no adapter that peft reads"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(
    base: Path, tmp_path: Path, wrong: dict[str, object], message: str
) -> None:
    policy, distributed = moved(base)
    assert isinstance(policy.model, PeftModel)
    save_adapter(policy.model, tmp_path, distributed)
    with pytest.raises(ConfigError, match=message):
        Policy.from_pretrained(base, lora=LoraConfig(**{"rank": 4, "alpha": 8, "path": str(tmp_path), **wrong}))


@pytest.mark.parametrize(
    ("beyond", "message"),
    [
        ({"use_dora": True}, "has use_dora=true, where trainer and engine apply plain LoRA only"),
        ({"modules_to_save": ["embed_tokens"]}, r"has modules_to_save=\[embed_tokens\]"),
        ({"lora_bias": True}, "has lora_bias=true"),
        ({"bias": "all"}, "has bias=all"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights=pissa"),
    ],
)
def test_adapters_that_are_more_than_lora_are_refused(
    base: Path, tmp_path: Path, beyond: dict[str, Any], message: str
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base)
    with_lora(plain, rank=4, **beyond).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        Policy.from_pretrained(base, lora=LoraConfig(rank=4, alpha=8, path=str(tmp_path)))
    config = Config()
    config.model.path, config.model.adapters = str(base), {"other": str(tmp_path)}
    with pytest.raises(ConfigError, match=message):
        adapters_of(config)


@pytest.mark.parametrize("pattern", [{"alpha_pattern": {"q_proj": 32}}, {"rank_pattern": {"q_proj": 2}}])
def test_an_adapter_with_another_scale_in_some_layers_is_not_trained_with_one(
    base: Path, tmp_path: Path, pattern: dict[str, Any]
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base)
    with_lora(plain, rank=4, **pattern).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=r"ranks or scales of single layers \(rank_pattern, alpha_pattern\)"):
        Policy.from_pretrained(base, lora=LoraConfig(rank=4, alpha=8, path=str(tmp_path)))


def test_adapters_are_sent_alone_where_vllm_applies_all_of_them(base: Path, tmp_path: Path) -> None:
    config = Config()
    config.model.path = str(base)
    assert adapters_of(config) is None
    config.model.lora.rank = 12
    assert adapters_of(config) == AdapterSettings(max_rank=12)
    config.model.lora.send = "merged"
    assert adapters_of(config) is None
    config.model.lora.send = "auto"
    config.model.path = str(save_family("deepseek_v3", tmp_path / "latent"))
    assert adapters_of(config) is None
    config.model.lora.send = "adapter"
    assert adapters_of(config) == AdapterSettings(max_rank=12)


def test_adapters_on_disk_are_held_beside_the_policys(base: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base)
    with_lora(plain, rank=5).save_pretrained(str(tmp_path))
    config = Config()
    config.model.path, config.model.adapters = str(base), {"five": str(tmp_path)}
    assert adapters_of(config) == AdapterSettings(max_rank=5, others=(("five", str(tmp_path)),))
    for name, message in (
        ("policy", "policy is the name of another model"),
        ("a/b", "'a/b' becomes part of file names"),
    ):
        config.model.adapters = {name: str(tmp_path)}
        with pytest.raises(ConfigError, match=message):
            adapters_of(config)
