"""Adapters on quantized weights. With an engine: tests/integration/test_adapter_runs.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.rollout.engine.adapters import AdapterSettings
from lockstep.rollout.errors import ConfigError
from lockstep.scripts.gpu_checks.quantized_checkpoint import write_quantized_checkpoint
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model import quantized_base
from lockstep.trainer.model.critic import Critic
from lockstep.trainer.model.lora import adapter_settings
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.shape import planned_shape
from tests.fixtures.models import tiny_qwen3

LORA = LoraConfig(rank=4, alpha=8)


def adapters_of(config: Config) -> AdapterSettings | None:
    return adapter_settings(config.model, config.rollout, correction_mode=config.correction.mode)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_qwen3(tied=False).save_pretrained(tmp_path / "base")
    write_quantized_checkpoint(tmp_path / "base", tmp_path / "w8a8")
    return tmp_path / "w8a8"


def settings(path: Path, **lora: object) -> Config:
    config = Config()
    config.model.path = str(path)
    config.model.lora = LoraConfig(**{"rank": 4, **lora})  # type: ignore[arg-type]
    return config


def test_the_trainer_computes_with_the_stored_numbers_dequantized(base: Path) -> None:
    policy = Policy.from_pretrained(base, lora=LORA)
    stored = load_file(base / "model.safetensors")
    state = policy.causal_lm.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    found = state["model.layers.0.mlp.up_proj.base_layer.weight"]
    assert policy.is_quantized
    assert stored[name].dtype == torch.int8
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, stored[name].float() * stored[f"{name}_scale"].float(), rtol=1e-2, atol=1e-4)
    assert {name.split(".lora_")[-1][0] for name, p in policy.named_parameters() if p.requires_grad} == {"A", "B"}
    shape = planned_shape(settings(base).model, settings(base).algorithm)
    assert shape.trained == sum(p.numel() for p in policy.parameters() if p.requires_grad)


def test_the_trainer_dequantizes_blocks_of_fp8(tmp_path: Path) -> None:
    model = tiny_qwen3(tied=False)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name, block = "model.layers.0.mlp.up_proj.weight", 8
    out, inputs = tensors[name].shape
    blocks = tensors[name].view(out // block, block, inputs // block, block)
    scale = blocks.abs().amax((1, 3)) / 448
    tensors[name] = (blocks / scale[:, None, :, None]).view(out, inputs).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = scale
    others = [one.removesuffix(".weight") for one in tensors if one.endswith("_proj.weight") and one != name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    stored = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head", *others],
    }
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))

    found = Policy.from_pretrained(tmp_path, lora=LORA).causal_lm.state_dict()
    exact = model.state_dict()[name]
    torch.testing.assert_close(
        found["model.layers.0.mlp.up_proj.base_layer.weight"], exact, rtol=0.07, atol=float(exact.abs().max()) / 100
    )


def test_without_adapters_quantized_weights_are_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantized \(compressed-tensors\).*set model\.lora\.rank=16"):
        Policy.from_pretrained(base)
    with pytest.raises(ConfigError, match=r"set model\.critic_path to an unquantized model"):
        Critic.from_pretrained(base)


def test_methods_that_the_engine_or_the_trainer_does_not_load_are_refused(tmp_path: Path) -> None:
    config = tiny_qwen3(tied=False).config
    for method in ("bitsandbytes", "gptq"):
        config.quantization_config = {"quant_method": method, "bits": 4}
        config.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=rf"quantized \({method}\).*compressed-tensors, fp8, mxfp4"):
            Policy.from_pretrained(tmp_path, lora=LORA)


def test_under_zero3_they_are_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_base, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ConfigError, match=r"under ZeRO-3.*zero2\.yaml"):
        Policy.from_pretrained(base, lora=LORA)


def test_engines_get_adapters_only(base: Path) -> None:
    assert adapters_of(settings(base)) is not None
    with pytest.raises(ConfigError, match=r"model\.lora\.send=merged.*set model\.lora\.send=adapter"):
        adapters_of(settings(base, send="merged"))
    twice = settings(base)
    twice.rollout.quantization = "fp8_per_channel"
    with pytest.raises(ConfigError, match=r"quantized already \(compressed-tensors\); set rollout\.quantization=null"):
        adapters_of(twice)
    uncorrected = settings(base)
    uncorrected.correction.mode = "sequence_truncate"
    with pytest.raises(ConfigError, match=r"does not correct per token; set correction=token_truncate"):
        adapters_of(uncorrected)
