"""docs/step.md follows `Trainer.step` statement by statement, in its order, and draws the same diagram."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

from lockstep.trainer import step as module
from lockstep.trainer.step import Trainer
from tests.fixtures.paths import ROOT

PAGE = (ROOT / "docs" / "step.md").read_text(encoding="utf-8")
HEAD = "| line of `Trainer.step` | effect | code |\n|---|---|---|\n"


def statements(source: str) -> list[str]:
    """Return the statements of a function's body in their order, each on one line; of blocks, the first line."""
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)

    def text(node: ast.AST) -> str:
        return " ".join((ast.get_source_segment(source, node) or "").split())

    def walk(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            match node:
                case ast.If(test=test, orelse=[]):
                    yield f"if {text(test)}:"
                    yield from walk(node.body)
                case ast.With(items=[ast.withitem(context_expr=context, optional_vars=None)]):
                    yield f"with {text(context)}:"
                    yield from walk(node.body)
                case ast.Assign() | ast.AugAssign() | ast.Expr() | ast.Return():
                    yield text(node)
                case _:
                    raise AssertionError(f"line {node.lineno}: this check does not know {type(node).__name__}")

    has_docstring = ast.get_docstring(function) is not None
    return list(walk(function.body[has_docstring:]))


def quotes(page: str) -> list[str]:
    """Return the code in the first column of the table, in its order."""
    table = page.partition(HEAD)[2].partition("\n\n")[0]
    assert table, "the page has no table of `Trainer.step`"
    cells = [re.split(r"(?<!\\) \| ", line.removeprefix("| "))[0] for line in table.splitlines()]
    parts = [part for cell in cells for part in cell.split("<br>")]
    assert all(re.fullmatch("`[^`]+`", part) for part in parts), "one statement in backticks, then <br>"
    return [part.strip("`") for part in parts]


def differences(quoted: list[str], source: str) -> list[str]:
    """Return where the quotes and the statements part. `...` in a quote stands for anything."""
    found = statements(source)
    pairs = [
        f"the page has {quote!r}, the code {statement!r}"
        for quote, statement in zip(quoted, found, strict=False)
        if not re.fullmatch(".*".join(map(re.escape, quote.split("..."))), statement)
    ]
    missing = [f"the page has no {statement!r}" for statement in found[len(quoted) :]]
    return pairs[:1] + missing + [f"the code has no {quote!r}" for quote in quoted[len(found) :]]


SOURCE = textwrap.dedent(inspect.getsource(Trainer.step))


def test_the_table_has_every_statement_of_the_step_in_its_order() -> None:
    quoted = quotes(PAGE)
    assert differences(quoted, SOURCE) == []
    for faulty in (quoted[1:], quoted[:-1], [*quoted, quoted[-1]]):
        assert differences(faulty, SOURCE) != [], "the check finds what is missing and what is too much"


def test_every_file_and_folder_in_the_table_is_there() -> None:
    table = PAGE.partition(HEAD)[2].partition("\n\n")[0]
    paths = [path for row in table.splitlines() for path in re.findall(r"`([\w/]+(?:\.py|/))`", row.split(" | ")[-1])]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_page_draws_the_diagram_of_the_module() -> None:
    diagram = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert diagram is not None
    docstring = inspect.getdoc(module) or ""
    assert textwrap.indent(diagram[1], "    ").rstrip() in docstring
