"""Model families: the weights sent to the engine equal the checkpoint, and packed rows score as each row alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

from rollout.episode.rows import rows_from_calls
from rollout.errors import ConfigError, SyncError
from rollout.records import EngineCall, FinishReason
from rollout.weights.source import ZeroSource
from tests.fixtures.families import FAMILIES, HEADS, SIZES, WINDOW, save_family
from tests.fixtures.models import sampled_logprobs
from trainer.batch.packing import collate
from trainer.model.policy import Policy


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
def test_packed_rows_score_as_the_transformers_model_does_and_reach_every_parameter(
    family: str, tmp_path: Path
) -> None:
    """Compare rows longer than the sliding window, in one pack, with the plain model under eager attention."""
    path = save_family(family, tmp_path)
    policy = Policy.from_pretrained(path)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
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
    expected = [logprob for call in calls for logprob in sampled_logprobs(plain, call.prompt_ids, call.sampled_ids)]
    assert found.tolist() == pytest.approx(expected, abs=1e-3)

    found.sum().backward()
    without = [name for name, p in policy.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
    assert not without, "parameters without a finite gradient"


def test_quantized_weights_are_refused_before_they_are_read(tmp_path: Path) -> None:
    config = FAMILIES["qwen3"]()
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)  # no weights beside it
    with pytest.raises(ConfigError, match=r"quantized \(bitsandbytes\).*QLoRA.*model\.lora\.rank=16"):
        Policy.from_pretrained(tmp_path)


def test_experts_whose_names_are_unknown_are_refused() -> None:
    config = MixtralConfig(**SIZES, **HEADS, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(
        SyncError,
        match=r"experts in model\.layers\.0\..* of a mixtral model; set model\.path to a model of type qwen2_moe",
    ):
        ZeroSource(AutoModelForCausalLM.from_config(config))
