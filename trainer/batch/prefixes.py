"""Rows that begin alike, and what is left to compute of each when the beginning is in the pack already.

In a causal model the hidden state of a token depends on the tokens up to it and on nothing behind them. So rows of a
group, which hold one prompt, and branches of a rollout, which hold one history, can share the states of what they have
in common: they are computed once, each row attends to them, and their gradient is the sum of what the rows send back.
It is the gradient of rows that are computed apart, up to rounding.

    rows in the order of their ids ─► what a row shares with the one before it, it shares with no other one more of
                                   ─► its stretch: the tokens behind that, which continue the stretches of rows before

Nothing says what a prompt is: token ids are compared, so equal beginnings of samples are shared as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_SHARED = 16
"""Shared tokens below which rows stay apart: the opening of a chat template is not worth another attention call."""

Prefix = tuple[tuple[int, int], ...]
"""What comes before a stretch, in order: (index of an earlier stretch, how many tokens from its start)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretches:
    """The tokens of a pack as they are computed. A row is a path: prefix and stretch, or a prefix alone."""

    ids: np.ndarray
    """(L,) int64."""
    position_ids: np.ndarray
    """(L,) int64 position of each token in its row."""
    lengths: tuple[int, ...]
    prefixes: tuple[Prefix, ...]
    """One per stretch; empty for a stretch that begins its row."""
    places: tuple[np.ndarray, ...]
    """Of each row, in the order given: where its tokens lie in the pack."""


def by_ids(rows: Sequence[np.ndarray]) -> list[int]:
    """Indices of rows in the order of their ids: each one shares with the one before it what it shares with any before
    it. Rows are (length,) arrays of ids."""
    # Most significant byte first, so that bytes compare as ids do.
    return sorted(range(len(rows)), key=lambda i: (rows[i].astype(">i8").tobytes(), i))


def num_shared(before: np.ndarray, row: np.ndarray) -> int:
    """Tokens at the start of a row that need no computation after `before`, its neighbour in the order of ids."""
    length = min(len(before), len(row))
    differs = before[:length] != row[:length]
    common = int(differs.argmax()) if differs.any() else length
    return common if common >= MIN_SHARED else 0


def whole(rows: Sequence[np.ndarray]) -> Stretches:
    """Rows one after the other, nothing shared."""
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return Stretches(
        ids=np.concatenate(rows),
        position_ids=np.concatenate([np.arange(len(row)) for row in rows]),
        lengths=tuple(len(row) for row in rows),
        prefixes=((),) * len(rows),
        places=tuple(np.arange(start, start + len(row)) for start, row in zip(starts[:-1], rows, strict=True)),
    )


def shared(rows: Sequence[np.ndarray]) -> Stretches:
    """Rows in the order of their ids, each without what it shares with the one before it."""
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    prefixes: list[Prefix] = []
    places = [np.zeros(0, dtype=np.int64)] * len(rows)
    before, place, path, end = np.zeros(0, dtype=np.int64), places[0], (), 0
    for i in by_ids(rows):
        row = rows[i]
        start = num_shared(before, row)
        own = len(row) - start
        place = np.concatenate([place[:start], np.arange(end, end + own)])
        path = _cut(path, start)
        if own:
            ids.append(row[start:])
            positions.append(np.arange(start, len(row)))
            path = (*path, (len(prefixes), own))
            prefixes.append(path[:-1])
        before, places[i], end = row, place, end + own
    return Stretches(
        ids=np.concatenate(ids),
        position_ids=np.concatenate(positions),
        lengths=tuple(map(len, ids)),
        prefixes=tuple(prefixes),
        places=tuple(places),
    )


def _cut(path: Prefix, length: int) -> Prefix:
    """The first `length` tokens of a path."""
    kept = []
    for stretch, tokens in path:
        if length <= 0:
            break
        kept.append((stretch, min(tokens, length)))
        length -= tokens
    return tuple(kept)
