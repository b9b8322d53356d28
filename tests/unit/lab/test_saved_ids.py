"""Diagnosis and replay of saved rollouts and batches: pages that cannot be written, and ids of another model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lockstep.demo.warm_start import new_model
from lockstep.lab.diagnose import run as diagnose
from lockstep.lab.replay import replay
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.saved_rollouts import write_rollouts
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.update.batch_dumps import write_dump
from tests.fixtures.policies import TOKENIZER
from tests.unit.lab.pages.test_run_report import rollout
from tests.unit.trainer.update.test_update_guard import ATTEMPT, batch, targets  # noqa: F401  # a fixture


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    directory = tmp_path_factory.mktemp("model")
    new_model(TOKENIZER, seed=0).save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    config = Config()
    config.model.path = str(directory)
    return config


def vocab_size(config: Config) -> int:
    return json.loads((Path(config.model.path) / "config.json").read_text())["vocab_size"]


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    write_rollouts(tmp_path / "step-000001.jsonl", [rollout(0, 1.0), rollout(1, 0.0)])
    return tmp_path / "step-000001.jsonl"


def test_a_page_of_saved_rollouts_is_written_or_the_reason_is_said(config: Config, rollouts: Path) -> None:
    page = rollouts.parent / "pages" / "view.html"
    diagnose(config, as_json=True, html=page, rollouts=rollouts)
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(ConfigError, match=r"--html .*x\.html cannot be written: .*"):
        diagnose(config, as_json=True, html=rollouts / "x.html", rollouts=rollouts)


def test_saved_rollouts_of_another_model_are_not_diagnosed(config: Config, rollouts: Path) -> None:
    size = vocab_size(config)
    made = rollout(7, 1.0)
    call = replace(made.calls[0], sampled_ids=(2, size))
    write_rollouts(rollouts, [rollout(0, 1.0), replace(made, calls=(call,))])
    with pytest.raises(DataError, match=f"rollout 7 has the token id {size}, but the model has {size} ids"):
        diagnose(config, as_json=True, rollouts=rollouts)


def test_a_dumped_batch_of_another_model_is_not_replayed(config: Config, batch: StepBatch, tmp_path: Path) -> None:  # noqa: F811
    size = vocab_size(config)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain(config))))
    first, *others = batch.rows
    ids = first.ids.copy()
    ids[-1] = size
    foreign = replace(batch, rows=(replace(first, ids=ids), *others))
    dump = write_dump(tmp_path / "dumps", replace(ATTEMPT, update=1), foreign, targets(batch))
    with pytest.raises(DataError, match=f"has the token id {size}, but the model has {size} ids"):
        replay(dump, step=None, sample=False, overrides=[])
