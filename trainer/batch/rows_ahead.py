"""Rows made while other rollouts are still sampled, so that a step does not wait for all of them at its end."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.episode.token_metrics import TokenCounts, count_tokens
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import EngineCall, Rollout, TrainingRow
from lockstep.rollout.sampler.sampler import OnRollout

OF_TRAINED = ("sampling_logprobs", "versions", "turns")
"""Arrays of a row that have a value of their own at trained tokens alone."""


def rows_of_rollout(rollout: Rollout) -> Sequence[TrainingRow]:
    """Make the rows of a rollout. Raises `EvidenceError`, as `rows_from_calls`."""
    return rows_from_calls(rollout.calls, rollout_id=rollout.rollout_id, group_id=rollout.group_id)


def checksum(row: TrainingRow) -> int:
    """Return a checksum of a row: its ids and mask, and the logprobs, versions and turns of its trained tokens."""
    result = 0
    for array in (row.ids, row.loss_mask, *(getattr(row, name)[row.loss_mask] for name in OF_TRAINED)):
        result = zlib.crc32(np.ascontiguousarray(array).data, result)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _RolloutRows:
    """Rows of a rollout, and their comparison with its calls."""

    calls: Sequence[EngineCall]
    rows: Sequence[TrainingRow]
    counts: TokenCounts
    checksums: Sequence[int]

    @classmethod
    def of(cls, rollout: Rollout) -> _RolloutRows:
        rows = rows_of_rollout(rollout)
        counts = count_tokens(rollout.calls, rows)
        return cls(calls=rollout.calls, rows=rows, counts=counts, checksums=list(map(checksum, rows)))


class RowsAhead:
    """Rows of the rollouts that have ended in this step, on rank 0."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], _RolloutRows] = {}
        """By ids of rollout and group."""

    def before(self, on_rollout: OnRollout) -> OnRollout:
        """Return a function that makes the rows of a rollout and then calls `on_rollout`."""

        def make(rollout: Rollout) -> None:
            if rollout.is_trainable:
                with suppress(EvidenceError):  # `of` raises it, if the rollout is trained
                    self._made[_key(rollout)] = _RolloutRows.of(rollout)
            on_rollout(rollout)

        return make

    def of(self, rollout: Rollout) -> Sequence[TrainingRow]:
        """Return the rows of a rollout, of its calls as they are now. Raises `EvidenceError`, as `rows_from_calls`."""
        return own.rows if (own := self._of(rollout)) else rows_of_rollout(rollout)

    def counts(self, rollout: Rollout, rows: Sequence[TrainingRow]) -> TokenCounts:
        """Compare a rollout with its rows, again only if they are not as they were made."""
        own = self._of(rollout)
        is_same = own is not None and list(map(checksum, rows)) == own.checksums
        return own.counts if own and is_same else count_tokens(rollout.calls, rows)

    def _of(self, rollout: Rollout) -> _RolloutRows | None:
        own = self._made.get(_key(rollout))
        return own if own and own.calls is rollout.calls else None


def _key(rollout: Rollout) -> tuple[int, int]:
    return rollout.rollout_id, rollout.group_id
