"""Rows from files, the hub and reasoning-gym, with their columns renamed to what environments and rewards read.

`load_rows` reads everything. `read_first_row` reads one row of a local file without the `datasets` library, so that a
wrong column is found before anything heavy is imported.
"""

from __future__ import annotations

import csv
import difflib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lockstep.rewards.functions.reasoning_gym import PREFIX
from lockstep.rollout.environments.prompt import PROMPT_COLUMNS
from lockstep.rollout.errors import DataError
from lockstep.rollout.safe_text import error_text
from lockstep.trainer.config.groups.data_settings import SAVED_ROLLOUTS
from lockstep.trainer.data.gym_rows import gym_rows
from lockstep.trainer.data.seeds import SEEDS, seeds

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Loader of `datasets` by the suffix of a local file."""


UNREADABLE = (OSError, ValueError, TypeError, OverflowError, KeyError, NotImplementedError, RecursionError, csv.Error)
"""Errors of readers for damaged files, and for values that Python cannot hold; pytz's for a zone is a `KeyError`."""


def is_file(path: str) -> bool:
    """True if a path names a file; anything else is made (`is_made`), saved rollouts, or the id of a data set on the
    hub."""
    return Path(path).suffix in FILE_FORMATS and not path.startswith(SAVED_ROLLOUTS)


def is_made(path: str) -> bool:
    """True if a path names rows that are made when they are loaded: a task of reasoning-gym, or seeds."""
    return path.startswith((PREFIX, SEEDS))


def rollout_files(path: str) -> list[Path]:
    """Return the files of `rollouts:<path>` in the order of their names. Raises `DataError` if there are none."""
    place = Path(path.removeprefix(SAVED_ROLLOUTS)).expanduser()
    if place.is_file():
        return [place]
    folder = place / "rollouts" if (place / "rollouts").is_dir() else place
    if files := sorted(folder.glob("*.jsonl")):
        return files
    raise DataError(
        f"{path} has no saved rollouts (looked for .jsonl files in {folder.absolute()}); expected the directory of a "
        "run with logger.save_rollouts=true, or the .jsonl file that scripts/evaluate.py eval.output=<name>.json writes"
    )


def load_rows(path: str, split: str, subset: str | None = None, parameters: Mapping[str, Any] | None = None) -> Any:
    """Load a `datasets.Dataset` from a local file (JSONL, JSON, CSV, parquet), a task of reasoning-gym or a hub id.

    `seeds:<count>` are rows with nothing but a seed. split: not for files. subset: for the hub. parameters: of the
    task. Raises `DataError` if the data cannot be loaded or is empty, `ConfigError` for rows that cannot be made.
    """
    if path.startswith(PREFIX):
        return gym_rows(path, split, parameters or {})
    import datasets
    from datasets.exceptions import DatasetGenerationError

    if path.startswith(SEEDS):
        return datasets.Dataset.from_dict({"seed": seeds(path, split)})

    datasets.disable_progress_bars()
    local = Path(path).expanduser()
    if local.suffix == ".jsonl":
        _check_lines(local)
    try:
        if local.suffix == ".csv":
            deque(_csv_rows(local), maxlen=0)  # checks every row
        if is_file(path):
            rows = datasets.load_dataset(
                FILE_FORMATS[local.suffix], data_files=str(local), split="train", keep_in_memory=False
            )
        else:
            rows = datasets.load_dataset(path, subset, split=split)
    except (*UNREADABLE, DatasetGenerationError) as error:
        raise DataError(f"data set {path} cannot be loaded: {reason(error.__cause__ or error)}") from error
    if len(rows) == 0:
        raise _no_rows(path)
    return rows


def read_first_row(path: str) -> Mapping[str, Any]:
    """Read the first row of a local file. Raises `DataError` if the file is empty or not of its suffix's format."""
    local = Path(path).expanduser()
    read = {".jsonl": _first_line, ".json": _first_of_json, ".csv": _first_of_csv, ".parquet": _first_of_parquet}
    try:
        row = read[local.suffix](local)
    except UNREADABLE as error:
        raise DataError(f"data set {path} cannot be loaded: {reason(error)}") from error
    if row is None:
        raise _no_rows(path)
    if not isinstance(row, dict):
        raise DataError(f"data set {path}: the first row is a {type(row).__name__}; expected a JSON object per row")
    return row


def _first_line(path: Path) -> Any:
    with path.open(encoding="utf-8") as file:
        return next((json.loads(line) for line in file if line.strip()), None)


def _first_of_json(path: Path) -> Any:
    """Read a list of objects, one object per line, or a single object."""
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        return _first_line(path)
    if isinstance(content, list):
        return content[0] if content else None
    return content


def _first_of_csv(path: Path) -> Any:
    return next(_csv_rows(path), None)


def _csv_rows(path: Path) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a CSV file. Raises `DataError` with the line number of a row with more fields than the header:
    pandas takes its first ones for an index, and moves the others to wrong columns."""
    csv.field_size_limit(2**31 - 1)  # of this process; the default is less than a long prompt
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        header = next((row for row in rows if row), [])
        if twice := next((name for name in header if header.count(name) > 1), None):
            raise DataError(f"data set {path}: the header has {twice} twice; rename one of the columns")
        for row in rows:
            if len(row) > len(header):
                raise DataError(
                    f"data set {path}:{rows.line_num} has {len(row)} fields, the header has {len(header)}; put texts "
                    "with commas in quotes, or name every column"
                )
            if row:
                yield dict(zip_longest(header, row))


def _first_of_parquet(path: Path) -> Any:
    from pyarrow import parquet  # here: most runs have no parquet file

    for batch in parquet.ParquetFile(path).iter_batches(batch_size=1):
        return batch.to_pylist()[0]
    return None


def _check_lines(path: Path) -> None:
    """Raise `DataError` with the line number of a non-object: Arrow's reader crashes the process on some."""
    try:
        number, is_empty = 0, True
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and not isinstance(json.loads(line), dict):
                    raise DataError(f"data set {path}:{number} is not a JSON object; expected one per line")
                is_empty = is_empty and not line.strip()
        if is_empty:
            raise _no_rows(str(path))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        where = f":{number}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"data set {path}{where} cannot be loaded: {str(error).splitlines()[0]}") from error


def reason(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no text."""
    return next(iter(error_text(error).splitlines()), type(error).__name__)


def _no_rows(path: str) -> DataError:
    return DataError(f"data set {path} has no rows; set data.path=<file or hub id with at least one row>")


def rename(row: Mapping[str, Any], columns: Mapping[str, str], *, of: str) -> dict[str, Any]:
    """Return a copy of the row with renamed columns. of: name of the data set, for errors.

    `columns` maps new names to columns. A nested column is a path, `reward_model.ground_truth`; text on the way is
    parsed as JSON. Other columns stay; the old names of renamed ones go. Raises `DataError` without such a column, and
    lists those of the row.
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
            value = json_or_text(value)
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


def json_or_text(text: str) -> Any:
    """Return parsed JSON, or the text itself if it is something else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
