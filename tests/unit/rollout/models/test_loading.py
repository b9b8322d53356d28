"""One loader for all models: what it refuses by name, and what it must take."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
)

from lockstep.rewards.model.classifier import load_reward_model
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import (
    LANGUAGE_MODEL,
    NEW_REWARD_MODEL,
    TRUNK,
    VALUE_MODEL,
    Role,
    StoredModel,
    read_config,
    stored_model,
)
from lockstep.trainer.model.critic import Critic
from lockstep.trainer.model.policy import Policy
from tests.fixtures.broken_models import FAULTS, change_config, change_tensors
from tests.fixtures.families import FAMILIES, save_family
from tests.fixtures.models import save_tiny_model, tiny_qwen3

ROLES: dict[str, Callable[[Path], object]] = {
    "policy": Policy.from_pretrained,
    "critic": Critic.from_pretrained,
    "reward model": load_reward_model,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a language model, and beside it one of a reward model."""
    directory = tmp_path_factory.mktemp("sound")
    save_tiny_model(directory / "language model", tied=True)
    shutil.copytree(directory / "language model", directory / "reward model")
    classifier = AutoModelForSequenceClassification.from_pretrained(directory / "language model", num_labels=1)
    classifier.save_pretrained(directory / "reward model")
    return directory


def judge(role: Role, directory: Path) -> StoredModel:
    config = read_config(directory, setting="model.path", trust_remote_code=False)
    return stored_model(role, directory, config, setting="model.path", trust_remote_code=False)


def load(role: Role, directory: Path) -> PreTrainedModel:
    return load_model(role, directory, setting="model.path", dtype="float32", trust_remote_code=False)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_directory_is_refused_in_a_sentence(sound: Path, tmp_path: Path, role: str, fault: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(sound / (role if role == "reward model" else "language model"), directory)
    FAULTS[fault].make(directory)
    with pytest.raises(ConfigError) as refusal:
        ROLES[role](directory)
    said = str(refusal.value)
    assert FAULTS[fault].says.lower() in said.lower()
    assert f"{directory}" in said or "encoder-decoder" in said
    assert "set " in said, "what to type"


def test_a_language_model_is_refused_as_a_reward_model(sound: Path) -> None:
    with pytest.raises(ConfigError, match=r"score\.weight.*language model.*train-reward-model"):
        load_reward_model(sound / "language model")


def test_a_head_is_new_only_where_the_caller_declares_it(sound: Path) -> None:
    directory = sound / "language model"
    assert load(NEW_REWARD_MODEL, directory).config.num_labels == 2
    with pytest.raises(ConfigError, match=r"score\.bias, score\.weight"):
        load(VALUE_MODEL, directory)


def test_a_reward_model_is_refused_as_a_policy(sound: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 unexpected \(score\.weight\)"):
        Policy.from_pretrained(sound / "reward model")


def test_a_trunk_leaves_the_head_of_a_reward_model_out_and_says_so(sound: Path) -> None:
    assert "1 tensor(s) left out" in " ".join(judge(TRUNK, sound / "reward model").notes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_other_floating_dtypes_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny_qwen3(tied=True).save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda state: {name: tensor.to(dtype) for name, tensor in state.items()})
    assert {parameter.dtype for parameter in load(LANGUAGE_MODEL, tmp_path).parameters()} == {torch.float32}


@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_tied_weights_may_be_stored_under_either_name(tmp_path: Path, stored: str) -> None:
    model = tiny_qwen3(tied=True)
    model.save_pretrained(tmp_path)

    def change(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight = state["model.embed_tokens.weight"]
        if stored == "head":
            state.pop("model.embed_tokens.weight")
        return state if stored == "embedding" else {**state, "lm_head.weight": weight}

    change_tensors(tmp_path, change)
    loaded = load(LANGUAGE_MODEL, tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight  # type: ignore[union-attr]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)  # type: ignore[union-attr, arg-type]


def test_weights_that_are_tied_by_the_config_and_differ_in_the_files_are_refused(tmp_path: Path) -> None:
    tiny_qwen3(tied=True).save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda state: {**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1})
    with pytest.raises(ConfigError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight.*tie_word_embeddings"):
        load(LANGUAGE_MODEL, tmp_path)


def test_torch_files_of_tensors_are_read(tmp_path: Path) -> None:
    model = tiny_qwen3(tied=True)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(load(LANGUAGE_MODEL, tmp_path).lm_head.weight, model.lm_head.weight)  # type: ignore[arg-type]


def test_stored_buffers_that_are_computed_now_are_left_out_with_their_number(tmp_path: Path) -> None:
    old = {"gpt2": tmp_path / "gpt2", "neox": tmp_path / "neox", "qwen3": tmp_path / "qwen3"}
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=8)).save_pretrained(
        old["gpt2"]
    )
    # The first published GPT-2 has no prefix, and the causal masks.
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    change_tensors(old["gpt2"], lambda state: {n.removeprefix("transformer."): t for n, t in state.items()} | masks)
    config = GPTNeoXConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=64
    )
    GPTNeoXForCausalLM(config).save_pretrained(old["neox"])
    kinds = ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")
    masks = {f"gpt_neox.layers.0.{kind}": torch.ones(1) for kind in kinds}
    change_tensors(old["neox"], lambda state: state | masks)
    tiny_qwen3(tied=True).save_pretrained(old["qwen3"])
    change_tensors(old["qwen3"], lambda state: {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)})
    for name, count in {"gpt2": 2, "neox": 3, "qwen3": 1}.items():
        for role in (LANGUAGE_MODEL, NEW_REWARD_MODEL):
            assert f"{count + (name == 'neox' and role is not LANGUAGE_MODEL)} tensor(s) left out" in " ".join(
                judge(role, old[name]).notes
            )
        load(LANGUAGE_MODEL, old[name])


