"""Values of a config that vLLM reads in another way than transformers: overridden, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Ernie4_5Config, Gemma3Config, Mistral3Config, PreTrainedConfig

from lockstep.rollout.engine.arguments import engine_arguments
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.errors import ConfigError
from tests.fixtures.families import FAMILIES, SIZES
from tests.fixtures.published import PUBLISHED


def arguments(path: Path, *, is_cpu: bool = True) -> dict[str, Any]:
    return engine_arguments(EngineSettings(model=path, max_model_len=256), is_cpu=is_cpu)


def published(name: str, **changes: Any) -> PreTrainedConfig:
    values = {**PUBLISHED[name], **changes}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def test_the_window_and_the_scale_of_queries_are_those_of_transformers(tmp_path: Path) -> None:
    published("cohere2").save_pretrained(tmp_path)
    assert arguments(tmp_path)["hf_overrides"]["sliding_window"] == PUBLISHED["cohere2"]["sliding_window"] - 1
    published("ministral3").save_pretrained(tmp_path)
    scale = arguments(tmp_path)["hf_overrides"]["llama_4_scaling"]
    assert scale == {"beta": 0.1, "original_max_position_embeddings": 16}


OVERRIDDEN = {
    "lfm2": {"block_dim", "conv_dim"},
    "lfm2_moe": {"block_dim", "conv_dim"},
    "cohere2": {"sliding_window"},
    "ministral3": {"llama_4_scaling"},
    "dots1": {"n_group", "topk_group"},
}
"""Settings that vLLM gets other values of, by model; none for the others."""


@pytest.mark.parametrize("name", [*FAMILIES, *PUBLISHED])
def test_models_that_agree_are_not_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.rollout.engine.arguments.find_spec", lambda name: object())
    config = FAMILIES[name]() if name in FAMILIES else published(name)
    config.save_pretrained(tmp_path)
    assert set(arguments(tmp_path).get("hf_overrides", ())) == OVERRIDDEN.get(name, set())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (published("phimoe", router_jitter_noise=0.1), r"router_jitter_noise=0\.1 .* in vLLM is 0\.01"),
        (Ernie4_5Config(**SIZES, use_bias=True), r"use_bias=True .* in vLLM is false"),
        (published("ernie4_5_moe", use_bias=True), r"use_bias=True .* in vLLM is false"),
        (published("falcon_h1", time_step_limit=[0.01, 1.0]), r"time_step_limit=.* in vLLM is \[0, inf\]"),
        (published("solar_open", moe_intermediate_size=40), "experts of width 40.* multiples of 32; sample on a GPU"),
    ],
)
def test_values_that_vllm_does_not_know_are_refused(config: PreTrainedConfig, said: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said):
        arguments(tmp_path)


def test_several_groups_of_granite_are_refused(tmp_path: Path) -> None:
    config = FAMILIES["granite_hybrid"]()
    config.mamba_n_groups = 2
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"mamba_n_groups=2 .* normalizes each group, transformers the whole width"):
        arguments(tmp_path)


def test_towers_without_torchvision_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.rollout.engine.arguments.find_spec", lambda name: None)
    Mistral3Config(text_config=PUBLISHED["ministral3"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="torchvision for model type mistral3"):
        arguments(tmp_path)


def test_latent_attention_has_one_backend_on_every_cpu(tmp_path: Path) -> None:
    """vLLM's for AMX fails in float32, and in bfloat16 has no weight for a sync."""
    FAMILIES["deepseek_v3"]().save_pretrained(tmp_path / "latent")
    FAMILIES["qwen3"]().save_pretrained(tmp_path / "other")
    assert arguments(tmp_path / "latent")["attention_backend"] == "CPU_MLA"
    assert "attention_backend" not in arguments(tmp_path / "latent", is_cpu=False) | arguments(tmp_path / "other")


def test_images_of_gemma_3_attend_to_all_of_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.rollout.engine.arguments.find_spec", lambda name: object())

    def found(*, window: int = 512, max_images: int = 1, is_cpu: bool = True) -> dict[str, Any]:
        Gemma3Config(text_config=SIZES | {"sliding_window": window}).save_pretrained(tmp_path)
        settings = EngineSettings(model=tmp_path, max_model_len=256, max_images=max_images)
        return engine_arguments(settings, is_cpu=is_cpu)

    assert found()["enable_prefix_caching"] is False, "the repair of attention on a CPU needs whole prompts"
    assert "enable_prefix_caching" not in found(max_images=0)
    assert "enable_prefix_caching" not in found(is_cpu=False)
    assert "limit_mm_per_prompt" in found(window=100, max_images=0)
    with pytest.raises(ConfigError, match=r"images of 256 tokens and a window of 100: .*do not attend to all of it"):
        found(window=100)
