"""The login that a tracked run needs is missed before anything heavy starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.trainer.checks.tracking import tracking_problems
from tests.fixtures.composed import demo as composed


@pytest.fixture(autouse=True)
def _no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "MODE", "BASE_URL", "CONFIG_DIR"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)


def test_a_run_that_cannot_log_in_is_told_both_ways_out():
    for words in (["logger=wandb"], ["logger.wandb=online"]):
        (problem,) = tracking_problems(composed(*words).logger)
        assert "`wandb login`" in problem
        assert "logger.wandb=offline" in problem
    assert not list(tracking_problems(composed().logger))
    assert not list(tracking_problems(composed("logger.wandb=offline").logger))


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_mode_of_the_environment_counts_unless_the_setting_is_given(mode: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", mode)
    assert not list(tracking_problems(composed("logger=wandb").logger))
    assert len(list(tracking_problems(composed("logger=wandb", "logger.wandb=online").logger))) == 1


def test_a_login_is_found_where_wandb_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".netrc").write_text("machine wandb.example login user password k\n")
    (problem,) = tracking_problems(composed("logger=wandb").logger)
    assert "https://api.wandb.ai" in problem
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert not list(tracking_problems(composed("logger=wandb").logger))
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert not list(tracking_problems(composed("logger=wandb").logger))


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "trackio", "swanlab"])
def test_a_tracker_without_its_package_is_refused_with_what_to_type(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = tracking_problems(composed(f"logger={name}").logger)
    assert f"`pip install 'lockstep-rl[{name}]'`" in problem
    assert f"set logger.{name}=false" in problem


def test_several_trackers_are_chosen_as_a_list(monkeypatch: pytest.MonkeyPatch):
    config = composed("logger=[wandb,mlflow,tensorboard]", "logger.trackio=true").logger
    assert config.wandb == "auto"
    assert config.trackers == ["tensorboard", "mlflow", "trackio"]
