"""Resuming from the run's own settings: what is typed goes on top, and another task is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.cli import launch
from lockstep.trainer.config.changes import changed_task
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.resumption import saved_run
from tests.fixtures.composed import composed

OWN = (
    "algorithm=dr_grpo", "model.path=own/model", "data.path=own.jsonl", "environment.name=my.py:Env",
    "environment.max_turns=7", "reward.functions=[numeric,exact_match]", "reward.weights=[1,0.5]", "optimizer.lr=3e-4",
    "rollout.temperature=0.7", "data.system_prompt=Be brief.", "seed=5", "updates=9", "token_budget=512",
    "reward.settings.numeric.after=Answer", "logger.wandb_id=w1",
)  # fmt: skip
"""Words of a run whose settings are not those of the demo."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save(name: str = "own", *words: str, **changes: Any) -> Path:
    """Write a run directory with its settings and two checkpoints; return it."""
    run = Path("runs") / name
    config = composed(*OWN, f"run_name={name}", *words)
    content = OmegaConf.to_yaml(OmegaConf.create(plain(config) | changes))
    for step in ("step-4", "step-10"):
        place = run / "checkpoints" / step
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")
        (place / "config.json").write_text(json.dumps(plain(config) | changes))
    (run / "config.yaml").write_text(content)
    return run


def launched(monkeypatch: pytest.MonkeyPatch, *words: str) -> Config:
    """Compose as scripts/train.py, without the checks that need files."""
    found: list[Config] = []
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", *words])
    launch(found.append, check=lambda config: None)
    (config,) = found
    return config


