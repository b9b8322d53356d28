"""Reader of data: rows with the values that stand in the file, each with its place there.

    JSONL, JSON   values as Python's `json` reads them; a key that a row does not have is absent
    CSV           texts as Python's `csv` reads them; an empty cell is an empty text
    parquet, hub  values of the types of the file; null where a row has no value

Rows hold what JSON can say, so that every process sees the same values. Refused: keys that an object has twice, of
which `json` keeps the last, values that are nested deeper than `MAX_DEPTH`, of which copies fail, and columns of types
that JSON does not have.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.rollout.environments.prompt import IMAGE_COLUMNS, of_unread_column
from lockstep.rollout.errors import DataError
from lockstep.rollout.safe_text import error_text

if TYPE_CHECKING:  # takes a second to import, and the first row of a file is read without it
    import datasets
    import pyarrow

T = TypeVar("T")
Row = dict[str, Any]
Record = tuple[str, Callable[[], T]]
"""Place of a row, and a function that reads it or raises `DataError`."""

MAX_DEPTH = 100
"""Lists and objects inside each other."""
TOO_DEEP = f"it has more than {MAX_DEPTH} lists and objects inside each other"
OTHER_DELIMITERS = ";\t|"
"""Delimiters of tables that are not CSV. Behind commas alone, a whole line would be one text."""
SHOWN_ROWS = 5
"""Refused rows that an error quotes."""
PROGRESS_S = 10.0
"""Time between two reports on rows that are read [s]."""
IMAGE_TYPE = "struct<bytes: binary, path: string>"
"""Type of the images of `datasets`."""
UNREADABLE = (OSError, ValueError, TypeError, OverflowError, KeyError, NotImplementedError, RecursionError)
"""Errors of readers for damaged files, and for values that Python cannot hold; pytz's for a zone is a `KeyError`."""


