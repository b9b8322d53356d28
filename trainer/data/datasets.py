"""Rows from files, the hub, reasoning-gym and the program that trains, with their columns renamed to what environments
and rewards read.

`load_rows` reads everything; `read_first_row` reads one row that is at hand, so that a wrong column is found before
anything heavy is imported.
"""

from __future__ import annotations

import difflib
import json
import mimetypes
import os.path
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.rewards.functions import GYM_PREFIX
from lockstep.rollout.environments.prompt import PROMPT_COLUMNS
from lockstep.rollout.errors import DataError, LockstepError
from lockstep.rollout.system.user_functions import is_object, object_named, object_problem
from lockstep.trainer.config.groups.data_settings import SAVED_ROLLOUTS
from lockstep.trainer.config.paths import file_exists
from lockstep.trainer.data.reader import UNREADABLE, Record, Row, Rows, every, file_records, reason, silent
from lockstep.trainer.data.split import SEEDS, seeds

if TYPE_CHECKING:
    import datasets

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of the files that are read."""
HUB_ID = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
HUB_TIMEOUT_S = 10.0
"""Time in which the hub must answer [s]."""
HUB_OPTIONS = {"name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter"}
"""Options of JSON and CSV files on the hub that are followed, or change no value."""
Columns = Mapping[str, str | None]
"""`data.columns`: columns by their new names; null: a column that is left out."""


def is_file(path: str) -> bool:
    """True if a path names a file; anything else is made (`is_made`), saved rollouts, a directory, or the id of a data
    set on the hub."""
    return Path(path).suffix.lower() in SUFFIXES and not path.startswith(SAVED_ROLLOUTS)


def is_made(path: str) -> bool:
    """True if a path names rows that lie nowhere: a task of reasoning-gym, seeds, or rows of this program."""
    return path.startswith((GYM_PREFIX, SEEDS)) or is_object(path)


def is_at_hand(path: str) -> bool:
    """True if the first row can be read at once: of a file that exists, or of rows of this program."""
    return object_problem(path) is None if is_object(path) else is_file(path) and file_exists(path)


def path_problem(path: str) -> str | None:
    """Return the end of a sentence on why a path cannot be read; None if it may be, perhaps from the hub."""
    if is_object(path):
        return object_problem(path)
    if is_made(path) or path.startswith(SAVED_ROLLOUTS) or os.path.isdir(os.path.expanduser(path)):
        return None
    suffix, exists = Path(path).suffix, file_exists(path)
    if is_file(path):
        return None if exists else f"does not exist (looked in {Path.cwd()})"
    if exists or (suffix[1:].isalpha() and ("/" not in path or any(mimetypes.guess_type(path)))):
        return f"has the format {suffix or '(no suffix)'}, which is not read; expected {', '.join(SUFFIXES)}"
    return None if HUB_ID.fullmatch(path) else f"is not a directory (looked in {Path.cwd()}), and not an id of the hub"


def rollout_files(path: str) -> list[Path]:
    """Return the files of `rollouts:<path>` in the order of their names. Raises `DataError` if there are none."""
    place = Path(os.path.expanduser(path.removeprefix(SAVED_ROLLOUTS)))
    if place.is_file():
        return [place]
    folder = place / "rollouts" if (place / "rollouts").is_dir() else place
    if files := sorted(folder.glob("*.jsonl")):
        return files
    raise DataError(
        f"{path} has no saved rollouts (looked for .jsonl files in {folder.absolute()}); expected the directory of a "
        "run with logger.save_rollouts=true, or the .jsonl file that lockstep evaluate eval.output=<name>.json writes"
    )


def load_rows(
    path: str,
    split: str,
    subset: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    *,
    say: Callable[[str], None] = silent,
) -> Rows:
    """Load the rows of a local file (JSONL, JSON, CSV, parquet), a task of reasoning-gym, a directory or a hub id.

    `seeds:<count>` are rows with nothing but a seed. split: not for files. subset: for the hub. parameters: of the
    task. say: told of the progress. Raises `DataError` if the data cannot be loaded, is empty, or has rows that cannot
    be read, `ConfigError` for rows that cannot be made.
    """
    if is_object(path):
        return object_named(path)
    if path.startswith(GYM_PREFIX):
        from lockstep.trainer.data.gym_rows import gym_rows  # other runs do not load it

        return Rows.of(gym_rows(path, split, parameters or {}))
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    local = Path(os.path.expanduser(path))
    try:
        if path.startswith(SEEDS):
            rows = Rows.of(datasets.Dataset.from_dict({"seed": seeds(path, split)}))
        elif not is_file(path):
            rows = _hub_rows(path, subset, split, say)
        elif local.suffix.lower() == ".parquet":
            _refuse_unfit_table(path, local)
            rows = Rows.of(datasets.load_dataset("parquet", data_files=str(local), split="train"))
        else:
            rows = Rows.store(every(file_records(local, of=path), of=path, say=say))
    except LockstepError:
        raise
    except (*UNREADABLE, DatasetGenerationError) as error:
        raise DataError(f"data set {path} cannot be loaded: {reason(error.__cause__ or error)}") from error
    if len(rows) == 0:
        raise _no_rows(path)
    return rows


def read_first_row(path: str) -> Row:
    """Read the first row of a local file, or of rows of this program.

    Raises `DataError` if the file is empty or not of its suffix's format.
    """
    local = Path(os.path.expanduser(path))
    is_whole = local.suffix.lower() == ".parquet" or is_object(path)
    try:
        for place, read in load_rows(path, "train").records() if is_whole else file_records(local, of=path):
            try:
                return read()
            except DataError as error:
                raise DataError(f"data set {path}: {place}: {error}") from error
    except OSError as error:
        raise DataError(f"data set {path} cannot be loaded: {reason(error)}") from error
    raise _no_rows(path)


def _refuse_unfit_table(path: str, local: Path) -> None:
    """Raise `DataError` with the name of a column that `datasets` cannot read, and for a file without rows."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetFile(local) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
    if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
        raise DataError(f"data set {path}: it has column {twice} twice; rename one of them")
    if count == 0:
        raise _no_rows(path)
    for field in schema:
        try:
            datasets.Features.from_arrow_schema(pyarrow.schema([field]))
        except UNREADABLE as error:
            raise DataError(
                f"data set {path}: column {field.name} has the type {field.type}, which cannot be read; write it as "
                "text, or leave it out of the file"
            ) from error


