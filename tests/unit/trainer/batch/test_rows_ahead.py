"""Rows made while others are sampled: those that the end of the step would make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lockstep.rollout.episode.token_metrics import TokenCounts, count_tokens
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import EngineCall, Rollout, RolloutStatus, SamplingSupport, TrainingRow
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


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of calls of rollouts that were compared with their rows, in order."""
    numbers: list[int] = []

    def noted(calls: Sequence[EngineCall], rows: Sequence[TrainingRow]) -> TokenCounts:
        numbers.append(len(calls))
        return count_tokens(calls, rows)

    monkeypatch.setattr(rows_ahead, "count_tokens", noted)
    return numbers


def test_rows_are_compared_with_their_calls_when_they_are_made_and_once(compared: list[int]) -> None:
    ahead, one = RowsAhead(), rollout(1)
    ahead.before(lambda one: None)(one)
    scored = replace(one, reward=7.0)
    assert ahead.counts(scored, ahead.of(scored)).matched == scored.num_sampled > 0
    assert compared == [1]


@pytest.mark.parametrize("name", ["ids", "loss_mask", "sampling_logprobs", "versions", "turns"])
def test_a_row_that_has_changed_since_it_was_made_is_compared_again(compared: list[int], name: str) -> None:
    ahead, one = RowsAhead(), rollout(1)
    ahead.before(lambda one: None)(one)
    (row,) = ahead.of(one)
    last = np.flatnonzero(row.loss_mask)[-1]
    getattr(row, name)[last] = False if name == "loss_mask" else 3
    counts = ahead.counts(one, [row])
    assert counts == count_tokens(one.calls, [row])
    assert counts.matched == one.num_sampled - (name != "versions")
    assert compared == [1, 1]


def test_a_rollout_whose_rows_were_not_made_ahead_is_compared_with_those_it_has(compared: list[int]) -> None:
    one, other = rollout(1), rollout(1, sampled=5)
    ahead = RowsAhead()
    ahead.before(lambda one: None)(other)
    assert ahead.counts(one, rows_of_rollout(one)).trained == one.num_sampled != 5
    assert ahead.counts(rollout(2), []).trained == 0
    assert compared == [1, 1, 1]


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
