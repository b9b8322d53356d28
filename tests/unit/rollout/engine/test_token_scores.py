"""Scores of a teacher: what an engine may answer, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.rollout.engine.token_scores import TokenScores, token_scores
from lockstep.rollout.errors import EvidenceError

IDS = [5, 6, 7]
# Per position the token, then the two most probable ones: token 6 is among them, token 7 is not.
FLAT_IDS = [6, 9, 6, 7, 1, 2]
FLAT_LOGPROBS = [-1.5, -0.5, -1.5, -4.0, -0.25, -2.0]


def scores(**changes: Any) -> TokenScores:
    given: dict[str, Any] = {"top_k": 2, "version": 3, "vocab_size": 10, "source": "the teacher"}
    return token_scores(
        changes.pop("ids", IDS),
        changes.pop("flat_ids", FLAT_IDS),
        changes.pop("flat_logprobs", FLAT_LOGPROBS),
        **given | changes,
    )


def test_flat_lists_become_a_table():
    found = scores()
    assert found.logprobs.tolist() == [-1.5, -4.0]
    assert found.top_ids.tolist() == [[9, 6], [1, 2]]
    assert found.top_logprobs.tolist() == [[-0.5, -1.5], [-0.25, -2.0]]
    assert (found.top_k, found.version) == (2, 3)


def test_scores_without_most_probable_tokens_are_records_too():
    found = scores(top_k=0, flat_ids=[6, 7], flat_logprobs=[-1.5, -4.0])
    assert found.top_ids.shape == (2, 0)
    assert found.logprobs.tolist() == [-1.5, -4.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flat_ids": [6, 9, 6, 8, 1, 2]}, "do not belong to the 3 ids"),
        ({"ids": [5, 6]}, "expected 3 at each of 1 positions"),
        ({"top_k": 1}, "expected 2 at each of 2 positions"),
        ({"flat_logprobs": FLAT_LOGPROBS[:-1]}, "6 scored tokens and 5 logprobs"),
        ({"vocab_size": 9}, "token id 9 is outside the vocabulary of 9"),
        ({"flat_ids": [6, 6, 6, 7, 1, 2]}, "occurs twice"),
        ({"flat_logprobs": [-1.5, -0.5, -1.5, float("nan"), -0.25, -2.0]}, "position 2 has logprob nan"),
        ({"flat_logprobs": [-1.5, -0.5, -1.5, -4.0, -0.25, float("-inf")]}, "position 2 has logprob"),
        ({"flat_logprobs": [-1.5, -0.5, -1.5, -9999.0, -0.25, -2.0]}, "position 2 has logprob -9999"),
        ({"flat_logprobs": [-1.5, 0.5, -1.5, -4.0, -0.25, -2.0]}, "position 1 has logprob"),
        ({"flat_logprobs": [-1.5, -0.1, -1.5, -4.0, -0.25, -2.0]}, "add up to more than 1"),
        ({"flat_logprobs": [-1.25, -0.5, -1.5, -4.0, -0.25, -2.0]}, "token 6 at position 1"),
        ({"flat_logprobs": [-1.5, -0.5, -1.5, -1.0, -0.25, -2.0]}, "token 7 at position 2"),
    ],
)
def test_scores_that_cannot_be_those_of_the_tokens_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(EvidenceError, match=message):
        scores(**changes)


def test_arrays_of_other_lengths_are_refused():
    found = scores()
    for changes in (
        {"ids": np.array([5])},
        {"logprobs": found.logprobs[:1]},
        {"top_logprobs": found.top_logprobs[:, :1]},
        {"top_ids": found.top_ids[:1]},
    ):
        with pytest.raises(EvidenceError, match="expected one row per id but the first"):
            replace(found, **changes)
