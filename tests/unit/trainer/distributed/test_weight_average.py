"""The moving average of the trained parameters: its formula, its time in the module, and its file.

ZeRO-2 and ZeRO-3 on real ranks: tests/integration/test_weight_average.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.rollout.errors import CheckpointError, SyncError
from lockstep.trainer.distributed.weight_average import DIRECTORY, WeightAverage
from tests.fixtures.distributed import FakeRank


def layer(*values: float) -> nn.Linear:
    made = nn.Linear(len(values), 1)
    made.bias.requires_grad_(False)
    return filled(made, *values)


def filled(module: nn.Linear, *values: float) -> nn.Linear:
    with torch.no_grad():
        module.weight.copy_(torch.tensor([values]))
    return module


def averages(average: WeightAverage, module: nn.Linear) -> list[float]:
    with average.installed():
        return module.weight[0].tolist()


def test_each_advance_moves_the_average_a_share_of_the_way_to_the_parameters() -> None:
    module = layer(1.0, -2.0)
    average = WeightAverage(FakeRank(module), decay=0.75)
    assert averages(average, module) == [1.0, -2.0], "it begins at the parameters"
    filled(module, 5.0, 2.0)
    average.advance()
    assert averages(average, module) == [2.0, -1.0], "0.75 · 1 + 0.25 · 5 and 0.75 · -2 + 0.25 · 2"
    average.advance()
    assert averages(average, module) == [2.75, -0.25], "0.75 · 2 + 0.25 · 5 and 0.75 · -1 + 0.25 · 2"


def test_a_bfloat16_module_is_averaged_in_float32_in_which_small_changes_add_up() -> None:
    module = layer(256.0, 1.0).bfloat16()
    average = WeightAverage(FakeRank(module), decay=0.99)
    filled(module, 264.0, 1.0)
    for _ in range(100):  # bfloat16 has steps of 2 here, so that none of 0.08 would count
        average.advance()
    expected = 264 - 8 * 0.99**100
    assert averages(average, module)[0] == pytest.approx(expected, abs=1.0)
    assert module.weight.dtype == torch.bfloat16


def test_after_the_block_the_parameters_have_their_bits_again_also_after_an_error() -> None:
    module = layer(0.1, 0.7)
    average, before = WeightAverage(FakeRank(module), decay=0.5), module.weight.detach().clone()
    filled(module, 3.1, 0.3)
    average.advance()
    trained, memory = module.weight.detach().clone(), module.weight.data_ptr()

    def fail() -> None:
        with average.installed():
            assert not torch.equal(module.weight, trained)
            raise SyncError("the engine is dead")

    with pytest.raises(SyncError):
        fail()
    assert torch.equal(module.weight, trained)
    assert module.weight.data_ptr() == memory, "the weight sync reads the parameters where they were"
    assert not torch.equal(module.weight, before)


def test_a_loaded_average_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = layer(*torch.randn(7).tolist())
    average = WeightAverage(FakeRank(module), decay=0.9)
    filled(module, *torch.randn(7).tolist())
    average.advance()
    average.save(tmp_path)
    other = layer(*module.weight[0].tolist())
    resumed = WeightAverage(FakeRank(other), decay=0.9)
    assert resumed.load(tmp_path)
    for _ in range(2):
        assert averages(resumed, other) == averages(average, module)
        average.advance()
        resumed.advance()


def test_a_checkpoint_without_an_average_leaves_the_one_there_is(tmp_path: Path) -> None:
    module = layer(1.0, 2.0)
    average = WeightAverage(FakeRank(module), decay=0.5)
    assert not average.load(tmp_path)
    assert averages(average, module) == [1.0, 2.0]
    filled(module, 3.0, 4.0)
    average.restart()
    assert averages(average, module) == [3.0, 4.0]


def test_only_the_main_rank_writes_parameters_that_every_rank_holds(tmp_path: Path) -> None:
    WeightAverage(FakeRank(layer(1.0), rank=1, world_size=2), decay=0.5).save(tmp_path)
    assert not (tmp_path / DIRECTORY).exists()


def test_an_average_of_another_model_or_with_a_missing_file_is_refused(tmp_path: Path) -> None:
    WeightAverage(FakeRank(layer(1.0, 2.0)), decay=0.5).save(tmp_path)
    with pytest.raises(CheckpointError, match="is of another model: weight has 2 elements, expected 3"):
        WeightAverage(FakeRank(layer(1.0, 2.0, 3.0)), decay=0.5).load(tmp_path)
    with pytest.raises(CheckpointError, match="is of another model: 1 parameters differ"):
        WeightAverage(FakeRank(nn.Linear(2, 1)), decay=0.5).load(tmp_path)
    (tmp_path / DIRECTORY / "rank-0.safetensors").rename(tmp_path / DIRECTORY / "rank-1.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks files; found those of ranks \[1\]"):
        WeightAverage(FakeRank(layer(1.0, 2.0)), decay=0.5).load(tmp_path)


def test_a_damaged_average_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    WeightAverage(FakeRank(layer(1.0, 2.0)), decay=0.5).save(tmp_path)
    file = tmp_path / DIRECTORY / "rank-0.safetensors"
    whole = file.read_bytes()
    module = layer(3.0, 4.0)
    average = WeightAverage(FakeRank(module), decay=0.5)
    for damaged in (whole[:-1], b"", b"\xff" * len(whole)):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="weight_average cannot be read"):
            average.load(tmp_path)
    assert averages(average, module) == [3.0, 4.0]
