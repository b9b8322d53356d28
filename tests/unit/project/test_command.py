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
    assert (described.returncode, described.stdout[:32]) == (0, "usage: lockstep inspect-run [-h]")
    refused = lockstep("train", "optimizer.learning_rate=1", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("lockstep: optimizer.learning_rate is not a setting")


@pytest.mark.parametrize(("name", "setting"), [("train", "data.path "), ("evaluate", "eval.compare_to ")])
def test_the_help_of_a_command_with_settings_is_its_own(name: str, setting: str) -> None:
    shown = lockstep(name, "--help")
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert lines[0] == f"usage: lockstep {name} [my_run.yaml] [setting=value ...]"
    assert lines[2] == command.commands()[name]
    assert sum(line.startswith(f"  {setting}") for line in lines) == 1
    assert "docs/settings.md" in lines[-1]
    assert "Compose your configuration" not in shown.stdout


@pytest.mark.parametrize("words", [("train", "--help"), ("train", "--cfg", "job"), ("plot", "--help")])
def test_output_that_a_pipe_cuts_off_ends_without_a_traceback(words: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words],
        cwd=ROOT, env={"PATH": "", "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 1
