"""Calls prepared where a rollout has ended: what the end of the step would make of them, made once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.rollout.episode import prepared_calls
from lockstep.rollout.episode.prepared_calls import PreparedCalls, counts_of, prepared, rows_of
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.episode.token_metrics import count_tokens
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import Rollout, RolloutStatus, Routes, SamplingSupport, TrainingRow
from lockstep.rollout.rollout_lines import calls_as_json, write_rollouts
from lockstep.rollout.saved_rollouts import read_rollouts
from lockstep.trainer.collect.several_ranks import pack
from tests.fixtures.calls import a_call
from tests.unit.trainer.batch.test_step_batch import rollout


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that were called, in order."""
    names: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            names.append(function.__name__)
            return function(*args, **options)

        return call

    for function in (rows_from_calls, count_tokens):
        monkeypatch.setattr(prepared_calls, function.__name__, noting(function))
    return names


def two_turns() -> Rollout:
    """Return a rollout whose second turn edits the history: two rows, and prompts that share nothing."""
    return replace(rollout(3), calls=(a_call([1, 2], [3, 4, 5]), a_call([9, 2, 7], [6, 8])))


def sent(one: Rollout) -> Rollout:
    return pickle.loads(pack([one]))[0]  # noqa: S301


def assert_rows_are(found: Sequence[TrainingRow], expected: Sequence[TrainingRow]) -> None:
    for row, other in zip(found, expected, strict=True):
        for name in ("ids", "loss_mask", "sampling_logprobs", "versions", "turns"):
            np.testing.assert_array_equal(getattr(row, name), getattr(other, name), strict=True)
        assert (row.rollout_id, row.group_id) == (other.rollout_id, other.group_id)


@pytest.mark.parametrize("make", [lambda: rollout(2), two_turns])
@pytest.mark.parametrize("through", [lambda one: one, sent, copy.deepcopy], ids=["here", "sent", "copied"])
def test_rows_and_their_comparison_are_made_once(
    counted: list[str], make: Callable[[], Rollout], through: Callable[[Rollout], Rollout]
) -> None:
    plain = make()
    one = replace(through(prepared(plain)), reward=7.0)
    assert counted == ["rows_from_calls", "count_tokens"]
    rows = rows_of(one)
    assert counts_of(one, rows).matched == one.num_sampled > 0
    assert counted == ["rows_from_calls", "count_tokens"]
    assert one == replace(plain, reward=7.0)
    assert_rows_are(rows, rows_from_calls(plain.calls, rollout_id=plain.rollout_id, group_id=plain.group_id))
    assert counts_of(one, rows) == count_tokens(plain.calls, rows)


def test_a_rollout_with_other_calls_or_another_id_gets_its_own_rows() -> None:
    one = prepared(rollout(1))
    longer, moved = replace(one, calls=rollout(1, sampled=5).calls), replace(one, rollout_id=3)
    assert (rows_of(longer)[0].num_trained, counts_of(longer, rows_of(longer)).trained) == (5, 5)
    assert rows_of(moved)[0].rollout_id == 3
    assert rows_of(replace(one, calls=(*one.calls, *longer.calls)))[-1].num_trained != rows_of(one)[0].num_trained


@pytest.mark.parametrize("name", ["ids", "loss_mask", "sampling_logprobs", "versions", "turns"])
def test_a_row_that_has_changed_since_it_was_made_is_compared_again(counted: list[str], name: str) -> None:
    one = prepared(rollout(1))
    (row,) = rows_of(one)
    last = np.flatnonzero(row.loss_mask)[-1]
    getattr(row, name)[last] = False if name == "loss_mask" else 3
    counts = counts_of(one, [row])
    assert counts == count_tokens(one.calls, [row])
    assert counts.matched == one.num_sampled - (name != "versions")
    assert counted == ["rows_from_calls", "count_tokens", "count_tokens"]


def test_rows_that_are_missing_are_noticed() -> None:
    assert counts_of(prepared(rollout(2)), []).trained == 0


def test_a_rollout_that_cannot_be_trained_is_left_alone(counted: list[str]) -> None:
    failed = rollout(1, status=RolloutStatus.FAILED)
    assert prepared(failed) is failed
    assert not counted


def test_calls_with_routes_are_left_alone() -> None:
    one = rollout(1)
    routed = [replace(call, routes=Routes(own=np.zeros((len(call.all_ids) - 1, 1, 1), np.uint8))) for call in one.calls]
    one = replace(one, calls=tuple(routed))
    assert prepared(one) is one
    assert rows_of(one)[0].routes is not None


def test_the_error_of_a_rollout_comes_when_it_is_trained() -> None:
    support = SamplingSupport(offsets=np.array([0, 2, 3, 6]), token_ids=np.array([10, 4, 11, 12, 5, 6], dtype=np.int32))
    first = rollout(0, support=support).calls[0]
    second = replace(first, prompt_ids=first.all_ids, support=None)
    one = replace(rollout(0), calls=(first, second))
    assert prepared(one) is one
    with pytest.raises(EvidenceError, match="sampling support"):
        rows_of(one)


@pytest.mark.parametrize("more", [{}, {"turn_rewards": (1.0,), "logged": {"f": {"a": 1}}, "call_messages": (None,)}])
def test_a_file_of_prepared_calls_has_the_bytes_of_plain_ones(tmp_path: Path, more: dict[str, Any]) -> None:
    example = {"calls": [], "text": '"calls": []'}
    plain = replace(rollout(4), example=example, outcome={"calls": []}, error="é\n", **more)
    one = prepared(plain, calls_as_json)
    calls = one.calls
    assert isinstance(calls, PreparedCalls)
    assert calls.as_json == calls_as_json(plain.calls)
    write_rollouts(tmp_path / "plain.jsonl", [plain, replace(plain, calls=())])
    write_rollouts(tmp_path / "prepared.jsonl", [sent(one), replace(one, calls=())])
    assert (tmp_path / "prepared.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    calls.as_json = calls.as_json.replace("-4.1", "-0.25")
    write_rollouts(tmp_path / "changed.jsonl", [one])
    (read,) = read_rollouts(tmp_path / "changed.jsonl")
    assert read.calls[0].sampled_logprobs == (-0.25, *plain.calls[0].sampled_logprobs[1:])
