"""Checkpoints with a vision tower: refused with a command, which saves their text model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3nConfig,
    Llama4Config,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.model.decoder import refuse_architecture
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.text_model import text_model
from scripts.published.models import published_models
from tests.fixtures.families import FAMILIES, SIZES
from tests.fixtures.published import PUBLISHED

GEMMA3_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
LLAMA4_VISION = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256, "image_size": 56,
    "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
}  # fmt: skip
CONDITIONAL: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": lambda: Gemma3Config(text_config=FAMILIES["gemma3"]().to_dict(), vision_config=GEMMA3_VISION),
    "llama4": lambda: Llama4Config(text_config=FAMILIES["llama4"]().to_dict(), vision_config=LLAMA4_VISION),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig.from_dict(published_models()["Qwen2.5-VL (text)"].config),
    "qwen3_vl": lambda: Qwen3VLConfig.from_dict(published_models()["Qwen3-VL (text)"].config),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig.from_dict(published_models()["Qwen3-VL MoE (text)"].config),
    "mistral3": lambda: Mistral3Config(text_config=PUBLISHED["ministral3"], vision_config=PIXTRAL),
}


@pytest.mark.parametrize("name", CONDITIONAL)
def test_the_text_model_of_a_checkpoint_computes_as_the_checkpoint(name: str) -> None:
    config = CONDITIONAL[name]()
    with pytest.raises(ConfigError, match=f"model type {name} has a vision tower.*save-text-model"):
        refuse_architecture(config)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    text = text_model(model).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(text(ids).logits, model(ids).logits)
        torch.testing.assert_close(Policy(text).causal_lm(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_towers_that_a_text_class_leaves_out_are_no_reason() -> None:
    refuse_architecture(Qwen3_5Config(text_config=FAMILIES["qwen3_5"]().to_dict()))
    refuse_architecture(FAMILIES["gemma3"]())


@pytest.mark.parametrize("config", [Gemma3nConfig])
def test_other_towers_are_refused(config: type[PreTrainedConfig]) -> None:
    with pytest.raises(ConfigError, match=r"vision tower.*set model\.path"):
        refuse_architecture(config(text_config=SIZES | {"head_dim": 32}))
