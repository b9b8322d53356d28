"""Buffers of a loaded model are those of a new module, whatever a launcher did to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.rollout.models.computed_buffers import set_buffers, wrong_buffer
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import LANGUAGE_MODEL
from tests.fixtures.families import FAMILIES, save_family
from tests.fixtures.models import perturb


@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_buffers_become_those_of_a_new_module(family: str) -> None:
    expected = AutoModelForCausalLM.from_config(FAMILIES[family]())
    perturb(expected, seed=1)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    stored = expected.state_dict()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.bfloat16() if buffer.is_floating_point() else buffer
    is_computed = [name for name, _ in expected.named_non_persistent_buffers()]
    wrong = wrong_buffer(model)
    assert (wrong is not None) == bool(is_computed)
    assert wrong is None or wrong.split(" ")[0] in is_computed
    set_buffers(model, stored.get)
    assert wrong_buffer(model) is None
    for name, buffer in expected.named_buffers():
        found = model.get_buffer(name)
        assert found.dtype == buffer.dtype, name
        assert torch.equal(found, buffer), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma3", "falcon_h1", "minimax_m2"])
def test_buffers_are_those_of_a_new_module_in_each_dtype_of_the_weights(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    new = AutoModelForCausalLM.from_pretrained(save_family(family, tmp_path), dtype=torch.float32)
    loaded = load_model(LANGUAGE_MODEL, tmp_path, setting="model.path", dtype=dtype, trust_remote_code=False)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    for name, buffer in new.named_buffers():
        assert loaded.get_buffer(name).dtype == buffer.dtype, name
        assert torch.equal(loaded.get_buffer(name), buffer), name