def reason(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no text."""
    return next(iter(error_text(error).splitlines()), type(error).__name__)


def silent(text: str) -> None:
    """Say nothing."""


def every(records: Iterable[Record[T]], *, of: str, say: Callable[[str], None] = silent) -> Iterator[tuple[str, T]]:
    """Yield each place with what is read there. of: name of the data set. say: told of the progress if it takes long.

    Raises `DataError` after the last row if some cannot be used: how many, and the first ones with their places.
    """
    bad: list[str] = []
    number, last_report = 0, time.monotonic()
    for number, (place, read) in enumerate(records, start=1):
        if time.monotonic() - last_report > PROGRESS_S:
            last_report = time.monotonic()
            say(f"{of}: {number:,} rows read ...")
        try:
            value = read()
        except DataError as error:
            bad.append(f"{place}: {error}" if len(bad) < SHOWN_ROWS else "")
        else:
            yield place, value
    if bad:
        more = [f"and {len(bad) - SHOWN_ROWS:,} more"] if len(bad) > SHOWN_ROWS else []
        head = f"data set {of}: {len(bad):,} of {number:,} rows cannot be used; mend them, or take them out:"
        raise DataError("\n  ".join([head, *bad[:SHOWN_ROWS], *more]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Sequence[Row]):
    """Rows that are made at each access."""

    items: list[bytes] | datasets.Dataset
    """JSON texts, or a table."""
    places: Sequence[int | str]
    """Numbers of the rows in the table, or places of the texts."""

    @classmethod
    def of(cls, source: Rows | datasets.Dataset | Iterable[Row]) -> Rows:
        """Return the rows of a table, or of an iterator of rows."""
        import datasets

        if isinstance(source, Rows):
            return source
        if isinstance(source, datasets.Dataset):
            return cls(items=source, places=range(len(source)))
        return cls.store((f"row {number}", row) for number, row in enumerate(source))

    @classmethod
    def store(cls, rows: Iterable[tuple[str, Row]]) -> Rows:
        """Keep rows with their places, in the memory of their JSON text."""
        items, places = [], []
        for place, row in rows:
            # `surrogatepass` as in json.loads: JSON may have half of a surrogate pair, which UTF-8 does not allow.
            items.append(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass"))
            places.append(place)
        return cls(items=items, places=places)

    @property
    def is_columnar(self) -> bool:
        """True if every row has every key, so that null may stand for a value that the row does not have."""
        return not isinstance(self.items, list)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        """Return one row. Raises `DataError` if Python cannot hold a value of it."""
        try:
            item = self.items[index]
            return json.loads(item) if isinstance(item, bytes) else item
        except UNREADABLE as error:
            raise DataError(f"it cannot be read: {reason(error)}") from error

    def place(self, index: int) -> str:
        """Return where the row is in its data set."""
        return f"row {self.places[index]}" if self.is_columnar else str(self.places[index])

    def records(self) -> Iterator[Record[Row]]:
        """Yield the place of each row, and a function that reads it."""
        return ((self.place(index), partial(self.__getitem__, index)) for index in range(len(self)))

    def select(self, indices: Sequence[int]) -> Rows:
        """Return these rows."""
        items = [self.items[index] for index in indices] if isinstance(self.items, list) else self.items.select(indices)
        return Rows(items=items, places=[self.places[index] for index in indices])

    def only(self, reads: Callable[[str], bool]) -> Rows:
        """Return the rows without other columns of their table, if they have one. reads: True for a name to keep."""
        if isinstance(self.items, list):
            return self
        there = [name for name in self.items.column_names if reads(name)]
        return Rows(items=self.items.select_columns(there), places=self.places)

    def for_rewards(self, *, left_out: Collection[str], of: str, with_images: Collection[str] = ()) -> Rows:
        """Return the rows without the columns of their table that are left out.

        with_images: columns that may hold bytes, which become digests. Raises `DataError` if another one has a type
        that JSON does not have: a reward in another process would get another value.
        """
        rows = self.only(lambda name: name not in left_out)
        for field in () if isinstance(rows.items, list) else rows.items.features.arrow_schema:
            if (kind := _foreign(field.type, with_bytes=field.name in with_images)) is not None:
                if field.name in IMAGE_COLUMNS or IMAGE_TYPE in str(field.type):
                    raise DataError(f"data set {of}: {of_unread_column(field.name)}")
                raise DataError(
                    f"data set {of}: column {field.name} has the type {kind}, which JSON does not have; write it as "
                    f"text or numbers, or leave it out: set 'data.columns={{{field.name}: null}}'"
                )
        return rows


def file_records(path: Path, *, of: str, suffix: str = "", delimiter: str = ",") -> Iterator[Record[Row]]:
    """Yield the rows of a JSONL, JSON or CSV file.

    suffix: of the format; empty: that of the path. delimiter: of CSV. Raises `DataError` where nothing further can be
    read, and OSError.
    """
    formats = {".csv": partial(_cells, of=of, delimiter=delimiter), ".json": partial(_json, of=of), ".jsonl": _lines}
    return formats[suffix or path.suffix.lower()](path)


def _lines(path: Path) -> Iterator[Record[Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"line {number}", partial(_line, line)


def _line(content: bytes) -> Row:
    return json_object(_decoded(content).strip())


def json_object(text: str) -> Row:
    """Return the row that a JSON text holds. Raises `DataError` for another text."""
    return _object(_value(text))


def _json(path: Path, *, of: str) -> Iterator[Record[Row]]:
    """Read a list of objects, one object per line, or a single object."""
    text = _decoded(path.read_bytes(), of=of)
    try:
        content = _value(text)
    except DataError as error:
        if text.lstrip().startswith("["):
            raise DataError(f"data set {of}: {error}") from error
        yield from _lines(path)
        return
    for number, item in enumerate(content if isinstance(content, list) else [content]):
        yield f"row {number}", partial(_object, item)


def _value(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_with_each_key_once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"found no JSON: {error.msg} at {where}character {error.colno}") from error
    except RecursionError:
        raise DataError(TOO_DEEP) from None
    except ValueError as error:  # a number with more digits than Python reads
        raise DataError(f"it cannot be read: {reason(error).partition(';')[0]}") from error


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any] | DataError:
    """Return an object, or in its place the error, which `_object` raises for the row."""
    mapping = dict(pairs)
    if len(mapping) == len(pairs):
        return mapping
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    return DataError(f"an object has the key {twice!r} twice, expected one value: {mapping!r:.80}")


def _object(value: Any) -> Row:
    """Return the value as a row. Raises `DataError` for what no row may hold."""
    level = [value]
    for depth in range(MAX_DEPTH + 1):
        if error := next((item for item in level if isinstance(item, DataError)), None):
            raise error
        inner = [item for item in level if isinstance(item, dict | list)]
        if not inner:
            break
        if depth == MAX_DEPTH:
            raise DataError(TOO_DEEP)
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
    if not isinstance(value, dict):
        raise DataError(f"found {json.dumps(value):.80}, expected a JSON object per row")
    return value


def _cells(path: Path, *, of: str, delimiter: str) -> Iterator[Record[Row]]:
    csv.field_size_limit(2**31 - 1)  # of this process; the default is less than a long prompt
    text = io.StringIO(_decoded(path.read_bytes(), of=of), newline="")
    # Strict, because a missing quote would silently make one cell of all the lines behind it.
    lines = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next((cells for cells in lines if cells), [])
        if twice := next((name for name in header if header.count(name) > 1), None):
            raise DataError(f"data set {of}: the header has {twice} twice; rename one of the columns")
        if delimiter == "," and len(header) == 1 and any(mark in header[0] for mark in OTHER_DELIMITERS):
            raise DataError(
                f"data set {of}: the header has one column, {header[0]!r}; expected columns with commas between them"
            )
        for cells in lines:
            if cells:
                yield f"line {lines.line_num}", partial(_row_of, header, cells)
    except csv.Error as error:
        raise DataError(
            f"data set {of}: line {lines.line_num}: {error}; write quotes inside of quotes twice"
        ) from error


def _row_of(header: Sequence[str], cells: Sequence[str]) -> Row:
    """Return a row; one that ends early has null in the other columns, as in `csv.DictReader`."""
    if len(cells) > len(header):
        raise DataError(
            f"found {len(cells)} fields, the header has {len(header)}; put texts with commas in quotes, or name every "
            "column"
        )
    return dict(zip_longest(header, cells))


def _decoded(content: bytes, *, of: str | None = None) -> str:
    """Return the text of a line, or of the file of the data set `of`."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = "" if of is None else f"data set {of}: line {content.count(10, 0, error.start) + 1}: "
        raise DataError(
            f"{where}found byte {content[error.start]:#04x}, which is not UTF-8; save the file as UTF-8"
        ) from error


def _foreign(kind: pyarrow.DataType, *, with_bytes: bool = False) -> pyarrow.DataType | None:
    """Return the first type within a type that JSON does not have. with_bytes: True allows bytes."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _foreign(kind.value_type, with_bytes=with_bytes)
    if types.is_struct(kind) or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        fields = map(kind.field, range(kind.num_fields))
        inner = (_foreign(field.type, with_bytes=with_bytes) for field in fields)
        return next((part for part in inner if part is not None), None)
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    plain = (types.is_null, types.is_boolean, types.is_integer, types.is_floating, *texts)
    plain += (types.is_binary, types.is_large_binary) if with_bytes else ()
    return None if any(test(kind) for test in plain) else kind
