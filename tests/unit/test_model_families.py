"""Every family of models: what is sent to the engine is what its checkpoint holds, and packed rows score as alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

from rollout.errors import SyncError
from rollout.source import ZeroSource
from tests.fixtures.families import FAMILIES, HEADS, SIZES, save_family
from trainer.policy import Policy


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sent_has_the_names_and_values_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    path = save_family(family, tmp_path)
    policy = Policy.from_pretrained(path)
    saved = load_file(path / "model.safetensors")
    sent = dict(ZeroSource(policy.model))
    assert sorted(sent) == sorted(saved)
    for name, tensor in sent.items():
        assert torch.equal(tensor, saved[name]), name
    metas = ZeroSource(policy.model).metadata()
    assert {meta.name: tuple(meta.shape) for meta in metas} == {name: tuple(t.shape) for name, t in saved.items()}


def test_experts_whose_names_are_unknown_are_refused() -> None:
    config = MixtralConfig(**SIZES, **HEADS, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(SyncError, match=r"experts in model\.layers\.0\..* of a mixtral model; known are qwen2_moe"):
        ZeroSource(AutoModelForCausalLM.from_config(config))
