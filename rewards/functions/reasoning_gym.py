"""Reward of the tasks of reasoning-gym (github.com/open-thought/reasoning-gym): the score of the task's own scorer.

Rows of `data.path=reasoning_gym:<task>` carry the entry that the scorer reads, in column `reasoning_gym`.

Some scorers evaluate the answer as Python, by `eval` or sympy's parser (`EVALUATES`). The answer is a model's: one that
could call a function or reach into an object is scored as an unreadable answer, and never evaluated. An answer on which
the scorer fails gets 0.

Not covered: `composite`; `data.sources` mixes tasks.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from typing import Any

from lockstep.rewards.functions import GYM_COLUMN, GYM_PREFIX
from lockstep.rewards.functions.answers import reference
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout
from lockstep.rollout.safe_text import error_text

RESERVED = ("seed", "size")
"""Parameters that every task has."""
UNREADABLE_ANSWER = "?"
EVALUATES = frozenset(
    {
        *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"),
        *("simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"),
    }
)
"""Tasks whose scorer evaluates the answer."""
_FUNCTIONS = frozenset(
    {
        *("exp", "log", "ln", "sqrt", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "erf", "erfi", "Ei", "Si", "Ci", "Integral", "Abs", "abs", "Rational", "Integer"),
    }
)
"""Functions that an answer to such a task may call."""
_CALLS_NOTHING = re.compile(r"(?:[^(.{]|\.(?!\s*[^\W\d]))*")
"""Text without parentheses, attributes and format strings."""


def reasoning_gym(rollout: Rollout, *, tag: str = "answer") -> float:
    """Return the score of the answer by the scorer of the row's task, usually between 0 and 1.

    tag: the text in the last `<tag>...</tag>` of the last turn is the answer; without such a tag, the whole turn is.
    Raises `ConfigError` without reasoning-gym, `DataError` for a row of other data.
    """
    record = json.loads(reference(rollout, GYM_COLUMN))
    text = rollout.answer
    matches = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    answer = matches[-1].strip() if matches else text
    if record["task"] in EVALUATES and not is_harmless(answer):
        answer = UNREADABLE_ANSWER
    data = _scorer(record["task"], json.dumps(record["parameters"], sort_keys=True))
    entry = read_entry(record)
    try:
        return float(data.score_answer(answer, entry))
    except MemoryError:
        raise
    except Exception:  # some scorers do not expect every text; one that fails on the reference as well is broken
        if entry["answer"] is not None:
            data.score_answer(str(entry["answer"]), read_entry(record))
        return 0.0


def make_task(task: str, parameters: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    """Return the data set of a task, whose entry k depends on seed and k.

    Raises `ConfigError`: reasoning-gym is missing, or it has no such task or parameter, or refuses a value.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            "the package reasoning-gym is missing, which makes the tasks; run: pip install 'lockstep-rl[reasoning-gym]'"
        )
    from reasoning_gym.factory import DATASETS, create_dataset

    names = sorted(DATASETS.keys() - {"composite"})
    if task not in names:
        raise ConfigError(
            f"{GYM_PREFIX}{task}: reasoning-gym has no such task{_closest(task, names)}; its tasks are "
            f"{', '.join(names)}"
        )
    fields = {field.name: field for field in dataclasses.fields(DATASETS[task][1]) if field.name not in RESERVED}
    for name, value in parameters.items():
        if name not in fields:
            raise ConfigError(
                f"{GYM_PREFIX}{task} has no parameter {name}{_closest(name, list(fields))}; it has "
                f"{', '.join([*fields, *RESERVED])}"
            )
        if not _fits(value, fields[name].type):
            raise ConfigError(
                f"{GYM_PREFIX}{task}: {name}={value!r} must be {fields[name].type}; set data.parameters.{name}"
            )
    try:
        return create_dataset(task, seed=seed, size=size, **parameters)
    except Exception as error:  # each task checks its parameters in its own way
        raise ConfigError(
            f"{GYM_PREFIX}{task} refuses data.parameters={dict(parameters)}: "
            f"{error_text(error) or type(error).__name__}"
        ) from error


def write_entry(entry: Mapping[str, Any], task: str, parameters: Mapping[str, Any]) -> str:
    """Return the column of a row: JSON with the task, its parameters, and the entry.

    Scorers tell tuples from lists and numbers from texts as keys, so the entry is a Python literal, or JSON where it
    holds objects that have no literal.
    """
    text = repr(dict(entry))
    try:
        content = {"literal": text} if ast.literal_eval(text) == entry else {"entry": entry}
    except (ValueError, SyntaxError):
        content = {"entry": entry}
    return json.dumps({"task": task, "parameters": dict(parameters), **content})


def read_entry(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a column, parsed from JSON."""
    return ast.literal_eval(held["literal"]) if "literal" in held else held["entry"]


def is_harmless(answer: str) -> bool:
    """Return True if evaluating the answer can call nothing but functions of mathematics, and reads no attribute."""
    if _CALLS_NOTHING.fullmatch(answer):
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(
        not isinstance(node, ast.Attribute | ast.Lambda | ast.comprehension | ast.JoinedStr | ast.NamedExpr)
        and (not isinstance(node, ast.Call) or (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS))
        and not (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and not _CALLS_NOTHING.fullmatch(node.value)
        )
        for node in ast.walk(tree)
    )


@functools.lru_cache(maxsize=64)
def _scorer(task: str, parameters: str) -> Any:
    return make_task(task, json.loads(parameters))


def _closest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _fits(value: Any, annotation: Any) -> bool:
    """Return False for a value of the wrong type; annotations other than plain types are left to the task."""
    plain = {int: int, float: int | float, str: str, bool: bool}.get(annotation)
    if plain is None:
        return True
    return isinstance(value, plain) and (annotation is bool or not isinstance(value, bool))
