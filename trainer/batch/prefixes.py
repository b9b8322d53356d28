"""Shared prefixes: each common beginning of rows is in a pack once, and a row adds only its stretch, the rest.

In a causal model the hidden state of a token depends only on the tokens up to it. So rows of a group (one prompt) and
branches of a rollout (one history) can share the states of their common prefix: they are computed once, each row
attends to them, and their gradient is the sum over the rows. It equals the gradient of separate rows up to rounding.

In the order of their ids, no earlier row shares more with a row than the one directly before it. Token ids are
compared, so equal beginnings of samples are shared as well as prompts.

Rows with given routes (`TrainingRow.routes`) share tokens with equal experts only, and rows with images those of equal
images: `token_keys` compare all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.rollout.records import TrainingRow

MIN_SHARED = 16
"""Prefix length below which nothing is shared: the opening of a chat template is not worth another attention call."""

Prefix = tuple[tuple[int, int], ...]
"""Parts before a stretch, in order: (index of an earlier stretch, number of tokens from its start)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretches:
    """Tokens of a pack as they are computed. A row is a path: prefix and stretch, or a prefix alone."""

    ids: np.ndarray
    """(L,) int64."""
    position_ids: np.ndarray
    """(L,) int64 positions of tokens in their rows."""
    lengths: tuple[int, ...]
    prefixes: tuple[Prefix, ...]
    """One per stretch; empty for a stretch that begins its row."""
    places: tuple[np.ndarray, ...]
    """Positions in the pack of each row's tokens, in the order given."""


def token_keys(row: TrainingRow, *, with_routes: bool) -> np.ndarray:
    """Return (length,) int64 keys of tokens, equal for equal ids with equal routes and images; without both the ids.

    Routes and images enter as hashes of 64 bits. All tokens of an image have its hash, so rows share whole images only.
    """
    keys = row.ids
    if with_routes and row.routes is not None:
        keys = _with_routes(keys, row.routes)
    if row.images:
        keys = keys.astype(np.int64)
        for span in row.images:
            keys[span.start : span.end] += np.frombuffer(bytes.fromhex(span.digest)[:8], dtype=np.int64)
    return keys


def _with_routes(ids: np.ndarray, routes: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(routes).reshape(len(routes), -1).view(np.uint8)
    words = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 8))).view(np.uint64)
    odd = np.random.default_rng(0).integers(2**63, size=words.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    hashes = words @ odd
    hashes ^= hashes >> np.uint64(32)  # low bits of a product do not depend on high bits of a word
    keys = ids.astype(np.int64)
    keys[: len(hashes)] += (hashes * odd[0]).view(np.int64)
    return keys


def by_ids(rows: Sequence[np.ndarray]) -> list[int]:
    """Return the indices of rows, (length,) arrays of ids, in the order of their ids."""
    # Most significant byte first, so that bytes compare as ids do.
    return sorted(range(len(rows)), key=lambda i: (rows[i].astype(">i8").tobytes(), i))


def num_shared(before: np.ndarray, row: np.ndarray) -> int:
    """Return the number of tokens that a row shares with `before`, its predecessor in the order of ids."""
    length = min(len(before), len(row))
    differs = before[:length] != row[:length]
    common = int(differs.argmax()) if differs.any() else length
    return common if common >= MIN_SHARED else 0


def whole(rows: Sequence[np.ndarray]) -> Stretches:
    """Concatenate rows without sharing."""
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return Stretches(
        ids=np.concatenate(rows),
        position_ids=np.concatenate([np.arange(len(row)) for row in rows]),
        lengths=tuple(len(row) for row in rows),
        prefixes=((),) * len(rows),
        places=tuple(np.arange(start, start + len(row)) for start, row in zip(starts[:-1], rows, strict=True)),
    )


def shared(rows: Sequence[np.ndarray], keys: Sequence[np.ndarray] | None = None) -> Stretches:
    """Concatenate rows in the order of their keys, each without the prefix that it shares with its predecessor.

    keys: `token_keys` of the rows; by default the ids.
    """
    keys = rows if keys is None else keys
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    prefixes: list[Prefix] = []
    places = [np.zeros(0, dtype=np.int64)] * len(rows)
    before, place, path, end = np.zeros(0, dtype=np.int64), places[0], (), 0
    for i in by_ids(keys):
        row = rows[i]
        start = num_shared(before, keys[i])
        own = len(row) - start
        place = np.concatenate([place[:start], np.arange(end, end + own)])
        path = _cut(path, start)
        if own:
            ids.append(row[start:])
            positions.append(np.arange(start, len(row)))
            path = (*path, (len(prefixes), own))
            prefixes.append(path[:-1])
        before, places[i], end = keys[i], place, end + own
    return Stretches(
        ids=np.concatenate(ids),
        position_ids=np.concatenate(positions),
        lengths=tuple(map(len, ids)),
        prefixes=tuple(prefixes),
        places=tuple(places),
    )


def _cut(path: Prefix, length: int) -> Prefix:
    """Return the first `length` tokens of a path."""
    parts = []
    for stretch, tokens in path:
        if length <= 0:
            break
        parts.append((stretch, min(tokens, length)))
        length -= tokens
    return tuple(parts)
