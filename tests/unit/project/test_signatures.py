"""No function of the library has more than ten arguments. Dataclasses are records, not functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.fixtures.paths import ROOT

FOLDERS = ("trainer", "rollout", "rewards", "lab", "demo", "integrations")
MOST = 10


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
