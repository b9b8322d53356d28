"""Columns in the first row of local data sets that environment and rewards read.

Not covered: environments and rewards of user files, and data of the hub.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.rewards.functions.built_in import FUNCTIONS
from lockstep.rewards.functions.reasoning_gym import COLUMN
from lockstep.rollout.environments.prompt import PROMPT_COLUMNS, PromptReader
from lockstep.rollout.errors import DataError
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.paths import file_exists
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.datasets import is_file, read_first_row, rename

READ_A_PROMPT = ("single_turn", "reverse", "tools", "sandbox", "search", "user", "calculator", "chain", "subagents")
"""Environments that begin with the row's prompt for all of their settings."""


def first_row_problems(config: Config, *, trains: bool) -> Iterator[str]:
    """Yield one sentence per column missing in the first row of a data set. trains: True to check training data."""
    trained = config.data.training_sets().values() if trains else ()
    seen: set[tuple[str, str]] = set()
    for data_set in (*trained, *config.heldout_sets().values()):
        place = (data_set.path, str(data_set.columns))
        if not is_file(data_set.path) or not file_exists(data_set.path) or place in seen:
            continue  # `data_file_problems` reports a missing file
        seen.add(place)
        # With data.path alone, the held-out data is still that of the demo.
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
    """Return the column that a built-in reward reads; None for other rewards."""
    if function in ("demo_answer", COLUMN):
        return "answer" if function == "demo_answer" else COLUMN
    if function not in FUNCTIONS or not _has_column(function):
        return None
    return settings.get("column", inspect.signature(FUNCTIONS[function]).parameters["column"].default)


def _has_column(function: str) -> bool:
    """Return True if the built-in has a setting for the column that it reads."""
    return "column" in inspect.signature(FUNCTIONS[function]).parameters
