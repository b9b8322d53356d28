"""Access to the final answer of a rollout and to the reference of its data row."""

from __future__ import annotations

from typing import Any

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout

ANSWER_COLUMNS = ("answer", "solution", "completion", "response", "target", "ground_truth", "chosen")
"""Usual names of the column with the reference, the first one that a row fills."""


def reference(rollout: Rollout, column: str) -> Any:
    """Return the value of a column of the data row. Raises `DataError` if it is missing or null."""
    value = rollout.example.get(column)
    if value is None:
        columns = ", ".join(rollout.example) or "none"
        raise DataError(f"the reward needs column {column!r} of the data row, found {columns}")
    return value


def expected(rollout: Rollout, column: str) -> str:
    """Return the reference answer of the data row as text. Raises `DataError` if it is missing, null or empty."""
    text = str(reference(rollout, column)).strip()
    if not text:
        raise DataError(f"the reward needs a text in column {column!r} of the data row, found an empty one")
    return text
