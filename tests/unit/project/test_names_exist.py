"""Names of Lockstep's own modules: each `import` of one exists, also inside functions that no test calls here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.fixtures.paths import ROOT

FOLDERS = ("lab", "integrations", "trainer", "rollout", "rewards", "demo", "scripts", "tests", "benchmarks", "examples")
OURS = ("lockstep.", "scripts.", "tests.", "benchmarks.", "examples.")


def sources() -> list[Path]:
    return sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def path_of(module: str) -> Path | None:
    """Return the file of one of our modules, or the folder of a package without one; None if there is neither."""
    parts = module.removeprefix("lockstep.").split(".")
    is_beside = module.startswith("lockstep.") and (ROOT / "lockstep" / f"{parts[0]}.py").is_file()
    stem = ROOT.joinpath(*["lockstep"] * is_beside, *parts)
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py", stem) if path.exists()), None)


@cache
def names(path: Path) -> frozenset[str]:
    """Return the names that a module defines or imports at its top level, in any branch, and the modules below it."""
    if path.is_dir():
        return frozenset(one.stem for one in path.iterdir())
    found = set(names(path.parent)) if path.name == "__init__.py" else set[str]()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            pending.append(node)
    return frozenset(found)


def wanted(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name of every import from our modules, and of every string that `mock.patch` resolves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and f"{node.module}.".startswith(OURS):
            yield from ((node.lineno, str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "patch":
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Constant) and str(target.value).startswith(OURS):
                module, _, name = str(target.value).rpartition(".")
                yield node.lineno, module, name


def missing(source: str, where: str) -> list[str]:
    """Return the imports of one file that do not exist, each with its line."""
    found = []
    for line, module, name in wanted(ast.parse(source)):
        path = path_of(module)
        if path is None or name not in names(path):
            found.append(f"{where}:{line}: {module} has no {name}")
    return found


def test_every_name_that_is_imported_from_our_modules_exists() -> None:
    found = [one for path in sources() for one in missing((ROOT / path).read_text(encoding="utf-8"), str(path))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "from lockstep.scripts.gpu_checks.environment import KERNELS",
        "from lockstep.trainer.no_such_module import anything",
        "mock.patch('lockstep.trainer.engines.start.NoSuchEngine')",
    ],
)
def test_a_missing_name_is_found_inside_a_function(line: str) -> None:
    assert len(missing(f"def check():\n    {line}\n", "worker.py")) == 1
