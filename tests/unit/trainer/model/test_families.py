"""Sentences of a run about a model that no proof covers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, Olmo2Config, PreTrainedConfig, Qwen3Config

from lockstep.trainer.model.families import unproven
from scripts.project.list_models import results
from scripts.published.models import published_models

PROVEN = {proof["family"] for proof in results() if not proof["refusal"]}
PASSED = ("the head", "rows apart")


def qwen3(**changes: Any) -> PreTrainedConfig:
    values = published_models()["Qwen3"].config | changes
    return Qwen3Config(**values)


@pytest.mark.parametrize("family", sorted(PROVEN))
def test_a_proven_checkpoint_needs_no_sentence(family: str) -> None:
    published = replace(published_models()[family], reduced={}).config
    config = CONFIG_MAPPING[published["model_type"]].from_dict(published)
    assert unproven(config, PASSED, has_sync=True) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias=true"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4}},
            "rope_parameters.rope_type=yarn",
        ),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "sliding_window=n"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"some_multiplier": 0.5}, "some_multiplier=n"),
    ],
)
def test_a_setting_that_no_proof_has_is_named(changes: dict[str, Any], named: str) -> None:
    sentence = unproven(qwen3(**changes), PASSED, has_sync=False) or ""
    assert "no proof of model type qwen3 (docs/models.md) has " in sentence
    assert named in sentence
    assert sentence.endswith("Passed on this model: the head, rows apart")


def test_sizes_noise_and_names_of_tokens_need_no_proof() -> None:
    changes = {"hidden_size": 96, "num_key_value_heads": 1, "num_hidden_layers": 7, "eos_token_id": 9}
    assert unproven(qwen3(**changes, attention_dropout=0.1, rope_theta=5e5), PASSED, has_sync=True) is None


def test_a_type_without_proofs_says_what_the_run_checks_and_what_nothing_has_checked() -> None:
    class Unknown(Olmo2Config):
        model_type = "made_up"

    sentence = unproven(Unknown(), PASSED, has_sync=True) or ""
    assert "model type made_up has no proof with a published config (docs/models.md)" in sentence
    assert "Passed on this model: the head, rows apart; by the first weight sync: names and values" in sentence
    assert "no proof: the gradient of every parameter" in sentence


def test_a_type_with_a_tiny_model_in_the_tests_says_that_it_has_no_more() -> None:
    config = CONFIG_MAPPING["qwen2_moe"]()
    assert "only tests of a tiny model (docs/models.md)" in (unproven(config, PASSED, has_sync=True) or "")
