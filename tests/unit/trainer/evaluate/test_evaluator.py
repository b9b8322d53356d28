"""Sampling seeds of evaluations: by data set, row and sample."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.rewards.composition import Reward, RewardSet
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.episode.conversation import request_seed
from lockstep.rollout.media.run_images import FOLDER
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.checks.data import evaluation_problems
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.collect.episodes import Episodes
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import heldout_data
from lockstep.trainer.evaluate.evaluator import Evaluator, _Process, comparable_settings
from lockstep.trainer.observe.console import RunConsole
from tests.fixtures.vision import picture, save_tiny
from tests.unit.rewards.test_shaping import rollout


class FakeSampler:
    """Notes the steps of the sampling seeds, data set by data set."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def collect(self, examples: Any, *, step: int, on_rollout: Any, on_group: Any, **settings: Any) -> None:
        self.steps.append(step)
        for _ in examples:
            on_rollout(rollout(8))
            on_group([rollout(8)])


def steps(directory: Path, *sets: str, said: list[str] | None = None) -> list[int]:
    """Return the step in the seeds of data.heldout_path and of further sets, evaluated together.

    said: list to which progress is appended.
    """
    notes = [] if said is None else said
    path = directory / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "7"}) + "\n")
    config, sampler = Config(), FakeSampler()
    config.data.heldout_path = str(path)
    config.eval.sets = {name: DataSetConfig(path=str(path)) for name in sets}
    rewards = RewardSet([Reward(name="half", function=lambda found: 0.5)])
    with BackgroundLoop() as loop:
        evaluator = Evaluator(
            config.eval,
            heldout_data(config.heldout_sets(), config.environment, config.reward),
            episodes=Episodes(drivers=Drivers(loop), sampler=sampler, rewards=rewards),  # type: ignore[arg-type]
            sampling=Sampling(max_tokens=8),
        )
        notes.append(f"{evaluator.num_rollouts} rollouts")
        evaluator.evaluate(lambda rollout: notes.append("arrived"), notes.append)
    return sampler.steps


def test_data_sets_are_independent_samples(tmp_path: Path) -> None:
    found = steps(tmp_path, "easy", "hard")
    assert len({request_seed(0, step, 0) for step in found}) == 3


def test_a_data_set_keeps_its_seeds_whatever_is_evaluated_beside_it(tmp_path: Path) -> None:
    main, hard = steps(tmp_path, "hard")
    assert [main, hard] == [steps(tmp_path, "easy", "hard")[i] for i in (0, 2)]
    assert main == 2**31 - 1, "the seeds of earlier versions, to which saved results are compared"


def test_an_evaluation_reports_its_progress(tmp_path: Path) -> None:
    said: list[str] = []
    steps(tmp_path, "hard", said=said)
    assert said == ["2 rollouts", "rollout", "arrived", "reward", "rollout of hard", "arrived", "reward of hard"]


def with_tasks(**settings: Any) -> Config:
    config = Config()
    config.data.heldout_path = "demo.jsonl"
    config.eval.lm_eval.tasks = ["gsm8k"]
    for name, value in settings.items():
        setattr(config.eval.lm_eval, name, value)
    return config


def test_tasks_replace_the_held_out_data_but_no_named_sets() -> None:
    config = with_tasks()
    assert config.heldout_sets() == {}
    config.eval.sets = {"mine": DataSetConfig(path="mine.jsonl")}
    assert list(config.heldout_sets()) == ["mine"]


def test_only_settings_of_what_is_evaluated_must_agree() -> None:
    config = with_tasks(num_fewshot=3)
    found = comparable_settings(config)
    assert found["eval.lm_eval.num_fewshot"] == 3
    assert "environment.name" not in found
    config.eval.sets = {"mine": DataSetConfig(path="mine.jsonl")}
    assert {"environment.name", "eval.lm_eval.num_fewshot"} <= comparable_settings(config).keys()
    config.eval.lm_eval.tasks = []
    assert not any("lm_eval" in name for name in comparable_settings(config)), "files of earlier versions lack them"


def test_a_missing_package_is_named_before_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = with_tasks(include_path="no/such/directory", fewshot_as_multiturn=True)
    found = "\n".join(evaluation_problems(config.eval, config.reward.functions, has_data=False))
    assert "pip install 'lm-eval>=0.4.13,<0.5'" in found
    assert "eval.lm_eval.include_path=no/such/directory does not exist" in found
    assert "eval.lm_eval.apply_chat_template=true" in found


def test_images_of_saved_rollouts_are_kept_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "")
    config = Config()
    config.model.path, config.model.images.max_per_prompt = str(save_tiny("qwen2_5_vl", tmp_path / "model")), 1
    config.eval.output = str(tmp_path / "results.json")
    images = _Process(config, RunConsole(enabled=False, total_updates=0))._chat().images
    assert images is not None
    assert (tmp_path / "media" / f"{images.store.add(picture(1))}.png").is_file()
