"""Table, sentences and exit status of `scripts/check_loss.py`.

Without the trainer's update, which takes seconds: tests/integration/test_check_loss.py has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.lab.finding import Finding
from lockstep.lab.losses.check_objective import check_objective
from lockstep.rollout.errors import ConfigError
from tests.fixtures.pages import ROOT, page_files

FILES = page_files(ROOT / "docs/tutorials/own_loss.md")


def no_update(*arguments: Any, **named: Any) -> Iterator[Finding]:
    yield from ()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files of the tutorial."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_loss.py:quadratic", ["epsilon=0.1"]),
        ("my_sequence_loss.py:by_rollout", ["most=3"]),
        ("my_advantage.py:absolute", []),
        ("gspo", ["clip_low=0.3", "clip_high=0.4"]),
    ],
)
def test_the_functions_of_the_tutorial_pass(
    name: str, words: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_objective(name, words, no_update)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{name}: ")
    assert all(word in first for word in words)
    assert last.endswith("checks passed")


def test_the_mistake_of_the_tutorial_is_named_as_shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not check_objective("my_loss.py:averaged", [], no_update)
    found = capsys.readouterr().out
    page = (ROOT / "docs/tutorials/own_loss.md").read_text().replace("\n", " ")
    shown = [line for line in found.splitlines() if line.startswith("FAILS: ") and line in page]
    assert len(shown) == 2
    assert "a token's loss without the others                FAILS 1e-01\n" in found


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["epsilom=1"], r"epsilom: the function takes epsilon \(did you mean 'epsilon'\?\)"),
        (["epsilon=small"], r"epsilon=small is not a number; set epsilon=0.2 \(the default\)"),
        (["epsilon=.nan"], "epsilon=nan is not a finite number"),
        (["epsilon=true"], "epsilon=true is not a number"),
    ],
)
def test_a_wrong_setting_is_refused(words: list[str], sentence: str, directory: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_objective("my_loss.py:quadratic", words)
