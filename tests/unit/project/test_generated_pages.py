"""docs/map.md and docs/settings.md are up to date, and commit hooks write them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from scripts import list_settings, map_code
from tests.fixtures.paths import ROOT

PAGES = pytest.mark.parametrize("script", [map_code, list_settings], ids=["map", "settings"])


@PAGES
def test_a_generated_page_is_what_the_code_says(script: ModuleType) -> None:
    assert script.PAGE.read_text() == script.page(), "run: make docs"


@PAGES
def test_check_refuses_an_outdated_page(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(script, "page", lambda: "new")
    monkeypatch.setattr(sys, "argv", ["", "--check"])
    script.PAGE.write_text("old")
    assert script.main() == 1
    script.PAGE.write_text("new")
    assert script.main() == 0


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
