"""What built-in rewards read of a rollout: its answer, and the data row's reference."""

from __future__ import annotations

from typing import Any

from rollout.errors import DataError
from rollout.records import Rollout


def final_answer(rollout: Rollout) -> str:
    """Content of the last assistant turn, without surrounding space; empty if there is none."""
    for message in reversed(rollout.messages):
        if message["role"] == "assistant":
            return str(message.get("content") or "").strip()
    return ""


def reference(rollout: Rollout, column: str) -> Any:
    """The value of a column of the data row. Raises `DataError` if the row has none."""
    value = rollout.example.get(column)
    if value is None:
        columns = ", ".join(rollout.example) or "none"
        raise DataError(f"the reward needs column {column!r} of the data row, found {columns}")
    return value


def expected(rollout: Rollout, column: str) -> str:
    """The data row's reference answer as text. Raises `DataError` if the row has none."""
    return str(reference(rollout, column)).strip()
