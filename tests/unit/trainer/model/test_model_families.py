"""Model families: the weights sent to the engine equal the checkpoint, and packed rows score as each row alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, SyncError
from lockstep.rollout.records import EngineCall, FinishReason
from lockstep.rollout.weights.source import ZeroSource
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model import families
from lockstep.trainer.model.layers import recurrent
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.shape import planned_shape
from scripts.published.models import plain_model
from tests.fixtures.families import FAMILIES, WINDOW, save_family
from tests.integration import test_routing_replay


@pytest.mark.parametrize("family", FAMILIES)
def test_sent_weights_have_the_names_and_values_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    path = save_family(family, tmp_path)
    policy = Policy.from_pretrained(path)
    saved = load_file(path / "model.safetensors")
    sent = dict(ZeroSource(policy.model))
    assert sorted(sent) == sorted(saved)
    for name, tensor in sent.items():
        assert torch.equal(tensor, saved[name]), name
    metas = ZeroSource(policy.model).metadata
    assert {meta.name: tuple(meta.shape) for meta in metas} == {name: tuple(t.shape) for name, t in saved.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_scores_and_gradients_of_each_row_alone(family: str, tmp_path: Path) -> None:
    """Compare rows longer than the sliding window, in one pack, with the plain model under eager attention."""
    path = save_family(family, tmp_path)
    policy = Policy.from_pretrained(path)
    plain = plain_model(path)
    generator = torch.Generator().manual_seed(0)
    calls = []
    for length in (3 * WINDOW, 5, WINDOW + 1):
        ids = torch.randint(1, 512, (length,), generator=generator).tolist()
        calls.append(
            EngineCall(
                prompt_ids=tuple(ids[:2]),
                sampled_ids=tuple(ids[2:]),
                sampled_logprobs=(-1.0,) * (length - 2),
                finish_reason=FinishReason.LENGTH,
            )
        )
    rows = [row for index, call in enumerate(calls) for row in rows_from_calls([call], rollout_id=index)]
    found, _ = policy(collate(rows, range(len(rows))), with_entropy=False)
    expected = torch.cat([logprobs(plain, call) for call in calls])
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-3)

    weights = torch.randn(len(found), generator=generator)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None, name
        own = gradients[name]
        assert own is not None, name
        assert (parameter.grad - own).norm() <= 1e-3 * own.norm(), name


def logprobs(model: torch.nn.Module, call: EngineCall) -> torch.Tensor:
    """Return log π of each sampled token, with gradients."""
    ids = torch.tensor([[*call.prompt_ids, *call.sampled_ids]])
    found = torch.log_softmax(model(ids).logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]
    return found[len(call.prompt_ids) - 1 :]


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_adapters_are_sent_as_peft_saves_them(family: str, tmp_path: Path) -> None:
    path = save_family(family, tmp_path)
    policy = Policy.from_pretrained(path, lora=LoraConfig(rank=2))
    adapted = [parameter for name, parameter in policy.named_parameters() if "lora_" in name]
    assert adapted
    with torch.no_grad():
        for parameter in adapted:
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    sent = {name: tensor.clone() for name, tensor in ZeroSource(policy.model)}
    before = load_file(path / "model.safetensors")
    policy.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert sorted(sent) == sorted(merged) == sorted(before)
    for name, tensor in merged.items():
        torch.testing.assert_close(sent[name], tensor, msg=name)
    assert any(not torch.equal(sent[name], before[name]) for name in sent)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_measures_a_model_by_its_config(family: str, tmp_path: Path) -> None:
    config = Config()
    config.model.path = str(save_family(family, tmp_path))
    shape = planned_shape(config.model, config.algorithm)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layers == model.config.num_hidden_layers


def test_a_family_that_is_listed_is_tested_and_the_reverse() -> None:
    tested = {config().get_text_config().model_type for config in FAMILIES.values()}
    listed = [name for family in families.FAMILIES for name in family.model_types]
    assert sorted(listed) == sorted(tested)
    for name, config in ((name, make()) for name, make in FAMILIES.items()):
        (family,) = (one for one in families.FAMILIES if config.model_type in one.model_types)
        model = AutoModelForCausalLM.from_config(config)
        assert family.is_recurrent == any(recurrent.recurrent_layers(model))
        assert family.has_experts == any("experts" in parameter for parameter, _ in model.named_parameters())
        assert family.replays_routes == (name in test_routing_replay.REPLAYED)


def test_quantized_weights_are_refused_before_they_are_read(tmp_path: Path) -> None:
    config = FAMILIES["qwen3"]()
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)  # no weights beside it
    with pytest.raises(ConfigError, match=r"quantized \(bitsandbytes\).*QLoRA.*model\.lora\.rank=16"):
        Policy.from_pretrained(tmp_path)


def test_a_checkpoint_that_joins_weights_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3"]())
    split = WeightConverter(["qkv_proj.weight"], ["q_proj.weight", "k_proj.weight", "v_proj.weight"], [Chunk(dim=0)])
    model._weight_conversions = [split]
    with pytest.raises(SyncError, match=r"qkv_proj\.weight.*computes from other tensors.*docs/models\.md"):
        ZeroSource(model)


def test_names_of_a_loaded_model_are_those_of_its_own_checkpoint(tmp_path: Path) -> None:
    """Checkpoints of other versions have other names, which `save_pretrained` writes again."""
    path = save_family("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    model._weight_conversions = [WeightRenaming("transformer", "model")]
    names = dict(ZeroSource(model))
    assert "transformer.layers.0.self_attn.q_proj.weight" in names
    model.save_pretrained(tmp_path / "again")
    assert sorted(names) == sorted(load_file(tmp_path / "again" / "model.safetensors"))


def test_the_text_of_a_checkpoint_with_a_vision_tower_is_sent_and_saved_under_its_names(tmp_path: Path) -> None:
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
        "num_position_embeddings": 64,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=FAMILIES["qwen3_5"]().to_dict(), vision_config=vision)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    policy = Policy.from_pretrained(tmp_path)
    sent = dict(ZeroSource(policy.model))
    assert sorted(sent) == sorted(name for name in saved if "visual" not in name)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in sent.items())

    policy.model.save_pretrained(tmp_path / "trained")
    again = Policy.from_pretrained(tmp_path / "trained")
    for (name, own), loaded in zip(policy.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(own, loaded), name
