"""Calls of a rollout with what the end of a step needs of them, made where and when the rollout has ended.

The rows, their comparison with the calls, and the calls as JSON depend on nothing else, so a step does not wait for
them: each driver makes its own while other rollouts are sampled, and rank 0 gets them with the rollout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.episode.token_metrics import TokenCounts, count_tokens
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import EngineCall, Rollout, TrainingRow

OF_TRAINED = ("sampling_logprobs", "versions", "turns")
"""Arrays of a row that have a value of their own at trained tokens alone."""


class PreparedCalls(tuple[EngineCall, ...]):
    """Calls of one rollout. A changed copy is a plain tuple, from which everything is made again."""

    rows: Sequence[TrainingRow] = ()
    counts = TokenCounts()
    """Comparison of rows and calls."""
    checksums: Sequence[int] = ()
    """Checksums of the rows as they were compared."""
    as_json: str | None = None
    """None: no file needs it."""


def prepared(rollout: Rollout, to_json: Callable[[Sequence[EngineCall]], str] | None = None) -> Rollout:
    """Return an equal rollout with prepared calls; the same one if it has no rows to train, or none can be made.

    Calls with routes are left as they are: their routes would be sent and held three times, and compressed while
    episodes wait.

    to_json: makes the JSON of the calls; None: for rollouts that are not saved.
    """
    if not rollout.is_trainable or any(call.routes is not None for call in rollout.calls):
        return rollout
    calls = PreparedCalls(rollout.calls)
    try:
        calls.rows = rows_of(rollout)
    except EvidenceError:  # raised again if the rollout is trained
        return rollout
    calls.counts = count_tokens(calls, calls.rows)
    calls.checksums = list(map(checksum, calls.rows))
    calls.as_json = to_json and to_json(calls)
    return replace(rollout, calls=calls)


def rows_of(rollout: Rollout) -> Sequence[TrainingRow]:
    """Return the rows of a rollout, of its calls as they are now. Raises `EvidenceError`, as `rows_from_calls`."""
    rows = rollout.calls.rows if isinstance(rollout.calls, PreparedCalls) else ()
    if rows and (rows[0].rollout_id, rows[0].group_id) == (rollout.rollout_id, rollout.group_id):
        return rows
    return rows_from_calls(rollout.calls, rollout_id=rollout.rollout_id, group_id=rollout.group_id)


def counts_of(rollout: Rollout, rows: Sequence[TrainingRow]) -> TokenCounts:
    """Compare a rollout with its rows, again only if they are not those of its prepared calls."""
    calls = rollout.calls
    if isinstance(calls, PreparedCalls) and calls.checksums and list(map(checksum, rows)) == calls.checksums:
        return calls.counts
    return count_tokens(calls, rows)


def checksum(row: TrainingRow) -> int:
    """Return a checksum of a row: its ids and mask, and the logprobs, versions and turns of its trained tokens."""
    result = 0
    for array in (row.ids, row.loss_mask, *(getattr(row, name)[row.loss_mask] for name in OF_TRAINED)):
        result = zlib.crc32(np.ascontiguousarray(array).data, result)
    return result
