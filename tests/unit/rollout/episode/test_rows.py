"""The call tree: every sampled token is trained once, for any order of arrival, in time linear in the tokens."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.episode.rows import extension_count, is_trainable, rows_from_calls
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import (
    EngineCall,
    FinishReason,
    ImageSpan,
    Prompt,
    PromptSharing,
    SamplingSupport,
    TrainingRow,
)
from tests.fixtures.calls import a_call, call_trees

CALL: Any = {"sampled_logprobs": (-0.5,), "finish_reason": FinishReason.STOP}


def trained_events(rows: Sequence[TrainingRow]) -> Counter:
    """Count the trained tokens, each with its whole context and its logprob."""
    return Counter(
        (tuple(row.ids[:position].tolist()), int(row.ids[position]), float(row.sampling_logprobs[position]))
        for row in rows
        for position in np.flatnonzero(row.loss_mask)
    )


def sampled_events(calls: Sequence[EngineCall]) -> Counter:
    """Count the sampled tokens, each with its whole context and its logprob."""
    return Counter(
        (call.prompt_ids + call.sampled_ids[:k], call.sampled_ids[k], float(np.float32(call.sampled_logprobs[k])))
        for call in calls
        if is_trainable(call)
        for k in range(len(call.sampled_ids))
    )


def content(row: TrainingRow) -> tuple:
    """Return the arrays of a row that do not depend on the order of arrival."""
    return tuple(array.tobytes() for array in (row.ids, row.loss_mask, row.sampling_logprobs, row.versions))


def longest_prefix_parents(calls: Sequence[EngineCall]) -> list[int | None]:
    """Find parents by their definition, comparing every pair. Ties (equal ids) go to any one of them."""
    parents: list[int | None] = []
    for call in calls:
        candidates = [
            (len(other.all_ids), index)
            for index, other in enumerate(calls)
            if other is not call and call.prompt_ids[: len(other.all_ids)] == other.all_ids
        ]
        parents.append(max(candidates)[1] if candidates else None)
    return parents


@settings(max_examples=400, deadline=None)
@given(call_trees())
def test_every_sampled_token_is_trained_once_with_its_own_context_and_logprob(calls: list[EngineCall]) -> None:
    rows = rows_from_calls(calls, rollout_id=3, group_id=5)
    assert trained_events(rows) == sampled_events(calls)
    assert sum(row.num_trained for row in rows) == sum(len(call.sampled_ids) for call in calls if is_trainable(call))
    assert all(row.rollout_id == 3 and row.group_id == 5 for row in rows)


@settings(max_examples=200, deadline=None)
@given(call_trees(), st.randoms(use_true_random=False))
def test_the_set_of_rows_does_not_depend_on_the_order_of_arrival(calls: list[EngineCall], rng: random.Random) -> None:
    shuffled = list(calls)
    rng.shuffle(shuffled)
    assert Counter(map(content, rows_from_calls(calls))) == Counter(map(content, rows_from_calls(shuffled)))


@settings(max_examples=200, deadline=None)
@given(call_trees())
def test_there_is_one_row_per_leaf_of_the_tree_of_longest_prefixes(calls: list[EngineCall]) -> None:
    calls = [call for call in calls if is_trainable(call)]
    parents = longest_prefix_parents(calls)
    assert extension_count(calls) == sum(parent is not None for parent in parents)
    # Among calls with equal ids any one may be the parent: count parents by their ids.
    inner = {calls[parent].all_ids for parent in parents if parent is not None}
    leaves = len(calls) - len(inner)
    rows = rows_from_calls(calls)
    assert len(rows) == leaves
    assert {tuple(row.ids.tolist()) for row in rows} <= {call.all_ids for call in calls}


@settings(max_examples=400, deadline=None)
@given(call_trees())
def test_prompts_that_share_ids_with_earlier_calls_make_the_rows_of_whole_prompts(calls: list[EngineCall]) -> None:
    sharing = PromptSharing()
    shared = [sharing.add(call) for call in calls]
    rows, expected = rows_from_calls(shared), rows_from_calls(calls)
    assert list(map(content, rows)) == list(map(content, expected))
    assert [row.turns.tolist() for row in rows] == [row.turns.tolist() for row in expected]
    assert extension_count(shared) == extension_count(calls)


def test_a_call_that_lacks_the_image_of_its_prompt_is_another_row() -> None:
    image = ImageSpan(start=0, end=1, digest="0" * 64)
    first = EngineCall(**CALL, prompt_ids=(9, 1), sampled_ids=(2,), images=(image,))
    second = EngineCall(**CALL, prompt=Prompt(own_ids=(4,), base=first, num_shared=3), sampled_ids=(5,))
    assert [row.images for row in rows_from_calls([first, second])] == [(image,), ()]
    third = EngineCall(**CALL, prompt=Prompt(own_ids=(4,), base=first, num_shared=3), sampled_ids=(5,), images=(image,))
    (row,) = rows_from_calls([first, third])
    assert (row.images, row.ids.tolist(), extension_count([first, third])) == ((image,), [9, 1, 2, 4, 5], 1)


@settings(max_examples=200, deadline=None)
@given(call_trees())
def test_turns_and_versions_name_the_call_that_sampled_the_token(calls: list[EngineCall]) -> None:
    for row in rows_from_calls(calls):
        for position in range(len(row)):
            turn = int(row.turns[position])
            if not row.loss_mask[position]:
                assert (turn, row.versions[position], row.sampling_logprobs[position]) == (-1, -1, 0)
                continue
            call = calls[turn]
            assert call.sampled_ids[position - len(call.prompt_ids)] == row.ids[position]
            assert row.versions[position] == call.version_spans[0].version


@settings(max_examples=300, deadline=None)
@given(call_trees())
def test_the_first_row_that_holds_a_sampled_stretch_trains_it(calls: list[EngineCall]) -> None:
    calls = [call for call in calls if is_trainable(call)]
    parents = longest_prefix_parents(calls)
    rows = rows_from_calls(calls)

    def ancestors(turn: int) -> set[int]:
        parent = parents[turn]
        return set() if parent is None else {parent} | ancestors(parent)

    trained_in = {turn: i for i, row in enumerate(rows) for turn in np.unique(row.turns[row.loss_mask]).tolist()}
    for turn, row_index in trained_in.items():
        # Either of two samples with equal ids may be the parent, and a row does not tell them apart.
        for ancestor in ancestors(turn):
            if [call.all_ids for call in calls].count(calls[ancestor].all_ids) == 1:
                assert trained_in[ancestor] <= row_index


def test_turns_that_extend_each_other_make_one_row() -> None:
    first = a_call([1, 2], [3, 4], logprobs=[-1, -2])
    second = a_call([1, 2, 3, 4, 5], [6], logprobs=[-3], version=7)
    (row,) = rows_from_calls([first, second])
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.loss_mask.tolist() == [False, False, True, True, False, True]
    assert row.sampling_logprobs.tolist() == [0, 0, -1, -2, 0, -3]
    assert row.versions.tolist() == [-1, -1, 0, 0, -1, 7]
    assert row.turns.tolist() == [-1, -1, 0, 0, -1, 1]


def test_the_last_sampled_tokens_are_in_the_row() -> None:
    """Bug 1 of "KL Divergence Analysis" (jphme, gist, 2026): they were lost when the episode ended."""
    calls = [a_call([1], [2, 3]), a_call([1, 2, 3, 4], [5, 6, 7])]
    (row,) = rows_from_calls(calls)
    assert row.ids[-3:].tolist() == [5, 6, 7]
    assert row.loss_mask[-3:].all()


def test_each_logprob_is_at_the_position_of_its_own_token() -> None:
    """Bug 3 of "KL Divergence Analysis" (jphme, gist, 2026): they were shifted by one between inputs and targets."""
    (row,) = rows_from_calls([a_call([9, 9, 9], [4, 5], logprobs=[-0.25, -4.0])])
    assert dict(zip(row.ids[row.loss_mask].tolist(), row.sampling_logprobs[row.loss_mask].tolist(), strict=True)) == {
        4: -0.25,
        5: -4.0,
    }


@pytest.mark.parametrize(
    "retokenized",
    [pytest.param([30], id="two tokens merged into one"), pytest.param([31, 32], id="the same text split elsewhere")],
)
def test_a_prompt_with_the_turn_tokenized_again_branches(retokenized: list[int]) -> None:
    """NeMo Gym docs, "On-Policy Corrections", problem 1: `_Ski` + `nny` becomes `_Skinny`, or `_Skin` + `ny`."""
    sampled = a_call([1, 2], [10, 11])
    again = a_call([1, 2, *retokenized, 5], [6])
    rows = rows_from_calls([sampled, again])
    assert [row.ids.tolist() for row in rows] == [[1, 2, 10, 11], [1, 2, *retokenized, 5, 6]]
    assert [row.ids[row.loss_mask].tolist() for row in rows] == [[10, 11], [6]]


def test_a_prompt_that_ends_inside_a_generation_does_not_merge_with_it() -> None:
    whole = a_call([1], [2, 3, 4])
    inside = a_call([1, 2, 3], [4, 5])
    rows = rows_from_calls([whole, inside])
    assert [row.loss_mask.tolist() for row in rows] == [[False, True, True, True], [False, False, False, True, True]]


def test_a_shared_turn_is_trained_in_one_row_and_context_in_the_other() -> None:
    shared, left, right = a_call([1], [2]), a_call([1, 2, 3], [4]), a_call([1, 2, 5], [6])
    for order in ([shared, left, right], [right, left, shared], [left, shared, right]):
        rows = rows_from_calls(order)
        assert sorted(row.ids[row.loss_mask].tolist() for row in rows) == [[2, 4], [6]]
        assert rows[0].num_trained == 2


def test_equal_samples_of_a_retried_prompt_are_two_samples() -> None:
    twice = [a_call([1, 2], [3, 4], logprobs=[-1, -2]) for _ in range(2)]
    rows = rows_from_calls([*twice, a_call([1, 2, 3, 4, 5], [6])])
    assert sorted(row.ids.tolist() for row in rows) == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    assert sum(row.num_trained for row in rows) == 5
    assert Counter(turn for row in rows for turn in row.turns[row.loss_mask].tolist()) == {0: 2, 1: 2, 2: 1}


def test_a_logprob_of_zero_is_trained_like_any_other() -> None:
    """The mask says that a token was sampled, not that its logprob is nonzero (docs/tokens.md)."""
    (row,) = rows_from_calls([a_call([1], [2, 3], logprobs=[0.0, -1e-9])])
    assert row.loss_mask.tolist() == [False, True, True]


def test_calls_that_sampled_nothing_make_no_row() -> None:
    assert rows_from_calls([]) == []
    assert rows_from_calls([a_call([1, 2], []), a_call([1, 2], [])]) == []
    rows = rows_from_calls([a_call([1, 2], []), a_call([1, 2], [3])])
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3]]


def test_tokens_of_an_aborted_call_are_context_at_most() -> None:
    aborted = a_call([1], [2, 3], finish_reason=FinishReason.ABORT)
    (row,) = rows_from_calls([aborted, a_call([1, 2, 3], [4])])
    assert row.ids.tolist() == [1, 2, 3, 4]
    assert row.loss_mask.tolist() == [False, False, False, True]
    assert row.turns.tolist() == [-1, -1, -1, 1]
    assert rows_from_calls([aborted]) == []


def test_interleaved_agents_make_a_row_each() -> None:
    main, helper = [1, 10], [2, 20]
    calls = []
    for token in range(3):
        for history in (main, helper):
            calls.append(a_call(history, [100 + token]))
            history += [100 + token, token]
    rows = rows_from_calls(calls)
    assert [row.turns[row.loss_mask].tolist() for row in rows] == [[0, 2, 4], [1, 3, 5]]


def test_independent_trees_come_in_order_of_arrival() -> None:
    rows = rows_from_calls([a_call([9], [1]), a_call([1], [2]), a_call([5], [3])])
    assert [row.ids[0] for row in rows] == [9, 1, 5]


def test_a_row_has_the_support_of_its_trained_tokens() -> None:
    def support(*sets: list[int]) -> SamplingSupport:
        offsets = np.cumsum([0, *map(len, sets)])
        return SamplingSupport(offsets=offsets.astype(np.int64), token_ids=np.concatenate(sets).astype(np.int32))

    shared = a_call([1], [2, 3], support=support([2, 9], [3]))
    left = a_call([1, 2, 3, 4], [5], support=support([5, 6, 7]))
    right = a_call([1, 2, 3, 8], [9], support=support([9]))
    rows = rows_from_calls([shared, left, right])
    kept = [[part.tolist() for part in np.split(row.support.token_ids, row.support.offsets[1:-1])] for row in rows]
    assert kept == [[[2, 9], [3], [5, 6, 7]], [[9]]]

    with pytest.raises(EvidenceError, match=r"calls \[1\] have none"):
        rows_from_calls([shared, a_call([1, 2, 3, 4], [5])])


def test_thousands_of_turns_need_no_recursion() -> None:
    history, calls = (1,), []
    for turn in range(2000):
        calls.append(a_call(history, [turn % 7]))
        history = (*history, turn % 7, 9)
    (row,) = rows_from_calls(calls)
    assert row.num_trained == 2000


def test_thousands_of_siblings_are_each_trained_once() -> None:
    calls = [a_call([1], [2])] + [a_call([1, 2, index], [3]) for index in range(3000)]
    assert sum(row.num_trained for row in rows_from_calls(calls)) == 3001


def seconds_per_token(calls: Sequence[EngineCall]) -> float:
    """Measure CPU time, the best of several runs: other work on the machine can only make a run slower."""
    tokens = sum(len(call.all_ids) for call in calls)
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        rows_from_calls(calls)
        best = min(best, time.process_time() - started)
    return best / tokens


@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_time_is_linear_in_the_number_of_tokens(shape: str) -> None:
    def calls(size: int) -> list[EngineCall]:
        if shape == "siblings":  # comparing every pair of these would cost size² prompts
            return [a_call([*range(50), index], [3]) for index in range(20 * size)]
        return [a_call(range(10 * turn + 1), range(10 * turn + 1, 10 * turn + 5)) for turn in range(size)]

    # Eight times the calls: a quadratic method would take eight times as long per token.
    assert seconds_per_token(calls(400)) < 3 * seconds_per_token(calls(50))


def test_the_calls_are_not_modified() -> None:
    calls = [a_call([1, 2], [3]), a_call([1, 2, 3], [4])]
    before = repr(calls)
    rows = rows_from_calls(calls)
    rows[0].ids[:] = 0
    assert repr(calls) == before
