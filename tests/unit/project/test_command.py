"""The command `lockstep`: what it lists, runs and refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import command
from tests.fixtures.paths import ROOT


def lockstep(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        cwd=cwd,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_script_is_a_command_with_a_description() -> None:
    scripts = {path.stem.replace("_", "-") for path in (ROOT / "scripts").glob("*.py")}
    assert set(command.commands()) == scripts
    assert all(command.commands().values())


def test_without_words_the_commands_are_listed() -> None:
    shown = lockstep()
    assert shown.returncode == 0
    for name, description in command.commands().items():
        assert f"{name} " in shown.stdout
        assert description in shown.stdout


def test_the_folder_of_launch_files_is_printed(tmp_path: Path) -> None:
    folder = lockstep("--configs", cwd=tmp_path).stdout.strip()
    assert (Path(folder) / "accelerate/zero3.yaml").is_file()


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("evalute", "evalute is not a command; expected evaluate"),
        ("check", "check is not a command; expected check-environment or check-loss"),
    ],
)
def test_another_word_ends_in_a_sentence(word: str, sentence: str) -> None:
    refused = lockstep(word)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"lockstep: {sentence}\n"


def test_a_command_gets_its_words_and_gives_its_status(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("raise SystemExit('a module of the user was imported')\n")
    described = lockstep("inspect", "--help", cwd=tmp_path)  # the only command that begins so
    assert (described.returncode, described.stdout[:26]) == (0, "usage: inspect_run.py [-h]")
    refused = lockstep("train", "optimizer.learning_rate=1", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("lockstep: optimizer.learning_rate is not a setting")
