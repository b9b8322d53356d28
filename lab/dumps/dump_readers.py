"""Readers of dumps, one for each trainer that writes token ids with both logprobs; the content says which one it is.

| written by | where | by |
|---|---|---|
| anyone | a JSON line for each row: `ids`, `prompt_length`, `sampling_logprobs`, `training_logprobs` | yourself |
| prime-rl | `token_exports/step_N/rank_R.jsonl` | `enable_token_export = true` |
| NeMo RL | `train_data_stepN.jsonl` | its logger |
| slime | `train_data/N.pt` | `--dump-details` |

TRL, verl and OpenRLHF write texts, from which no logprob can be told: docs/kl.md has the lines that write ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.lab.dumps.dump_rows import SAMPLING, TRAINING, Dump, DumpRow, field
from lockstep.rollout.errors import ConfigError, DataError, LockstepError

MAX_ROWS = 4096
"""Rows that are read; more say nothing new."""
OWN_FIELDS = f"ids, prompt_length, {SAMPLING}, {TRAINING}; and mask, version, temperature where they are known"


def read_dump(path: Path) -> Dump:
    """Read a file, or all files of a folder (not those of its folders).

    Raises `ConfigError` if there is none, or one that holds no ids with logprobs, `DataError` for a row that is not
    what its format says.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".pt", ".parquet"))
    if not files or not files[0].is_file():
        raise ConfigError(f"--ids {path}: expected a file of rows (.jsonl, .pt) or a folder with some, found none")
    records = list(islice((record for file in files for record in _records(file)), MAX_ROWS + 1))
    notes = [f"read the first {MAX_ROWS} rows; there are more"] if len(records) > MAX_ROWS else []
    if not records:
        raise ConfigError(f"--ids {path}: no rows, expected one at least")
    form = _form(path, records[0][1])
    rows: list[DumpRow] = []
    untrained = 0
    for place, record in records[:MAX_ROWS]:
        if (row := _read(form, place, record)) is None:
            untrained += 1
        else:
            rows.append(row)
    if untrained:
        notes.append(f"left out {untrained} of {len(records[:MAX_ROWS])} rows, which train no token")
    if not rows:
        raise DataError(f"{path}: none of {len(records)} rows trains a token")
    if all(np.isnan(row.sampling_L[row.is_trained_L]).all() for row in rows):
        raise DataError(f"{path}: no row has a sampling logprob; let the engine report logprobs, and write them")
    return Dump(format=form.trainer, rows=tuple(rows), notes=(*notes, *form.lacks))


def _read(form: Form, place: str, record: Mapping[str, Any]) -> DumpRow | None:
    try:
        return form.read(place, record)
    except LockstepError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:  # not lists where they belong
        raise DataError(f"{place}: not a row of {form.trainer}: {error}") from error


class Form(NamedTuple):
    """How a trainer writes rows."""

    trainer: str
    fields: frozenset[str]
    """Fields by which its rows are known."""
    read: Callable[[str, Mapping[str, Any]], DumpRow | None]
    """Takes the place and the content of a row; returns None if no token of it is trained."""
    lacks: tuple[str, ...] = ()


def _own(place: str, row: Mapping[str, Any]) -> DumpRow | None:
    ids, prompt_length = field(place, row, "ids"), field(place, row, "prompt_length")
    if isinstance(prompt_length, bool) or not isinstance(prompt_length, int) or not 0 < prompt_length <= len(ids):
        raise DataError(f"{place}: prompt_length is {prompt_length!r}, expected 1 to {len(ids)}, the number of ids")
    answer = [1] * (len(ids) - prompt_length) if row.get("mask") is None else row["mask"]
    mask = [0] * prompt_length + list(answer) if len(answer) < len(ids) else list(answer)
    if len(mask) != len(ids):
        raise DataError(f"{place}: a mask of {len(answer)}, expected {len(ids)} entries or {len(ids) - prompt_length}, "
                        "of the answer")  # fmt: skip
    if not any(mask):
        return None
    first = mask.index(next(filter(None, mask)))
    of_answer = {name: _from_first(field(place, row, name), len(ids), prompt_length, first)
                 for name in (SAMPLING, TRAINING)}  # fmt: skip
    return DumpRow.of(
        place,
        ids=ids,
        is_trained=mask,
        sampling=of_answer[SAMPLING],
        training=of_answer[TRAINING],
        version=row.get("version"),
        temperature=row.get("temperature"),
    )


