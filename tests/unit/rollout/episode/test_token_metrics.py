"""Counts of rows that agree with their calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.episode.token_metrics import TokenCounts, count_tokens
from lockstep.rollout.records import EngineCall, FinishReason
from tests.fixtures.calls import a_call, call_trees


@settings(max_examples=100, deadline=None)
@given(call_trees())
def test_rows_match_their_calls_token_by_token(calls: list[EngineCall]) -> None:
    counts = count_tokens(calls, rows_from_calls(calls))
    assert counts.matched == counts.trained
    assert counts.metrics()["rollout/token_match_rate"] == 1.0


@pytest.mark.parametrize("name", ["ids", "sampling_logprobs"])
def test_the_match_rate_counts_only_ids_and_logprobs_of_the_engine(name: str) -> None:
    calls = [a_call([1, 2], [3, 4, 5, 6], logprobs=[-1, -2, -3, -4])]
    rows = rows_from_calls(calls)
    array = getattr(rows[0], name)
    array[3:] = np.roll(array[3:], 1)
    assert count_tokens(calls, rows).metrics()["rollout/token_match_rate"] == 0.25


def test_metrics_add_up_over_rollouts() -> None:
    extended = [a_call([1], [2]), a_call([1, 2, 3], [4])]
    branched = [a_call([1], [2]), a_call([5], [6]), a_call([7], [8], finish_reason=FinishReason.ABORT)]
    total = sum((count_tokens(calls, rows_from_calls(calls)) for calls in (extended, branched)), TokenCounts())
    assert total.metrics() == {
        "rollout/token_match_rate": 1.0,
        "rollout/trained_fraction": 4 / 5,
        "rollout/extension_rate": 1 / 2,
        "rollout/branch_rate": 1 / 2,
        "rollout/turns": 5 / 2,
    }
    assert TokenCounts().metrics()["rollout/token_match_rate"] == 1.0
