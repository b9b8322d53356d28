"""Commands after a run are about this run, although another one may move `runs/latest` meanwhile."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lockstep.lab.diagnosis.saved import find_rollouts
from lockstep.lab.pages.saved_run import SavedRun
from lockstep.lab.replay import replay
from lockstep.rollout.errors import ConfigError
from scripts import report
from tests.fixtures.composed import composed
from tests.fixtures.paths import ROOT


def commands(**variables: str) -> list[str]:
    words = [f"{name}={value}" for name, value in variables.items()]
    printed = subprocess.run(
        ["make", "--dry-run", "SKIP_INSTALL=1", "real", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [line for line in printed.stdout.splitlines() if "scripts/" in line][-2:]


def test_the_report_of_make_real_is_about_the_run_that_it_made():
    train, shown = commands()
    (name,) = (word.removeprefix("run_name=") for word in train.split() if word.startswith("run_name="))
    assert name.startswith("real-")
    assert shown.endswith(f"scripts/report.py runs/{name}")


@pytest.mark.parametrize("typed", ["run_name=mine", "'run_name=mine'"])
def test_the_name_of_a_run_may_be_typed(typed):
    train, shown = commands(ARGS=f"updates=2 run_root=elsewhere {typed}")
    assert train.endswith(f"run_root=elsewhere {typed}"), "the last value counts"
    assert shown.endswith("scripts/report.py elsewhere/mine")


def test_settings_and_commands_name_what_a_link_leads_to_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "first" / "rollouts").mkdir(parents=True)
    (tmp_path / "first" / "rollouts" / "step-000001.jsonl").touch()
    (tmp_path / "latest").symlink_to("first")
    assert composed(f"model.path={tmp_path}/latest/model").model.path == f"{tmp_path}/first/model"
    assert composed("model.path=org/latest").model.path == "org/latest"
    assert find_rollouts(tmp_path / "latest") == tmp_path / "first" / "rollouts" / "step-000001.jsonl"
    asked: list[Path] = []

    def settings(run: Path, *_: object, **__: object) -> None:
        asked.append(run)
        raise ConfigError("as far as this test goes")

    monkeypatch.setattr("lockstep.lab.replay.settings_of", settings)
    for path in ("latest", "latest/dumps/update-000001-try-1"):
        with pytest.raises(ConfigError, match="as far"):
            replay(tmp_path / path, step=1 if path == "latest" else None, sample=False, overrides=[])
    assert asked == [tmp_path / "first", tmp_path / "first"]


def test_a_link_is_followed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    latest = tmp_path / "latest"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    latest.symlink_to("first")
    asked: list[Path] = []

    def moved(path: Path) -> SavedRun:
        asked.append(path)
        os.remove(latest)
        latest.symlink_to("second")
        raise OSError("as far as this test goes")

    monkeypatch.setattr(SavedRun, "read", moved)
    monkeypatch.setattr("sys.argv", ["report.py", str(latest)])
    assert report.main() == 1
    assert asked == [tmp_path / "first"]
