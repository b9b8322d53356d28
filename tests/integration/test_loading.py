"""Two ranks in bfloat16: loaded buffers are those of one process, and both ranks refuse what is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fixtures.broken_models import FAULTS, change_tensors
from tests.fixtures.families import FAMILIES, save_family
from tests.fixtures.models import save_tiny_model
from tests.fixtures.ranks import accelerate, reports
from tests.integration.workers.loading import TRAINED

BIASES = ("e_score_correction_bias", "expert_bias")
SHOWN_BY_RANKS = ("names of torch.compile", "a tensor less", "a tensor more", "transposed", "a shard less", "NaN")
"""Faults of names, shapes, files and values; transformers itself sees the first two of them under ZeRO-3."""


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["ddp", "zero2", "zero3"])
def test_all_launchers_load_the_same_buffers_and_refuse_the_same_files(tmp_path: Path, launcher: str) -> None:
    for family in FAMILIES if launcher == "zero3" else TRAINED:
        directory = save_family(family, tmp_path / "families" / family)
        change_tensors(directory, with_biases)
    for fault in SHOWN_BY_RANKS:
        FAULTS[fault].make(save_tiny_model(tmp_path / "faults" / fault, tied=True))
    # An odd number of elements: the last rank's shard is padded, and the value is the last before the padding.
    change_tensors(save_tiny_model(tmp_path / "faults" / "last value", tied=False), last_value)
    first, second = reports(accelerate(launcher), "tests.integration.workers.loading", tmp_path, timeout_s=400)
    for report in (first, second):
        assert {name: wrong for name, wrong in report["wrong"].items() if wrong} == {}
        assert report["wrong"].keys() > set(TRAINED)
        assert report["refused"].keys() == {*SHOWN_BY_RANKS, "last value"}
        assert all(FAULTS[fault].says in report["refused"][fault] for fault in SHOWN_BY_RANKS)
    assert first["refused"] == second["refused"]


def with_biases(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Change the correction biases of routers, which are 0, to values that bfloat16 does not have."""
    return {name: tensor + 0.123456789 if name.endswith(BIASES) else tensor for name, tensor in state.items()}


def last_value(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state["model.layers.3.post_attention_layernorm.weight"][-1] = float("nan")
    return state
