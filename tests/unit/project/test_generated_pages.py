"""The generated pages of docs/ are up to date, and commit hooks write them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from scripts.project import (
    generated,
    list_environments,
    list_licenses,
    list_memory,
    list_models,
    list_recipes,
    list_settings,
    list_stability,
    map_code,
)
from tests.fixtures.paths import ROOT

PAGES = (
    list_environments.PAGES
    | map_code.PAGES
    | list_settings.PAGES
    | list_licenses.PAGES
    | list_models.PAGES
    | list_memory.PAGES
    | list_stability.PAGES
    | list_recipes.PAGES
)


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    assert (ROOT / name).read_text() == PAGES[name](), "run: make docs"


def test_check_refuses_an_outdated_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["", "--check"])
    (tmp_path / "page.md").write_text("old")
    assert generated.main({"page.md": lambda: "new"}, "") == 1
    (tmp_path / "page.md").write_text("new")
    assert generated.main({"page.md": lambda: "new"}, "") == 0


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
