"""Rows made while other rollouts are still sampled, so that a step does not wait for all of them at its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import EngineCall, Rollout, TrainingRow
from lockstep.rollout.sampler.sampler import OnRollout


def rows_of_rollout(rollout: Rollout) -> Sequence[TrainingRow]:
    """Make the rows of a rollout. Raises `EvidenceError`, as `rows_from_calls`."""
    return rows_from_calls(rollout.calls, rollout_id=rollout.rollout_id, group_id=rollout.group_id)


class RowsAhead:
    """Rows of the rollouts that have ended in this step, on rank 0."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[Sequence[EngineCall], Sequence[TrainingRow]]] = {}
        """Calls and rows, by ids of rollout and group."""

    def before(self, on_rollout: OnRollout) -> OnRollout:
        """Return a function that makes the rows of a rollout and then calls `on_rollout`."""

        def make(rollout: Rollout) -> None:
            if rollout.is_trainable:
                with suppress(EvidenceError):  # `of` raises it, if the rollout is trained
                    self._made[rollout.rollout_id, rollout.group_id] = rollout.calls, rows_of_rollout(rollout)
            on_rollout(rollout)

        return make

    def forget(self) -> None:
        """Drop the rows of rollouts that were not asked for."""
        self._made.clear()

    def of(self, rollout: Rollout) -> Sequence[TrainingRow]:
        """Return the rows of a rollout, of its calls as they are now. Raises `EvidenceError`, as `rows_from_calls`."""
        calls, rows = self._made.pop((rollout.rollout_id, rollout.group_id), ((), ()))
        return rows if calls is rollout.calls else rows_of_rollout(rollout)
