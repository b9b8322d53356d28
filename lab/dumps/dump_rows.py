"""Rows of a dump: token ids, which of them are trained, and their logprobs under engine and trainer.

Dimensions: _L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.rollout.errors import DataError

SAMPLING, TRAINING = "sampling_logprobs", "training_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DumpRow:
    """One sequence, in whichever trainer it was trained."""

    place: str
    """Where the row stands: file and line or sample."""
    ids_L: np.ndarray  # int64
    is_trained_L: np.ndarray  # bool
    sampling_L: np.ndarray  # float64 log π of the engine for token i itself; NaN: not written
    training_L: np.ndarray  # float64 log π of the trainer for token i itself; NaN: not written
    version: int | None = None
    """Version of the weights that sampled the row; None: not written."""
    temperature: float | None = None
    """Temperature of sampling; None: not written."""

    def __len__(self) -> int:
        return len(self.ids_L)

    @property
    def turns(self) -> list[slice]:
        """Unbroken runs of trained tokens, in order."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.is_trained_L.astype(np.int8), [0]])))
        return [slice(int(start), int(end)) for start, end in edges.reshape(-1, 2)]

    @classmethod
    def of(
        cls,
        place: str,
        *,
        ids: Sequence[int],
        is_trained: Sequence[Any],
        sampling: Sequence[Any],
        training: Sequence[Any],
        version: Any = None,
        temperature: Any = None,
    ) -> DumpRow:
        """Make a row. Logprobs: of all tokens, or of those from the first trained one on; None: not written.

        Raises `DataError` for other lengths or types.
        """
        ids_L = _array(place, "token ids", ids, np.int64)
        is_trained_L = _array(place, "loss mask", is_trained, np.bool_)
        if len(is_trained_L) != len(ids_L):
            raise DataError(f"{place}: a loss mask of {len(is_trained_L)} entries, expected one for each of "
                            f"{len(ids_L)} tokens")  # fmt: skip
        if not is_trained_L.any():
            raise DataError(f"{place}: no token is trained, expected one at least")
        if is_trained_L[0]:
            raise DataError(f"{place}: the first token is trained, which no trainer can score; expected a prompt")
        if len(ids_L) and ids_L.min() < 0:
            raise DataError(f"{place}: token id {ids_L.min()}, expected none below 0")
        return cls(
            place=place,
            ids_L=ids_L,
            is_trained_L=is_trained_L,
            sampling_L=_logprobs(place, SAMPLING, sampling, is_trained_L),
            training_L=_logprobs(place, TRAINING, training, is_trained_L),
            version=_number(place, "version", version, int),
            temperature=_number(place, "temperature", temperature, float),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Rows of a file or folder, and what was found about it while reading."""

    format: str
    """Trainer that wrote it."""
    rows: tuple[DumpRow, ...]
    notes: tuple[str, ...] = ()
    """Sentences about rows that were left out, with their number, and about facts that this format does not hold."""


def field(place: str, row: Mapping[str, Any], name: str) -> Any:
    """Return a value of a row. Raises `DataError` without one."""
    if (value := row.get(name)) is None:
        raise DataError(f"{place}: no {name}; found {', '.join(sorted(map(str, row))) or 'nothing'}")
    return value


def _array(place: str, name: str, values: Any, dtype: type) -> np.ndarray:
    try:
        array = np.asarray(values)
        if array.ndim != 1 or array.dtype.kind not in "biuf" or (array != array.astype(dtype)).any():
            raise ValueError
    except (TypeError, ValueError, OverflowError) as error:
        kind = "true and false, or 1 and 0" if dtype is np.bool_ else "whole numbers"
        raise DataError(f"{place}: {name}: expected a list of {kind}") from error
    return array.astype(dtype)


def _logprobs(place: str, name: str, values: Any, is_trained_L: np.ndarray) -> np.ndarray:
    try:
        array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: {name}: expected a list of numbers") from error
    length, first = len(is_trained_L), int(np.argmax(is_trained_L))
    if array.ndim != 1 or len(array) not in (length, length - first):
        raise DataError(
            f"{place}: {len(array)} {name}, expected {length} (one for each token) or {length - first} (one for each "
            "from the first trained one on)"
        )
    whole_L = np.full(length, np.nan)
    whole_L[length - len(array) :] = array
    return whole_L


def _number(place: str, name: str, value: Any, kind: type) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != kind(value):
        raise DataError(f"{place}: {name} is {value!r}, expected a number")
    return kind(value)
