"""No function of the library has more than ten arguments, and few take all settings. Dataclasses are records."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.fixtures.paths import ROOT

FOLDERS = ("trainer", "rollout", "rewards", "lab", "demo", "integrations")
MOST = 10
MOST_CONFIGS = 58
"""Parameters and fields that are the whole `Config`; others take a section, or the values that they use."""


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions, methods and constructors that are written out. A dataclass writes none: it is a record."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def named_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the arguments that have a name of their own, without `self` and `cls`."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(one.arg not in ("self", "cls") for one in every)


def long_signatures(source: str) -> list[str]:
    return [one.name for one in functions(source) if named_arguments(one) > MOST]


def configs(source: str) -> int:
    """Count the parameters and fields that are annotated as `Config`."""
    nodes = list(ast.walk(ast.parse(source)))
    fields = [
        one for node in nodes if isinstance(node, ast.ClassDef) for one in node.body if isinstance(one, ast.AnnAssign)
    ]
    annotated = [*(node for node in nodes if isinstance(node, ast.arg)), *fields]
    return sum(
        isinstance(name, ast.Name) and name.id == "Config"
        for one in annotated
        if one.annotation is not None
        for name in ast.walk(one.annotation)
    )


def test_no_function_takes_more_than_ten_arguments() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 300, "the folders of the library were found"
    long = {str(path.relative_to(ROOT)): names for path in paths if (names := long_signatures(path.read_text()))}
    assert long == {}, "move arguments that belong together into a record"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(a, b, c, d, e, f, g, h, i, j): ...", []),
        ("def f(a, b, c, d, e, f, g, h, i, j, *args, **kwargs): ...", []),
        ("def f(a, /, b, c, d, e, f, *, g, h, i, j, k): ...", ["f"]),
        ("async def f(a, b, c, d, e, f, g, h, i, j, k): ...", ["f"]),
        ("class C:\n    def __init__(self, a, b, c, d, e, f, g, h, i, j): ...", []),
        ("class C:\n    def __init__(self, a, b, c, d, e, f, g, h, i, j, k=1): ...", ["__init__"]),
        ("@dataclass\nclass C:\n" + "".join(f"    field_{number}: int\n" for number in range(11)), []),
    ],
)
def test_arguments_are_counted_by_name(source: str, names: list[str]) -> None:
    assert long_signatures(source) == names


def test_few_functions_and_records_take_all_settings() -> None:
    paths = [path for folder in (*FOLDERS, "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): count for path in paths if (count := configs(path.read_text()))}
    assert sum(found.values()) <= MOST_CONFIGS, "take the sections or values of the settings that are used"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f(config: Config, *, other: Config | None = None, model: ModelConfig): ...", 2),
        ("class C:\n    config: Config\n    made: Callable[[Config], None]\n    def f(self, one: 'int'): ...", 2),
        ("config: Config = Config()\ndef f(config) -> Config: ...", 0),
    ],
)
def test_settings_are_counted_by_annotation(source: str, count: int) -> None:
    assert configs(source) == count
