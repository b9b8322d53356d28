"""Renaming of data set columns to the names that environments and rewards read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from rollout.environments.prompt import PROMPT_COLUMNS
from rollout.errors import DataError


def rename(row: Mapping[str, Any], columns: Mapping[str, str], *, of: str) -> dict[str, Any]:
    """Return a copy of the row with renamed columns.

    Args:
        row: as in the data set.
        columns: maps new names to columns. A nested column is a path, `reward_model.ground_truth`; text on the way is
            parsed as JSON. Other columns stay; the old names of renamed ones go.
        of: name of the data set, for errors.

    Raises:
        DataError: no such column; the message lists those of the row.
    """
    found = {name: _find(row, path, name, of) for name, path in columns.items()}
    kept = {name: value for name, value in row.items() if name not in columns.values()}
    if any(name in columns for name in PROMPT_COLUMNS):
        # An environment takes the first prompt column it finds, which must be the chosen one.
        kept = {name: value for name, value in kept.items() if name not in PROMPT_COLUMNS}
    return {**kept, **found}


def _find(row: Mapping[str, Any], path: str, name: str, of: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, str):
            value = _json(value)
        if not isinstance(value, Mapping) or part not in value:
            there = list(value) if isinstance(value, Mapping) else []
            close = difflib.get_close_matches(part, there, n=1)
            hint = close[0] if close else "<one of these>"
            raise DataError(
                f"data set {of} has no column {path}; its first row has {', '.join(row) or 'none'}"
                + (f" (and {path.rpartition('.')[0]} has {', '.join(there)})" if value is not row and there else "")
                + f"; set 'data.columns={{{name}: {path.replace(part, hint)}}}'"
            )
        value = value[part]
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
