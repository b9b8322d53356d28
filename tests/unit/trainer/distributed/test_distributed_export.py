"""Saved state: export of a model with tied parameters, and the optimizer on a device with an index."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.fixtures.distributed import FakeRank
from tests.fixtures.models import tiny_qwen3


class Wrapper(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


@pytest.mark.parametrize("tied", [True, False])
def test_copies_of_a_tied_head_are_written_once(tmp_path: Path, tied: bool) -> None:
    """ZeRO-2 gives copies of the parameters, in which tied ones no longer share their memory."""
    module = Wrapper(tiny_qwen3(tied=tied))
    rank = FakeRank(module)
    copies = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    rank._accelerator.get_state_dict = lambda _: copies  # type: ignore[method-assign]
    rank.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in written) is not tied
    ids = torch.tensor([[5, 6, 7]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, module.model(ids).logits)


def test_optimizer_state_is_read_on_a_cpu_with_an_index(tmp_path: Path) -> None:
    """Accelerate names the CPU of a DDP rank cpu:0, which torch.load does not know."""
    saved = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    FakeRank(saved, optimizer).save_state(tmp_path)

    module = nn.Linear(2, 2)
    rank = FakeRank(module, torch.optim.AdamW(module.parameters()))
    rank.device = torch.device("cpu", 0)
    rank.load_state(tmp_path)
    restored = rank._optimizer.state_dict()["state"]
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(restored[index][name], value) for name, value in state.items())
