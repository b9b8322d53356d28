"""Imports between modules, read from their source.

Covered: `import` and `from ... import` anywhere in a module, also inside functions and under TYPE_CHECKING.
Not covered: `importlib.import_module`, and the `__init__` modules that Python runs on the way to a module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

Imports = dict[str, set[str]]
"""From the path of each module to the paths of the modules that it imports."""


def read_sources(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Return the source of every module of these folders by its path below `root`; empty ones are left out."""
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.py")) if file.stat().st_size]
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}


def imported_names(source: str) -> set[str]:
    """Return the dotted names in all import statements; `from a import b` gives `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}; name the module from its package on"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_of(name: str, paths: Iterable[str]) -> str | None:
    """Return which of these modules a dotted name is, or is a name in; None if it is of none."""
    name = name.removeprefix("lockstep.")
    stems = [part.replace(".", "/") for part in (name, name.rpartition(".")[0])]  # the second: of a name in it
    return next((path for stem in stems for path in (f"{stem}.py", f"{stem}/__init__.py") if path in paths), None)


def read_imports(sources: Mapping[str, str]) -> Imports:
    """Return the imports between these modules. sources: as `read_sources` returns them."""
    return {
        path: {module for name in imported_names(source) if (module := module_of(name, sources))} - {path}
        for path, source in sources.items()
    }