def _from_first(values: list[Any], length: int, prompt_length: int, first: int) -> list[Any]:
    """Cut the logprobs of an answer, whose first tokens are not trained, to begin with the first that is."""
    return values[first - prompt_length :] if len(values) == length - prompt_length else values


def _prime_rl(place: str, row: Mapping[str, Any]) -> DumpRow | None:
    return _whole(place, row, "token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs")


def _nemo_rl(place: str, row: Mapping[str, Any]) -> DumpRow | None:
    """Values are lists of one; rows are padded to the longest of their batch."""
    flat = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in row.items()}
    if not flat.get("sample_loss_mask", 1):
        return None
    length = flat.get("input_lengths") or len(field(place, flat, "token_ids"))
    names = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
    return _whole(place, {name: field(place, flat, name)[:length] for name in names}, *names)


def _slime(place: str, row: Mapping[str, Any]) -> DumpRow | None:
    """Logprobs and mask are of the answer alone."""
    ids, answer = _list(field(place, row, "tokens")), _list(field(place, row, "loss_masks"))
    mask = [0] * (len(ids) - len(answer)) + answer
    if not any(mask):
        return None
    first = mask.index(next(filter(None, mask)))
    prompt_length = len(ids) - len(answer)
    sampling, training = (
        _from_first(_list(field(place, row, name)), len(ids), prompt_length, first)
        for name in ("rollout_log_probs", "log_probs")
    )
    return DumpRow.of(place, ids=ids, is_trained=mask, sampling=sampling, training=training)


def _whole(place: str, row: Mapping[str, Any], ids: str, mask: str, sampling: str, training: str) -> DumpRow | None:
    """Read a row whose fields have an entry for each token."""
    is_trained = field(place, row, mask)
    if not any(is_trained):
        return None
    return DumpRow.of(
        place,
        ids=field(place, row, ids),
        is_trained=is_trained,
        sampling=field(place, row, sampling),
        training=field(place, row, training),
    )


FORMS = (
    Form("docs/kl.md", frozenset({"ids", "prompt_length", SAMPLING, TRAINING}), _own),
    Form(
        "prime-rl",
        frozenset({"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"}),
        _prime_rl,
        ("prime-rl writes neither temperature nor version of the weights",),
    ),
    Form(
        "NeMo RL",
        frozenset({"token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs"}),
        _nemo_rl,
        ("NeMo RL writes neither temperature nor version of the weights",),
    ),
    Form(
        "slime",
        frozenset({"tokens", "loss_masks", "rollout_log_probs", "log_probs"}),
        _slime,
        ("slime writes the version of the weights in rollout_data/, and no temperature",),
    ),
)
TEXTS = {
    "TRL": {"completion", "prompt"},
    "verl": {"input", "output", "score"},
}
"""Fields of dumps that hold texts, by the trainer that writes them."""


def _form(path: Path, row: Mapping[str, Any]) -> Form:
    if form := next((form for form in FORMS if form.fields <= row.keys()), None):
        return form
    names = ", ".join(sorted(map(str, row))) or "nothing"
    if writer := next((name for name, fields in TEXTS.items() if fields <= row.keys()), None):
        raise ConfigError(
            f"--ids {path}: {writer} writes texts (found {names}); ids and logprobs cannot be told from them. "
            "docs/kl.md has the lines that make it write a row as {" + OWN_FIELDS + "}"
        )
    forms = "; ".join(f"{form.trainer}: {', '.join(sorted(form.fields))}" for form in FORMS)
    raise ConfigError(f"--ids {path}: rows with {names}; expected the fields of a known form ({forms})")


def _records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place and the content of each row. Raises `DataError` for other content than rows."""
    if file.suffix == ".pt":
        yield from _samples(file)
    elif file.suffix == ".parquet":
        import pyarrow.parquet

        batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=64)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"{file} row {number}", row) for number, row in enumerate(rows, start=1))
    else:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file} line {number}", _json_row(f"{file} line {number}", line)


def _json_row(place: str, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: no JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: {type(row).__name__}, expected an object with {OWN_FIELDS}")
    return row


def _samples(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the samples of a dump of slime, without running code that the file may hold."""
    import pickle

    import torch

    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise DataError(
            f"{file}: holds more than tensors and numbers, or was not written by torch.save: {error}"
        ) from error
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise DataError(f"{file}: no list of samples, expected a file of --dump-details in train_data/")
    yield from ((f"{file} sample {number}", sample) for number, sample in enumerate(samples))


def _list(values: Any) -> list[Any]:
    return list(np.asarray(values).tolist()) if hasattr(values, "__len__") else [values]
