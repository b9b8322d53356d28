"""The map of the code names every module, and nothing else; the hooks for commits run what is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts import map_code
from tests.fixtures.paths import ROOT

MODULES = [module for package in map_code.PACKAGES for module in map_code.modules(package)]


def test_every_module_is_on_the_map():
    checked = subprocess.run(
        [sys.executable, "scripts/map_code.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_says_what_it_is(module: Path):
    assert len(map_code.sentence(module)) > 15


def test_a_module_that_is_missing_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    lines = [line for line in map_code.PAGE.read_text().splitlines() if "`trainer/step.py` |" not in line]
    (tmp_path / "map.md").write_text("\n".join([*lines, "| `trainer/lost.py` | gone |"]))
    monkeypatch.setattr(map_code, "PAGE", tmp_path / "map.md")
    monkeypatch.setattr(sys, "argv", ["map_code.py", "--check"])
    assert map_code.main() == 1
    said = capsys.readouterr().err
    assert "lacks trainer/step.py" in said
    assert "names a lost trainer/lost.py" in said


def test_both_guides_point_at_the_map():
    for name in ("CONTRIBUTING.md", "AGENTS.md"):
        assert "docs/map.md" in (ROOT / name).read_text(), name


def test_the_hooks_run_files_and_modules_that_are_there():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "so that hooks have the versions of `make lint`"
    for hook in repository["hooks"]:
        program, *words = hook["entry"].split()
        assert program in (".venv/bin/ruff", ".venv/bin/python")
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py")), hook["entry"]
