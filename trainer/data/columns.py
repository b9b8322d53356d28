"""From the columns of a data set to the names under which environments and rewards look for them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from rollout.environments.prompt import PROMPT_COLUMNS
from rollout.errors import DataError


def rename(row: Mapping[str, Any], columns: Mapping[str, str], *, of: str) -> dict[str, Any]:
    """A copy of the row with its columns under the names that they are asked by.

    Args:
        row: as the data set has it.
        columns: new name: column. A column inside of others is a path, `reward_model.ground_truth`; text on the way
            is read as JSON. Columns that are not mentioned stay; the old name of one that is goes.
        of: the data set, for errors.

    Raises:
        DataError: there is no such column; those that are there are named.
    """
    found = {name: _find(row, path, name, of) for name, path in columns.items()}
    kept = {name: value for name, value in row.items() if name not in columns.values()}
    if any(name in columns for name in PROMPT_COLUMNS):
        # An environment takes the first of several prompts, which must be the one that was asked for.
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
