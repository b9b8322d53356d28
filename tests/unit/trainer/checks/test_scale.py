"""Warnings and notes at the start about large models, and about held-out rows among the training rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.rollout.environments.prompt import PromptReader
from lockstep.trainer.checks.scale import disk_notes, overlap_warnings, size_warnings
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import load_data_set
from lockstep.trainer.model.shape import ModelShape, planned_shape
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.policies import TOKENIZER


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """Return the shape of a model with 135 M parameters, all of them trained."""
    directory = tmp_path_factory.mktemp("model")
    tiny_qwen3(tied=True).save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    config = Config()
    config.model.path = str(directory)
    return replace(planned_shape(config.model, config.algorithm), parameters=134_515_008, trained=134_515_008)


def of_size(shape: ModelShape, config: Config) -> list[str]:
    return list(size_warnings(shape, config.optimizer, has_adapters=config.model.lora.rank > 0))


def of_disk(shape: ModelShape, config: Config) -> list[str]:
    return list(disk_notes(shape, config.checkpoint, optimizer=config.optimizer.name, updates=config.updates))


def test_a_learning_rate_for_small_models_is_warned_of_in_a_full_fine_tune(shape: ModelShape):
    config = Config()
    config.optimizer.lr = 3e-4
    (sentence,) = of_size(shape, config)
    assert sentence.startswith("optimizer.lr=0.0003 for all weights of a model of 135 M parameters; usual are 1e-6")
    assert not of_size(replace(shape, parameters=49_000_000), config)
    config.optimizer.lr = 1e-4
    assert not of_size(shape, config)
    config.optimizer.lr, config.model.lora.rank = 3e-4, 16
    assert not of_size(shape, config)


def test_the_disk_space_of_large_checkpoints_is_said(shape: ModelShape):
    config = Config()  # 80 updates, a checkpoint every 20, 2 kept
    (sentence,) = of_disk(shape, config)
    assert "about 1.6 GB per checkpoint, 5.4 GB in all" in sentence, "3 checkpoints for a moment, and the model"
    config.updates = 2
    (sentence,) = of_disk(shape, config)
    assert "2.2 GB in all" in sentence
    assert not of_disk(replace(shape, parameters=80_000_000, trained=80_000_000), config)
    assert not of_disk(replace(shape, trained=1_000_000), config)


def write(path: Path, questions: list[str], column: str = "question") -> Path:
    path.write_text("".join(json.dumps({column: text, "answer": "4"}) + "\n" for text in questions))
    return path


def test_evaluated_rows_that_are_training_rows_are_counted(tmp_path: Path):
    path = str(write(tmp_path / "heldout.jsonl", ["a", "b", "c", "d"]))
    training = load_data_set(
        DataSetConfig(
            path=str(write(tmp_path / "train.jsonl", ["b", "c", "d", "e"], "task")),
            split="train",
            columns={"question": "task"},
            system_prompt="Be brief.",
        )
    )
    heldout = load_data_set(DataSetConfig(path=path, split="test"))
    (sentence,) = overlap_warnings([training], {"": heldout}, PromptReader(), evaluated=3)
    assert sentence.startswith(f"2 of 3 evaluated rows of data.heldout_path={path} are also")
    other = load_data_set(DataSetConfig(path=str(write(tmp_path / "other.jsonl", ["x"])), split="train"))
    assert not list(overlap_warnings([other], {"": heldout}, PromptReader(), evaluated=3))