def test_heads_for_further_tokens_and_vision_towers_are_left_out_with_their_number(tmp_path: Path) -> None:
    config = FAMILIES["deepseek_v3"]()
    config.num_nextn_predict_layers = 1
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "deepseek")  # type: ignore[arg-type]
    change_tensors(tmp_path / "deepseek", lambda state: {**state, "model.layers.2.eh_proj.weight": torch.ones(2)})
    assert "1 tensor(s) left out" in judge(LANGUAGE_MODEL, tmp_path / "deepseek").notes[0]
    change_config(tmp_path / "deepseek", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"1 unexpected \(model\.layers\.2\.eh_proj\.weight\)"):
        judge(LANGUAGE_MODEL, tmp_path / "deepseek")
    save_family("qwen3_5", tmp_path / "qwen")
    others = {"model.visual.blocks.0.weight": torch.ones(1), "mtp.layers.0.weight": torch.ones(1)}
    change_tensors(tmp_path / "qwen", lambda state: state | others)
    assert "2 tensor(s) left out" in judge(LANGUAGE_MODEL, tmp_path / "qwen").notes[0]


def test_a_generation_config_that_cannot_be_saved_is_mended_and_said(tmp_path: Path) -> None:
    for values, kept in (
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "top_k": 20}, {"do_sample": True, "temperature": 0.6, "top_k": 20}),
        ({"num_beams": 1, "length_penalty": 0.5, "eos_token_id": [0, 3]}, {"eos_token_id": [0, 3]}),
        ({"pad_token_id": -1, "eos_token_id": 7}, {"eos_token_id": 7}),
    ):
        directory = save_tiny_model(tmp_path / str(len(values)) / "model", tied=True)
        (directory / "generation_config.json").write_text(json.dumps(values))
        assert "transformers refuses to save" in judge(LANGUAGE_MODEL, directory).notes[0]
        load(LANGUAGE_MODEL, directory).save_pretrained(tmp_path / "saved")
        saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
        saved.pop("transformers_version")
        assert {**saved, "bos_token_id": None, "_from_model_config": None}.items() >= kept.items(), saved


@pytest.mark.parametrize("text", ['{"temperature": ', '{"max_new_tokens": 0}', "[1]"])
def test_a_generation_config_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    directory = save_tiny_model(tmp_path, tied=True)
    (directory / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match="no loadable model"):
        load(LANGUAGE_MODEL, directory)
