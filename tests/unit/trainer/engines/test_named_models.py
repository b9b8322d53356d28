"""All models that a configuration names are checked by their files, before an engine starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
)

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.named_models import longest_context, refuse_unfit_models
from lockstep.trainer.model.lora import add_adapters
from tests.fixtures.broken_models import FAULTS, change_config, change_tensors
from tests.fixtures.families import SIZES
from tests.fixtures.models import save_tiny_model, tiny_qwen3
from tests.fixtures.tokenizers import chat_tokenizer
from tests.fixtures.vision import save_tiny

VOCABULARY = 512
"""Ids of the model, more than the tokenizer's."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of a policy, a reward model and an adapter."""
    directory = tmp_path_factory.mktemp("sound")
    model = tiny_qwen3(tied=True, vocab_size=VOCABULARY)
    model.save_pretrained(directory / "policy")
    chat_tokenizer("qwen3").save_pretrained(directory / "policy")
    shutil.copytree(directory / "policy", directory / "reward model")
    AutoModelForSequenceClassification.from_pretrained(directory / "policy", num_labels=1).save_pretrained(
        directory / "reward model"
    )
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8))
    adapted.save_pretrained(str(directory / "adapter"))
    return directory


def configuration(policy: Path, **changes: object) -> Config:
    config = Config()
    config.model.path, config.rollout.max_model_len = str(policy), 256
    config.algorithm.kl_coef, config.algorithm.advantage = 0.1, "gae"
    for name, value in changes.items():
        group, _, field = name.partition("__")
        setattr(getattr(config, group), field, value)
    return config


def check(config: Config, *, trains: bool = True) -> list[str]:
    said: list[str] = []
    refuse_unfit_models(config, said.append, trains=trains)
    return said


def refusal(config: Config, *, trains: bool = True) -> str:
    with pytest.raises(ConfigError) as refused:
        check(config, trains=trains)
    return str(refused.value)


PLACES: dict[str, Callable[[Path, Path], Config]] = {
    "model.path": lambda sound, broken: configuration(broken),
    "model.reference_path": lambda sound, broken: configuration(sound / "policy", model__reference_path=str(broken)),
    "model.critic_path": lambda sound, broken: configuration(sound / "policy", model__critic_path=str(broken)),
    "teacher.path": lambda sound, broken: configuration(sound / "policy", teacher__path=str(broken)),
    "reward.settings.model.path": lambda sound, broken: configuration(
        sound / "policy", reward__functions=["model"], reward__settings={"model": {"path": str(broken)}}
    ),
}


@pytest.mark.parametrize("setting", PLACES)
def test_sound_models_pass_without_a_word(sound: Path, setting: str) -> None:
    place = sound / ("reward model" if "reward" in setting else "policy")
    assert check(PLACES[setting](sound, place)) == []