Compose = Callable[..., Config]


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> Compose:
    return lambda *words: launched(monkeypatch, "resume=auto", "run_name=own", *words)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the sentences of a command line that ends with status 2."""

    def sentences(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            launched(monkeypatch, *words)
        assert stop.value.code == 2
        return capsys.readouterr().err

    return sentences


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    before, after = asdict(one), asdict(other)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def test_a_resumed_run_has_all_settings_of_the_run_and_what_is_typed(resume: Compose) -> None:
    save()
    expected = composed(*OWN, "run_name=own", "resume=auto", "updates=2", "logger.print_rollouts=0")
    assert differences(resume("updates=2", "logger.print_rollouts=0"), expected) == {}


def test_a_typed_preset_goes_on_top_and_leaves_the_other_settings(resume: Compose) -> None:
    save()
    config = resume("algorithm=dapo", "optimizer=adamw_tf", "resume_with_changes=true")
    assert (asdict(config.algorithm)["clip_high"], config.algorithm.overlong_buffer) == (0.28, 0.2)
    assert config.algorithm.normalizer == composed("algorithm=dapo").algorithm.normalizer
    assert config.optimizer.name == composed("optimizer=adamw_tf").optimizer.name
    assert config.optimizer.lr == composed("optimizer=adamw_tf").optimizer.lr, "presets that are typed win"
    assert (config.rollout.temperature, config.seed) == (0.7, 5)
    config = resume("algorithm=dapo", "algorithm.clip_high=0.9", "resume_with_changes=true")
    assert asdict(config.algorithm)["clip_high"] == 0.9


def test_the_experiment_of_the_run_may_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path("runs/demo")
    run.mkdir(parents=True)
    first = composed("experiment=demo", "optimizer.lr=1e-5")
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain(first))))
    again = launched(monkeypatch, "experiment=demo", "resume=auto", "run_name=demo")
    assert again.optimizer.lr == 1e-5
    assert again.environment == first.environment


CHANGED = {
    "model.path=other": "model.path (own/model -> other)",
    "data.path=other.jsonl": "data.path (own.jsonl -> other.jsonl)",
    "data=gsm8k": "data.path (own.jsonl -> openai/gsm8k)",
    "data.sources.new.path=other.jsonl": "data.sources.new.path (null -> other.jsonl)",
    "data.columns.prompt=task": "data.columns.prompt (null -> task)",
    "data.system_prompt=null": "data.system_prompt (Be brief. -> null)",
    "environment=single_turn": "environment.name (my.py:Env -> single_turn)",
    "environment.max_turns=3": "environment.max_turns (7 -> 3)",
    "environment.settings.hints=true": "environment.settings.hints (null -> true)",
    "reward=math": "reward.functions ([numeric, exact_match] -> [math_equal])",
    "reward.weights=[1,1]": "reward.weights ([1.0, 0.5] -> [1.0, 1.0])",
    "reward.settings.numeric.after=Result": "reward.settings.numeric.after (Answer -> Result)",
    "~reward.settings.numeric": "reward.settings.numeric.after (Answer -> null)",
    "algorithm=ppo": "algorithm.advantage (",
    "algorithm=sft": "algorithm.trains_on (rollouts -> demonstrations)",
    "model.lora.rank=8": "model.lora.rank (0 -> 8)",
    "demonstrations.path=talks.jsonl": "demonstrations.path (null -> talks.jsonl)",
}


@pytest.mark.long
@pytest.mark.parametrize(("word", "named"), CHANGED.items())
def test_another_task_is_refused_unless_it_is_asked_for(
    word: str, named: str, refused: Callable[..., str], resume: Compose
) -> None:
    save()
    sentence = refused("resume=auto", "run_name=own", word)
    assert "the run of runs/own/config.yaml learns another task than this command: " in sentence
    assert named in sentence
    assert "resume_with_changes=true" in sentence
    resume(word, "resume_with_changes=true")


ALLOWED = (
    "updates=20", "optimizer.lr=1e-6", "algorithm.kl_coef=0.1", "algorithm.clip_high=0.3", "rollout.temperature=0.9",
    "rollout.samples_per_prompt=4", "token_budget=null", "model.dtype=bfloat16", "model.gradient_checkpointing=true",
    "rollout=colocated", "rollout.num_engines=2", "eval.every=5", "data.heldout_path=test.jsonl", "logger=tensorboard",
    "checkpoint.every=2", "reward.timeout_s=5", "reward.workers=1", "max_hours=1", "seed=6",
    "method=lora model.lora.rank=0",
)  # fmt: skip


@pytest.mark.parametrize("words", ALLOWED)
def test_rates_hardware_logs_and_lengths_may_change(words: str, resume: Compose) -> None:
    save()
    resume(*words.split())


def test_another_address_of_the_same_service_is_the_same_task(resume: Compose) -> None:
    save("own", "environment.settings.url=http://a:8000")
    assert resume("environment.settings.url=http://b:8000").environment.settings == {"url": "http://b:8000"}


def test_the_demo_on_top_of_another_run_is_refused(refused: Callable[..., str]) -> None:
    """As with `make train ARGS="resume=auto run_name=own"`."""
    save()
    assert "data.path (own.jsonl -> data/demo/" in refused("experiment=demo", "resume=auto", "run_name=own")


def test_a_checkpoint_gives_its_own_settings_to_a_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = save()
    (run / "config.yaml").write_text("seed: 99\n")  # of a later resume
    config = launched(monkeypatch, f"resume={run}/checkpoints/step-4")
    assert (config.seed, config.model.path) == (5, "own/model")
    assert config.run_name is None, "a fork does not take the name of the run, whose later checkpoints it would replace"
    assert config.logger.wandb_id is None


def test_a_checkpoint_without_settings_takes_those_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = save()
    (run / "checkpoints/step-4/config.json").unlink()
    assert launched(monkeypatch, f"resume={run}/checkpoints/step-4", "run_name=b").seed == 5


def test_a_run_that_lost_its_config_takes_that_of_its_newest_checkpoint(resume: Compose) -> None:
    run = save()
    (run / "config.yaml").unlink()
    (run / "checkpoints/step-10/config.json").write_text(json.dumps(plain(composed(*OWN, "seed=10"))))
    assert resume().seed == 10
    assert resume().logger.wandb_id == "w1"


@pytest.mark.parametrize(
    ("resume", "sentence"),
    [
        ("runs/own", "has no manifest.json); set resume=runs/own/checkpoints/step-10, or"),
        ("runs/own/checkpoints", "has no manifest.json); set resume=runs/own/checkpoints/step-10, or"),
        ("runs/own/checkpoints/step-5", "does not exist); set resume=runs/own/checkpoints/step-10, or"),
        ("'runs/other/checkpoints/step-5'", "does not exist); set resume=<run>/checkpoints/step-<update>, or"),
        ("latest", "does not exist); set resume="),
        ("true", "does not exist); set resume="),
    ],
)
def test_a_resume_without_a_checkpoint_is_refused_before_anything_else(
    resume: str, sentence: str, refused: Callable[..., str]
) -> None:
    save()
    found = refused(f"resume={resume}", "run_name=b")
    assert sentence in found
    assert "resume=auto run_name=<name of the run>" in found
    assert "model.path" not in found


def test_a_name_without_a_run_is_said_with_the_closest_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save()
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", "resume=auto", "run_name=ovn"])
    with pytest.raises(SystemExit):
        launch(print)
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no runs/ovn (did you mean 'own'?), so this would be a new run; name a run, or set " in line
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", "resume=auto", "run_name=ovn", "model.path=m"])
    with pytest.raises(SystemExit):
        launch(print)
    assert "data.path is not set" in capsys.readouterr().err
    assert saved_run(["resume=auto", "run_name=ovn"]) is None
    assert saved_run(["resume=auto"]) is None
    assert saved_run(["run_name=own"]) is None


def test_secrets_of_the_run_are_asked_for_by_name(refused: Callable[..., str], resume: Compose) -> None:
    save("own", "reward.settings.numeric.api_key=hunter2", "gateway.model_name=m")
    sentence = refused("resume=auto", "run_name=own")
    assert "runs/own/config.yaml does not hold the secrets of the run; type them again: " in sentence
    assert sentence.endswith("type them again: reward.settings.numeric.api_key\n")
    assert resume("reward.settings.numeric.api_key=hunter2").reward.settings["numeric"]["api_key"] == "hunter2"


def test_settings_of_another_version_are_left_out_and_said(resume: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    save("own", no_longer={"a": 1}, sync={"gone": 2, "bucket_mib": 3})
    config = resume()
    assert config.sync.bucket_mib == 3
    assert "runs/own/config.yaml holds settings that this version does not know, left out: sync.gone, no_longer\n" in (
        capsys.readouterr().err
    )


def test_a_damaged_config_is_refused_by_name(refused: Callable[..., str]) -> None:
    run = save()
    (run / "config.yaml").write_text("seed: [1, 2")
    assert "runs/own/config.yaml cannot be read as settings" in refused("resume=auto", "run_name=own")
    (run / "config.yaml").write_text("seed: word")
    assert "runs/own/config.yaml cannot be read as settings: seed: found word, expected integer" in (
        refused("resume=auto", "run_name=own")
    )
    checkpoint = run / "checkpoints/step-4"
    (checkpoint / "config.json").write_text(json.dumps({"logger": "wandb", "seed": 1}))
    assert "step-4/config.json cannot be read as settings: " in refused(f"resume={checkpoint}")


def test_code_of_a_run_from_elsewhere_must_be_typed(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save()
    elsewhere = Path("shared")
    elsewhere.mkdir()
    run.rename(elsewhere / "own")
    resume = "resume=shared/own/checkpoints/step-4"
    sentence = refused(resume, "run_name=b")
    assert "is not below run_root=runs and names my.py:Env, which would be used with your rights" in sentence
    assert launched(monkeypatch, resume, "run_name=b", "environment.name=my.py:Env").seed == 5
    assert launched(monkeypatch, resume, "run_name=b", "run_root=shared").seed == 5


def test_a_task_is_unchanged_between_versions_with_other_settings() -> None:
    before = asdict(Config())
    del before["data"]["shuffle"], before["environment"]["history"]
    assert changed_task(before, asdict(Config())) == {}


def test_another_file_of_the_loss_is_refused_by_its_hash(resume: Compose, refused: Callable[..., str]) -> None:
    Path("my_loss.py").write_text("def loss(): ...\n")
    save("own", "algorithm.loss=my_loss.py:loss", "algorithm.loss_sha256=abc")
    assert resume().algorithm.loss_sha256 == "abc", "the check of the file refuses another one"
    config = resume("algorithm.loss=gspo", "resume_with_changes=true")
    assert config.algorithm.loss_sha256 is None
    assert "algorithm.loss (" in refused("resume=auto", "run_name=own", "algorithm.loss=gspo")


def test_a_wrong_value_on_top_is_explained_as_for_a_new_run(refused: Callable[..., str]) -> None:
    save()
    assert "updates: found many, expected integer" in refused("resume=auto", "run_name=own", "updates=many")
    assert "did you mean 'optimizer.lr'" in refused("resume=auto", "run_name=own", "optimizer.lrr=1")
    with pytest.raises(ConfigError, match="neither never"):
        saved_run(["resume=nothing"])
