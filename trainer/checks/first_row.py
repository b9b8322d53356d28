"""Whether the first row of each local data set has what environment and rewards read, before anything heavy starts.

Environments and rewards of the user's own files, and rows of the hub, are not known here; they are seen when they are
used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rewards.functions.built_in import FUNCTIONS
from rollout.environments.prompt import PROMPT_COLUMNS, PromptReader
from rollout.errors import DataError
from trainer.config.schema import Config, DataSetConfig
from trainer.data.datasets import is_file, read_first_row, rename

READ_A_PROMPT = ("single_turn", "reverse", "tools", "user", "calculator", "chain", "subagents")
"""Environments that begin with the row's prompt, whatever their settings are."""


def problems(config: Config, data_sets: Iterable[DataSetConfig]) -> Iterator[str]:
    """One sentence per thing that the first row of one of these data sets lacks."""
    seen: set[tuple[str, str]] = set()
    for data_set in data_sets:
        place = (data_set.path, str(data_set.columns))
        if not is_file(data_set.path) or not Path(data_set.path).expanduser().is_file() or place in seen:
            continue  # a missing file is reported by name
        seen.add(place)
        # Whoever sets data.path alone still has the demo's held-out data, without having asked for any.
        is_heldout = data_set.path == config.data.heldout_path
        also = "; or set data.heldout_path=null for no held-out data" if is_heldout else ""
        try:
            row = rename(read_first_row(data_set.path), data_set.columns or {}, of=data_set.path)
            for problem in _row_problems(row, data_set, config):
                yield problem + also
        except DataError as error:
            yield f"{error}{also}"


def _row_problems(row: Mapping[str, Any], data_set: DataSetConfig, config: Config) -> Iterator[str]:
    columns = ", ".join(row) or "none"
    name = data_set.environment or config.environment.name
    column = config.environment.settings.get("prompt_column")
    wanted = PROMPT_COLUMNS if column is None else (column,)
    if name in READ_A_PROMPT and data_set.environment is None:
        if all(row.get(name) is None for name in wanted):
            example = next((name for name, value in row.items() if isinstance(value, str | list)), "<column>")
            yield (
                f"data set {data_set.path}: the first row has no {' or '.join(wanted)}; it has {columns}; "
                f"set 'data.columns={{prompt: {example}}}' with the column that holds the prompt"
            )
        else:
            PromptReader(column=column).messages(row)
    for function in config.reward.functions:
        column = _reference_column(function, config.reward.settings.get(function) or {})
        if column is not None and row.get(column) is None:
            other = f", or reward.settings.{function}.column=<column>" if _has_column(function) else ""
            yield (
                f"data set {data_set.path}: the reward {function} needs column {column!r}, the first row has "
                f"{columns}; set 'data.columns={{{column}: <column>}}'{other}"
            )


def _reference_column(function: str, settings: Mapping[str, Any]) -> str | None:
    """Column of the row that a built-in reward reads; None: it reads none, or it is the user's own."""
    if function == "demo_answer":
        return "answer"
    if function not in FUNCTIONS or not _has_column(function):
        return None
    return settings.get("column", inspect.signature(FUNCTIONS[function]).parameters["column"].default)


def _has_column(function: str) -> bool:
    """Whether a built-in can be told by a setting which column it reads."""
    return "column" in inspect.signature(FUNCTIONS[function]).parameters
