"""Rows made while others are sampled: those that the end of the step would make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import Rollout, RolloutStatus, SamplingSupport
from lockstep.trainer.batch import rows_ahead
from lockstep.trainer.batch.rows_ahead import RowsAhead, rows_of_rollout
from tests.unit.trainer.batch.test_step_batch import rollout


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of rollouts whose rows were made, in order."""
    ids: list[int] = []

    def noted(rollout: Rollout) -> object:
        ids.append(rollout.rollout_id)
        return rows_of_rollout(rollout)

    monkeypatch.setattr(rows_ahead, "rows_of_rollout", noted)
    return ids


def test_rows_are_made_when_a_rollout_ends_and_once(made: list[int]) -> None:
    rows, seen = RowsAhead(), []
    on_rollout = rows.before(seen.append)
    rollouts = [rollout(2), rollout(0)]
    for one in rollouts:
        on_rollout(one)
    assert made == [2, 0]
    assert seen == rollouts
    scored = [replace(one, reward=7.0) for one in rollouts]
    for one in scored:
        ((row, expected),) = zip(rows.of(one), rows_of_rollout(one), strict=True)
        np.testing.assert_array_equal(row.ids, expected.ids)
        assert (row.rollout_id, row.group_id) == (one.rollout_id, one.group_id)
    assert made == [2, 0]


def test_a_rollout_with_other_calls_or_another_id_gets_its_own_rows(made: list[int]) -> None:
    rows = RowsAhead()
    rows.before(lambda one: None)(rollout(1))
    longer, moved = rollout(1, sampled=5), replace(rollout(1), rollout_id=3)
    assert rows.of(longer)[0].num_trained == 5
    assert rows.of(moved)[0].rollout_id == 3
    assert made == [1, 1, 3]


def test_rows_of_dropped_rollouts_are_forgotten(made: list[int]) -> None:
    rows, dropped = RowsAhead(), rollout(1)
    rows.before(lambda one: None)(dropped)
    rows.forget()
    assert rows.of(dropped)
    assert made == [1, 1]


def test_a_failed_rollout_has_no_rows_made(made: list[int]) -> None:
    RowsAhead().before(lambda one: None)(rollout(1, status=RolloutStatus.FAILED))
    assert not made


def test_the_error_of_a_rollout_comes_when_it_is_trained() -> None:
    support = SamplingSupport(offsets=np.array([0, 2, 3, 6]), token_ids=np.array([10, 4, 11, 12, 5, 6], dtype=np.int32))
    first = rollout(0, support=support).calls[0]
    second = replace(first, prompt_ids=first.all_ids, support=None)
    one, rows, seen = replace(rollout(0), calls=(first, second)), RowsAhead(), []
    rows.before(seen.append)(one)
    assert seen == [one]
    with pytest.raises(EvidenceError, match="sampling support"):
        rows.of(one)
