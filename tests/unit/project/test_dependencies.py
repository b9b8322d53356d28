"""Imports of other packages, against the dependencies that pyproject.toml declares."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.fixtures.paths import ROOT

LIBRARY = ("lab", "integrations", "trainer", "rollout", "rewards", "demo")
OURS = {"lockstep", "scripts", "benchmarks", "examples", "tests", "harness", "gradients"}
"""Packages of this repository; the last two are beside the programs that import them."""
NOT_DECLARED = {
    "IPython",  # a kernel has it
    "bitsandbytes",  # optimizer.name=adamw_8bit names the command that installs it
    "referencing",  # the registry of jsonschema's own interface
    "triton",  # a part of the CUDA builds of torch
    *("openenv", "fastmcp", "uvicorn"),  # of the server that tests of environment=openenv start in another interpreter
    # Agents that benchmarks and tests train in an interpreter of their own (`make environments`).
    *("agents", "langchain_openai", "langgraph", "pydantic_ai", "smolagents"),
    "sky",  # a check of launch files, which is skipped without it: many packages for one schema
}
FOR_USERS = (
    "cpu", "cuda", "plot", "math", "mcp", "verifiers", "reasoning-gym", "lm-eval", "real", "tensorboard", "mlflow",
    "trackio", "swanlab", "textarena", "gymnasium",
)  # fmt: skip


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the first part of the name of each imported module, anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]


def undeclared(files: Iterable[Path], *extras: str) -> dict[str, list[str]]:
    """Return the imported modules whose package is in neither the dependencies nor these extras, with their files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for name in extras for text in project["optional-dependencies"][name])]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    packages = packages_distributions()
    found: dict[str, list[str]] = {}
    for file in files:
        for module in set(imports(ast.parse(file.read_text()))) - sys.stdlib_module_names - OURS - NOT_DECLARED:
            names = {canonicalize_name(name) for name in packages.get(module, [module])}
            if not names & declared:
                found.setdefault(module, []).append(str(file))
    return found


def python_files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def test_the_library_imports_only_declared_packages() -> None:
    """A package that another dependency brings may be absent from its next version."""
    assert undeclared(python_files(*LIBRARY), *FOR_USERS) == {}


@pytest.mark.parametrize("folder", ["scripts", "benchmarks", "examples", "tests"])
def test_commands_and_tests_import_only_declared_packages(folder: str) -> None:
    assert undeclared(python_files(folder), *FOR_USERS, "test") == {}