def _no_rows(path: str) -> DataError:
    return DataError(f"data set {path} has no rows; set data.path=<file or hub id with at least one row>")


def _hub_rows(path: str, subset: str | None, split: str, say: Callable[[str], None]) -> Rows:
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    if problem := path_problem(path):
        raise DataError(f"data set {path} {problem}")
    place = Path(os.path.expanduser(path))
    builder = datasets.load_dataset_builder(str(place) if place.is_dir() else _answered_id(path), subset)
    if isinstance(builder.config, CsvConfig | JsonConfig):  # whose builders guess the types
        return Rows.store(every(_hub_records(builder, split, of=path), of=path, say=say))
    builder.download_and_prepare()
    return Rows.of(builder.as_dataset(split=split))  # type: ignore[arg-type]  # one split


def _hub_records(builder: datasets.DatasetBuilder, split: str, *, of: str) -> Iterator[Record[Row]]:
    """Yield the rows of the JSON or CSV files of a split."""
    import datasets

    options, defaults = vars(builder.config), vars(type(builder.config)())
    others = [name for name, value in options.items() if name not in HUB_OPTIONS and value != defaults[name]]
    if others or split not in options["data_files"]:
        raise DataError(
            f"data set {of}: of its JSON or CSV files, whole splits are read, without options; found split={split} and "
            f"{', '.join(others) or 'no options'}, expected split={' or '.join(map(str, options['data_files']))}; set "
            "data.split, or download a file and set data.path=<the file>"
        )
    manager = datasets.DownloadManager(download_config=datasets.DownloadConfig(use_etag=False))
    # All splits, as load_dataset does: a later run may not reach the hub.
    files: Any = manager.download_and_extract(options["data_files"])
    for file in map(Path, manager.iter_files(files[split])):
        suffix = ".csv" if "sep" in options else file.suffix if file.suffix in SUFFIXES else ".json"
        for place, read in file_records(file, of=of, suffix=suffix, delimiter=options.get("sep", ",")):
            yield f"{file.name}, {place}", read


def _answered_id(path: str) -> str:
    """Return the id of a data set if the hub answers, else its place in the cache. Raises `DataError` without it."""
    import datasets.config
    import huggingface_hub

    # The clients of the hub would retry for half a minute before they look into their caches.
    if not datasets.config.HF_HUB_OFFLINE and _answers(huggingface_hub.constants.ENDPOINT):
        return path
    try:
        return huggingface_hub.snapshot_download(path, repo_type="dataset", local_files_only=True)
    except OSError as error:
        raise DataError(
            f"data set {path}: there is no such directory (looked in {Path.cwd()}), the hub cannot be reached (or is "
            "off by HF_HUB_OFFLINE=1), and its cache has no such data set; set data.path=<file>, or type where the hub "
            f"can be reached: hf download --repo-type dataset {path}"
        ) from error


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the clients of the hub may know the certificate
    except OSError:
        return False
    return True


def rename(row: Mapping[str, Any], columns: Columns, *, of: str) -> dict[str, Any]:
    """Return a copy of the row with renamed columns. of: name of the data set, for errors.

    `columns` maps new names to columns. A nested column is a path, `reward_model.ground_truth`; text on the way is
    parsed as JSON. Null leaves the column out. Other columns stay, and a renamed one is there under both names, because
    rewards may read either. Raises `DataError` without such a column, and lists those of the row.
    """
    values = {name: _find(row, path, name, of) for name, path in columns.items() if path is not None}
    others = {name: value for name, value in row.items() if name not in columns}
    if any(name in values for name in PROMPT_COLUMNS):
        # An environment takes the first prompt column it finds, which must be the chosen one.
        others = {name: value for name, value in others.items() if name not in PROMPT_COLUMNS}
    return {**others, **values}


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
                f"data set {of} has no column {path}; the row has {', '.join(row) or 'none'}"
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
