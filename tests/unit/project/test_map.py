"""docs/map.md is up to date; the commit hooks run programs and files that exist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from scripts import map_code
from tests.fixtures.paths import ROOT


def test_the_map_is_what_the_docstrings_say() -> None:
    assert map_code.PAGE.read_text() == map_code.page(), "run: make docs"


def test_check_refuses_an_outdated_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_code, "ROOT", tmp_path)
    monkeypatch.setattr(map_code, "PAGE", tmp_path / "map.md")
    monkeypatch.setattr(map_code, "page", lambda: "new")
    monkeypatch.setattr(sys, "argv", ["map_code.py", "--check"])
    map_code.PAGE.write_text("old")
    assert map_code.main() == 1
    map_code.PAGE.write_text("new")
    assert map_code.main() == 0


def test_every_module_has_a_docstring() -> None:
    modules = [module for package in map_code.PACKAGES for module in map_code.modules(package)]
    assert [str(module) for module in modules if len(map_code.sentence(module)) <= 15] == []


def test_the_commit_hooks_run_files_and_modules_that_are_there() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "so that hooks have the versions of `make lint`"
    for hook in repository["hooks"]:
        program, *words = hook["entry"].split()
        assert program in (".venv/bin/ruff", ".venv/bin/python")
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py")), hook["entry"]