@pytest.mark.parametrize("setting", PLACES)
@pytest.mark.parametrize(
    "fault", ["no weights", "cut in the middle", "a tensor less", "names of DDP", "hidden size null"]
)
def test_a_broken_directory_is_refused_under_the_name_of_its_setting(
    sound: Path, tmp_path: Path, setting: str, fault: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(sound / ("reward model" if "reward" in setting else "policy"), broken)
    FAULTS[fault].make(broken)
    said = refusal(PLACES[setting](sound, broken))
    assert said.startswith(f"{setting}={broken}")
    assert f"set {setting}" in said


def test_what_a_model_leaves_out_or_changes_is_said(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound / "policy", tmp_path / "policy")
    (tmp_path / "policy" / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    change_tensors(tmp_path / "policy", lambda state: {**state, "model.rotary_emb.inv_freq": torch.ones(1)})
    said = check(configuration(tmp_path / "policy"))
    assert len(said) == 2
    assert "do_sample=true" in said[0]
    assert "1 tensor(s) left out" in said[1]


@pytest.mark.parametrize("setting", ["model.reference_path", "model.critic_path", "teacher.path"])
def test_a_model_of_another_tokenizer_or_vocabulary_is_refused(sound: Path, tmp_path: Path, setting: str) -> None:
    smaller, other, padded = (tmp_path / name for name in ("smaller", "other", "padded"))
    tiny_qwen3(tied=True, vocab_size=480).save_pretrained(smaller)  # without a tokenizer
    assert f"has 480 ids, model.path={sound / 'policy'} {VOCABULARY}" in refusal(PLACES[setting](sound, smaller))
    shutil.copytree(sound / "policy", other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(other)
    assert "1 tokens differ, such as '<one more>'" in refusal(PLACES[setting](sound, other))
    tiny_qwen3(tied=True, vocab_size=VOCABULARY + 128).save_pretrained(padded)
    chat_tokenizer("qwen3").save_pretrained(padded)
    if setting == "model.reference_path":
        assert f"has {VOCABULARY + 128} ids" in refusal(PLACES[setting](sound, padded))
    else:  # as larger models of a family are
        assert check(PLACES[setting](sound, padded)) == []


def test_a_teacher_of_images_sees_them_as_the_policy_does(sound: Path, tmp_path: Path) -> None:
    save_tiny("qwen2_5_vl", tmp_path / "policy")
    config = configuration(tmp_path / "policy", algorithm__kl_coef=0.0, algorithm__advantage="grpo")
    config.model.images.max_per_prompt = 1
    config.teacher.path = str(tmp_path / "policy")
    assert check(config) == []
    config.teacher.path = str(sound / "policy")
    for config.teacher.urls in ([], ["http://127.0.0.1:8000"]):
        assert "images are not supported for model type qwen3, only for" in refusal(config)


@pytest.mark.parametrize("setting", PLACES)
def test_a_tokenizer_with_more_ids_than_the_model_is_refused(sound: Path, tmp_path: Path, setting: str) -> None:
    broken = tmp_path / "broken"
    save_tiny_model(broken, tied=True)
    if "reward" in setting:
        AutoModelForSequenceClassification.from_pretrained(broken, num_labels=1).save_pretrained(broken)
    tokenizer = AutoTokenizer.from_pretrained(sound / "policy")
    tokenizer.add_tokens([f"<{number}>" for number in range(VOCABULARY)])
    tokenizer.save_pretrained(broken)
    said = refusal(PLACES[setting](sound, broken))
    assert said.startswith(f"{setting}={broken}: the tokenizer has ")
    assert "resize_token_embeddings(" in said


def test_a_policy_without_a_tokenizer_is_refused(sound: Path, tmp_path: Path) -> None:
    tiny_qwen3(tied=True).save_pretrained(tmp_path)
    assert "has no tokenizer" in refusal(configuration(tmp_path))


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_values_that_are_not_finite_are_refused_where_nothing_is_trained(
    sound: Path, tmp_path: Path, value: float
) -> None:
    """A trainer checks the tensors that it loads; an engine checks none."""
    shutil.copytree(sound / "policy", tmp_path / "policy")
    name = "model.layers.1.mlp.down_proj.weight"
    change_tensors(
        tmp_path / "policy", lambda state: {**state, name: state[name].index_fill(0, torch.tensor([3]), value)}
    )
    said = refusal(configuration(tmp_path / "policy"), trains=False)
    assert said.startswith(f"model.path={tmp_path / 'policy'}: 1 tensor(s) have NaN or infinite values ({name});")


@pytest.mark.parametrize("stop", ["</s>", -1, [3, "</s>"], 2.5, True, VOCABULARY, [3, VOCABULARY]])
def test_ends_of_a_text_that_are_no_ids_of_the_model_are_refused(sound: Path, tmp_path: Path, stop: object) -> None:
    shutil.copytree(sound / "policy", tmp_path / "policy")
    (tmp_path / "policy" / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    assert "generation_config.json has eos_token_id" in refusal(configuration(tmp_path / "policy"))


@pytest.mark.parametrize("other", ["LlamaForCausalLM", "Qwen3ForSequenceClassification"])
def test_a_policy_that_the_engine_would_load_as_another_class_is_refused(
    sound: Path, tmp_path: Path, other: str
) -> None:
    shutil.copytree(sound / "policy", tmp_path / "policy")
    change_config(tmp_path / "policy", architectures=[other])
    said = refusal(configuration(tmp_path / "policy"))
    assert f"architectures {other}" in said
    assert "Qwen3ForCausalLM" in said


def test_a_context_beyond_the_positions_of_the_model_is_refused(sound: Path, tmp_path: Path) -> None:
    assert "set rollout.max_model_len=512 or less" in refusal(
        configuration(sound / "policy", rollout__max_model_len=513)
    )
    assert check(configuration(sound / "policy", rollout__max_model_len=512)) == []
    shutil.copytree(sound / "policy", tmp_path / "short")
    change_config(tmp_path / "short", max_position_embeddings=128)
    for setting in ("model.reference_path", "model.critic_path"):
        said = refusal(PLACES[setting](sound, tmp_path / "short"))
        assert f"rollout.max_model_len=256 is more than {setting}={tmp_path / 'short'}" in said


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (LlamaConfig(max_position_embeddings=512), 512),
        (GPT2Config(n_positions=64), 64),
        (LlamaConfig(max_position_embeddings=512, rope_parameters={"rope_type": "linear", "factor": 4.0}), 2048),
        (
            LlamaConfig(
                max_position_embeddings=512,
                rope_parameters={
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            ),
            512,
        ),
        (Gemma3TextConfig(max_position_embeddings=512), 512),
        (PreTrainedConfig(), None),
    ],
)  # fmt: skip
def test_the_longest_context_counts_the_factor_of_rotary_positions_as_vllm_does(
    config: PreTrainedConfig, longest: int | None
) -> None:
    assert longest_context(config) == longest


def test_a_language_model_and_a_classifier_of_two_labels_are_refused_as_reward_models(
    sound: Path, tmp_path: Path
) -> None:
    said = refusal(PLACES["reward.settings.model.path"](sound, sound / "policy"))
    assert "2 labels" in said
    shutil.copytree(sound / "policy", tmp_path / "policy")
    change_config(tmp_path / "policy", num_labels=1)
    said = refusal(PLACES["reward.settings.model.path"](sound, tmp_path / "policy"))
    assert "It is a language model (Qwen3ForCausalLM)" in said
    assert "train-reward-model" in said


ADAPTER = "adapter_model.safetensors"


def change_adapter(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file({n: t.clone() for n, t in change(load_file(directory / ADAPTER)).items()}, directory / ADAPTER)


def change_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def write_over(directory: Path, share: float) -> None:
    data = (directory / ADAPTER).read_bytes()
    (directory / ADAPTER).write_bytes(data[: int(share * len(data))])


ADAPTER_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no matrices": (lambda directory: (directory / ADAPTER).unlink(), "no adapter that peft reads"),
    "cut": (lambda directory: write_over(directory, 0.5), "no adapter that peft reads"),
    "empty": (lambda directory: write_over(directory, 0.0), "no adapter that peft reads"),
    "no config": (lambda directory: (directory / "adapter_config.json").unlink(), "no adapter that peft reads"),
    "config of text": (lambda d: (d / "adapter_config.json").write_text("{"), "no adapter that peft reads"),
    "config of a list": (lambda d: (d / "adapter_config.json").write_text("[]"), "no adapter that peft reads"),
    "config without values": (lambda d: (d / "adapter_config.json").write_text("{}"), "is of kind None"),
    "rank of text": (lambda d: change_json(d / "adapter_config.json", r="4"), "r='4'"),
    "alpha null": (lambda d: change_json(d / "adapter_config.json", lora_alpha=None), "lora_alpha=None"),
    "a matrix less": (lambda d: change_adapter(d, lambda s: dict(list(s.items())[1:])), "other layers"),
    "none at all": (lambda d: change_adapter(d, lambda s: {}), "other layers"),
    "other names": (lambda d: change_adapter(d, lambda s: {f"module.{n}": t for n, t in s.items()}), "other layers"),
    "another width": (lambda d: change_adapter(d, lambda s: {n: t[:, :-1] for n, t in s.items()}), "other layers"),
    "NaN": (lambda d: change_adapter(d, lambda s: {n: t * torch.nan for n, t in s.items()}), "not of finite numbers"),
    "integers": (lambda d: change_adapter(d, lambda s: {n: t.int() for n, t in s.items()}), "not of finite numbers"),
}


@pytest.mark.parametrize("fault", ADAPTER_FAULTS)
@pytest.mark.parametrize("setting", ["model.lora.path", "model.adapters.last"])
def test_a_broken_adapter_is_refused(sound: Path, tmp_path: Path, setting: str, fault: str) -> None:
    def made(adapter: Path) -> Config:
        config = configuration(sound / "policy")
        if setting == "model.lora.path":
            config.model.lora.rank, config.model.lora.alpha, config.model.lora.path = 4, 8, str(adapter)
            config.model.lora.target_modules = ["q_proj", "v_proj"]
        else:
            config.model.adapters = {"last": str(adapter)}
        return config

    assert check(made(sound / "adapter"), trains=setting == "model.lora.path") == []
    shutil.copytree(sound / "adapter", tmp_path / "adapter")
    make, says = ADAPTER_FAULTS[fault]
    make(tmp_path / "adapter")
    said = refusal(made(tmp_path / "adapter"), trains=setting == "model.lora.path")
    assert said.startswith(f"{setting}={tmp_path / 'adapter'}")
    assert says in said
    assert "set " in said
    if setting == "model.lora.path":  # and where it is loaded
        with pytest.raises(ConfigError):
            add_adapters(AutoModelForCausalLM.from_pretrained(sound / "policy"), made(tmp_path / "adapter").model.lora)


def test_an_adapter_of_another_model_is_refused(sound: Path, tmp_path: Path) -> None:
    other = tiny_qwen3(tied=True)
    adapted = peft.get_peft_model(other, peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    adapted.save_pretrained(str(tmp_path))
    change_adapter(tmp_path, lambda state: {n: t for n, t in state.items() if "lm_head" not in n})
    change_json(tmp_path / "adapter_config.json", target_modules=["c_attn"])
    config = configuration(sound / "policy")
    config.model.adapters = {"last": str(tmp_path)}
    assert "does not fit model.path" in refusal(config, trains=False)


@pytest.mark.parametrize(
    ("kind", "original", "said"),
    [("longrope", 128, "engine and trainer use the long factors"), ("longrope", 256, None), ("dynamic", 256, None)],
)
def test_frequencies_by_the_length_of_a_row_are_named(
    tmp_path: Path, kind: str, original: int, said: str | None
) -> None:
    save_scaled(tmp_path, kind, original)
    (sentence,) = check(configuration(tmp_path, algorithm__kl_coef=0.0, algorithm__advantage="grpo")) or [None]
    assert said is None if sentence is None else said is not None and said in sentence
    if said is not None:
        assert "serve the trained model with a context as long. With rollout.max_model_len=128" in str(sentence)


def test_dynamic_frequencies_of_rows_beyond_the_original_length_are_refused(tmp_path: Path) -> None:
    save_scaled(tmp_path, "dynamic", 128)
    made = configuration(tmp_path)
    assert "change for rows of more than 128 tokens" in (found := refusal(made))
    assert found.endswith("Set rollout.max_model_len=128 or less")
    made.algorithm.trains_on = "demonstrations"
    assert check(made) == []


def save_scaled(directory: Path, kind: str, original: int) -> None:
    factors = {
        "longrope": {
            "short_factor": [1.0] * 16,
            "long_factor": [4.0] * 16,
            "original_max_position_embeddings": original,
        },
        "dynamic": {"factor": 4.0},
    }[kind]
    config = LlamaConfig(
        **SIZES | {"max_position_embeddings": original if kind == "dynamic" else 512},
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **factors},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    chat_tokenizer("qwen3").save_pretrained(directory)
