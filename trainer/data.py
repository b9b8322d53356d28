"""Prompts: a data set in an order that is a function of the seed and a cursor, nothing else.

Row number k of the run is `permutation(seed, k // n)[k % n]`, so a resumed run continues exactly where it stopped,
skips nothing and repeats nothing, on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollout.errors import DataError

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}

Row = Mapping[str, Any]


def load_rows(path: str, split: str) -> Any:
    """A `datasets.Dataset` from a local file (JSONL, JSON, CSV, parquet) or a hub id.

    Raises `DataError` if it cannot be loaded or is empty.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    suffix = Path(path).suffix
    if suffix == ".jsonl":
        _check_lines(Path(path).expanduser())
    try:
        if suffix in FILE_FORMATS:
            rows = datasets.load_dataset(
                FILE_FORMATS[suffix], data_files=str(Path(path).expanduser()), split="train", keep_in_memory=False
            )
        else:
            rows = datasets.load_dataset(path, split=split)
    except (OSError, ValueError, DatasetGenerationError) as error:
        cause = error.__cause__ or error
        raise DataError(f"data set {path} cannot be loaded: {str(cause).splitlines()[0]}") from error
    if len(rows) == 0:
        raise DataError(f"data set {path} has no rows; set data.path=<file or hub id with at least one row>")
    return rows


def _check_lines(path: Path) -> None:
    """Raise `DataError` with its number for a line that is not an object: Arrow's reader ends the process on some."""
    try:
        number, is_empty = 0, True
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and not isinstance(json.loads(line), dict):
                    raise DataError(f"data set {path}:{number} is not a JSON object; expected one per line")
                is_empty = is_empty and not line.strip()
        if is_empty:
            raise DataError(f"data set {path} has no rows; set data.path=<file or hub id with at least one row>")
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        where = f":{number}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"data set {path}{where} cannot be loaded: {str(error).splitlines()[0]}") from error


class Prompts:
    """Data rows in training order. `cursor` is all of its state."""

    def __init__(self, rows: Any, *, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = np.arange(len(rows))
        self.cursor = 0
        """Rows taken since the start of the run."""

    @property
    def epoch(self) -> float:
        return self.cursor / len(self._rows)

    def take(self, count: int) -> list[Row]:
        """The next `count` rows; goes on into the next epoch where one ends."""
        taken = [self._row(k) for k in range(self.cursor, self.cursor + count)]
        self.cursor += count
        return taken

    def _row(self, k: int) -> Row:
        epoch, place = divmod(k, len(self._rows))
        if self._shuffle and epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
            self._epoch = epoch
        return self._rows[int(self._order[place])]

    def __iter__(self) -> Iterator[Row]:
        """All rows once, in file order (evaluation)."""
        return iter(self._rows)
