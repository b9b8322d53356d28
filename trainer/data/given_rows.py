"""Rows that a program gives: a table of `datasets`, a list, an iterator, or a function that returns one.

They are kept as `Rows`, under a name with the hash of their content, so that a resumed run notices other rows.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from lockstep.rollout.errors import DataError
from lockstep.trainer.data.reader import UNREADABLE, Record, Row, Rows, every, json_object, reason, silent

if TYPE_CHECKING:
    import datasets

HASHED_ROWS = 10_000
"""Rows of a table that are hashed at a time."""


def given_rows(value: Any, *, of: str, say: Callable[[str], None] = silent) -> tuple[str, Rows]:
    """Return the name of given rows, and the rows.

    of: name in errors, and beginning of the name. say: told of the progress. An iterator is read to its end. Raises
    `DataError` for rows that no file could hold, for none, and for something else.
    """
    digest = hashlib.sha256()
    tables: Any = sys.modules.get("datasets")  # who has such a value has imported it
    if tables is not None and isinstance(value, tables.Dataset):
        rows = Rows.of(value)
        _hash_table(value, digest)
    elif tables is not None and isinstance(value, tables.DatasetDict | tables.IterableDatasetDict):
        splits = ", ".join(map(str, value))
        first = next(iter(value))
        raise DataError(f"{of}: found a dictionary of the splits {splits}, expected one of them; pass <it>[{first!r}]")
    else:
        rows = Rows.store(every(_records(_iterable(value, of)), of=of, say=say))
        assert isinstance(rows.items, list)
        for item in rows.items:
            digest.update(len(item).to_bytes(8))
            digest.update(item)
    if not len(rows):
        raise DataError(f"{of}: found no rows, expected at least one")
    return f"{of}-{digest.hexdigest()[:8]}", rows


def _iterable(value: Any, of: str) -> Iterable[Any]:
    if callable(value) and not isinstance(value, type):
        value = value()
    if hasattr(value, "to_dict") and hasattr(value, "iterrows"):
        raise DataError(f"{of}: found a table of pandas; pass datasets.Dataset.from_pandas(<it>)")
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise DataError(
            f"{of}: found {type(value).__name__}, expected a path, a datasets.Dataset, a list of dictionaries, or a "
            "function that yields them"
        )
    return value


def _records(values: Iterable[Any]) -> Iterator[Record[Row]]:
    return ((f"row {number}", partial(_row, value)) for number, value in enumerate(values))


def _row(value: Any) -> Row:
    """Return the row as a file would hold it. Raises `DataError` for what JSON does not have."""
    try:
        text = json.dumps(_checked(value), default=_plain)
    except UNREADABLE as error:
        raise DataError(f"{reason(error)}; convert it to numbers, texts or lists") from error
    return json_object(text)


def _plain(value: Any) -> Any:
    """Return a scalar or an array of NumPy or torch as numbers, an image or bytes as an image of `datasets`.

    Raises TypeError for what JSON does not have.
    """
    if isinstance(value, numpy.generic | numpy.ndarray) and value.dtype.kind in "biufU":
        return value.tolist()
    pictures: Any = sys.modules.get("PIL.Image")  # who has such a value has imported it
    if isinstance(value, bytes) or (pictures is not None and isinstance(value, pictures.Image)):
        from lockstep.trainer.data.row_images import image_of_json  # other rows do not load it

        image: Any = value
        return image_of_json(image)
    raise TypeError(f"found a value of type {type(value).__name__}, which JSON does not have")


def _checked(value: Any) -> Any:
    """Return the value. Raises TypeError for a key that JSON would turn into a text."""
    level = [value]
    while level:
        for key in (key for item in level if isinstance(item, dict) for key in item):
            if not isinstance(key, str):
                raise TypeError(f"found the key {key!r} of type {type(key).__name__}, which JSON does not have")
        children = [child for item in level if isinstance(item, dict) for child in item.values()]
        level = children + [child for item in level if isinstance(item, list | tuple) for child in item]
    return value


def _hash_table(table: datasets.Dataset, digest: Any) -> None:
    """Hash the content of a table, whatever its chunks, its cache and its indices are."""
    import pyarrow

    class Sink:
        closed = False

        def write(self, data: Any) -> int:
            digest.update(data)
            return len(data)

        def flush(self) -> None: ...

    batches: Any = table.with_format("arrow").iter(HASHED_ROWS)
    schema = table.features.arrow_schema
    with pyarrow.ipc.new_stream(Sink(), schema) as stream:
        for batch in batches:
            whole = batch.combine_chunks()  # pyarrow 26 cannot cast deep objects of nulls, not even to their own type
            stream.write_table(whole if whole.schema.equals(schema) else whole.cast(schema))
