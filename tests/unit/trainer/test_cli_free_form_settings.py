"""Settings that are dicts with keys of the user, on the command line and in YAML."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from lockstep.trainer.checks.validate import validate
from lockstep.trainer.cli import launch
from lockstep.trainer.compose import CONFIG_DIR
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.schema import Config
from tests.fixtures.composed import DEMO


def dict_settings(prefix: str, node: Any) -> Iterator[str]:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from dict_settings(f"{prefix}{field.name}.", value)
        elif str(field.type).startswith("dict["):
            yield f"{prefix}{field.name}"


DICTS = [
    *dict_settings("", Config()),
    *dict_settings("data.sources.mine.", DataSetConfig()),
    *dict_settings("eval.sets.mine.", DataSetConfig()),
]
ENTRIES = {
    "algorithm.advantage_settings": ("eps", 0.1),
    "algorithm.loss_settings": ("sharpness", 0.1),
    "data.columns": ("prompt", "question"),
    "demonstrations.columns": ("messages", "conversation"),
    "data.sources": ("mine", {"path": "rows.jsonl"}),
    "data.sources.mine.columns": ("prompt", "question"),
    "data.parameters": ("max_terms", 3),
    "data.sources.mine.parameters": ("max_terms", 3),
    "model.adapters": ("last", "runs/first/model/adapter"),
    "environment.settings": ("depth", 3),
    "reward.settings": ("numeric", {"rel_tol": 0.5}),
    "reward.on_error": ("timeout", "raise"),
    "correction.rejection": ("token_k3", 0.25),
    "eval.lm_eval.gen_kwargs": ("temperature", 0.5),
    "eval.sets": ("mine", {"path": "rows.jsonl"}),
    "eval.sets.mine.columns": ("prompt", "question"),
    "eval.sets.mine.parameters": ("max_terms", 3),
}
"""Key and value of an entry of each setting."""


def flow(value: Any) -> str:
    """Format a value for the command line: Hydra reads {a: b} as YAML does."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """Return a function from a command line to the unchecked configuration of a script."""

    def of(*words: str, check=lambda config: None) -> Config:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        monkeypatch.chdir(CONFIG_DIR.parent)
        GlobalHydra.instance().clear()
        found: list[Config] = []
        launch(found.append, check=check)
        return found[0]

    return of


def entry(config: Config, setting: str) -> Any:
    """Return the dict with a dotted name."""
    node: Any = config
    for name in setting.split("."):
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    return node


def expected(setting: str) -> dict[str, Any]:
    key, value = ENTRIES[setting]
    return {key: DataSetConfig(**value) if setting in ("data.sources", "eval.sets") else value}


def test_every_setting_that_is_a_dict_has_an_entry():
    assert set(DICTS) == set(ENTRIES)


@pytest.mark.parametrize("setting", DICTS)
@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_key_of_the_user_is_set_with_and_without_a_plus(setting: str, plus: str, launched):
    key, value = ENTRIES[setting]
    assert entry(launched(f"{plus}{setting}.{key}={flow(value)}"), setting) == expected(setting)


@pytest.mark.parametrize("setting", DICTS)
def test_the_whole_dict_is_set(setting: str, launched):
    key, value = ENTRIES[setting]
    assert entry(launched(f"{setting}={flow({key: value})}"), setting) == expected(setting)


@pytest.mark.parametrize("setting", DICTS)
def test_the_dict_is_set_in_a_file(setting: str, launched, tmp_path: Path):
    key, value = ENTRIES[setting]
    nested: Any = {key: value}
    for name in reversed(setting.split(".")):
        nested = {name: nested}
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(nested))
    config = launched(f"--config-dir={tmp_path}", "experiment=mine")
    assert entry(config, setting) == expected(setting)


def test_policies_for_errors_can_be_set_in_a_reward_file(launched, tmp_path: Path):
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward/strict.yaml").write_text("functions: [numeric]\non_error: {timeout: raise, crashed: -1.0}\n")
    config = launched(f"--config-dir={tmp_path}", "reward=strict", "reward.on_error.crashed=drop")
    assert config.reward.on_error == {"timeout": "raise", "crashed": "drop"}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("reward.on_error.timout=raise", "timout is not one of timeout, exception"),
        ("reward.on_error.timout=raise", "did you mean 'timeout'?"),
        ("reward.on_error.timeout=ignore", "nor a number; set reward.on_error.timeout=drop"),
        ("reward.on_error={timeout: null}", "is neither drop, raise nor a number"),
        (f"reward.on_error.timeout={10**400}", "is neither drop, raise nor a number"),
        ("reward.on_error.timeout.after=3", "is neither drop, raise nor a number"),
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_an_unknown_policy_for_errors_gets_one_sentence(
    word: str, sentence: str, launched, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        launched(DEMO, word, check=validate)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err
