"""Packs: the shift between inputs and targets, lookup by index in the step, budgets, dummies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import SamplingSupport, TrainingRow
from lockstep.trainer.batch.packing import StepLayout, collate, pack


def row(ids: list[int], trained: list[int], *, rollout_id: int = 0, supports: list[list[int]] | None = None):
    """Return a row with these trained positions; logprob, version and turn of token p are functions of p."""
    mask = np.zeros(len(ids), dtype=bool)
    mask[trained] = True
    positions = np.arange(len(ids))
    support = None
    if supports is not None:
        support = SamplingSupport(
            offsets=np.cumsum([0, *map(len, supports)]), token_ids=np.concatenate(supports).astype(np.int32)
        )
    return TrainingRow(
        ids=np.array(ids),
        loss_mask=mask,
        sampling_logprobs=np.where(mask, -0.1 * positions, 0.0).astype(np.float32),
        versions=np.where(mask, positions + 100, -1).astype(np.int32),
        turns=np.where(mask, positions // 2, -1).astype(np.int32),
        rollout_id=rollout_id,
        support=support,
    )


ROWS = [
    row([10, 11, 12, 13], [2, 3], rollout_id=7),
    row([20, 21], [1], rollout_id=5),
    row([30, 31, 32, 33, 34], [1, 4], rollout_id=7),
]


def test_each_target_is_predicted_by_the_position_before_it():
    packed = collate(ROWS, [0, 1, 2])
    assert packed.ids.tolist() == [10, 11, 12, 13, 20, 21, 30, 31, 32, 33, 34]
    assert packed.target_ids_T.tolist() == [12, 13, 21, 31, 34]
    assert packed.target_index_T.tolist() == [1, 2, 4, 6, 9]
    assert packed.ids[packed.target_index_T + 1].tolist() == packed.target_ids_T.tolist()


def test_no_target_is_predicted_from_another_row():
    packed = collate(ROWS, [2, 0, 1])
    row_of_position = torch.repeat_interleave(torch.arange(packed.num_rows), torch.tensor(packed.row_lengths))
    assert (row_of_position[packed.target_index_T] == row_of_position[packed.target_index_T + 1]).all()


def test_sampling_logprobs_stay_with_their_tokens():
    packed = collate(ROWS, [0, 1, 2])
    torch.testing.assert_close(packed.sampling_logprobs_T, torch.tensor([-0.2, -0.3, -0.1, -0.1, -0.4]))


def test_positions_restart_and_boundaries_come_from_lengths():
    packed = collate(ROWS, [1, 2])
    assert packed.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert packed.cu_seqlens.tolist() == [0, 2, 7]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.row_lengths == (2, 5)


def test_equal_ids_do_not_move_a_boundary():
    zeros = [row([0, 0, 0], [1, 2]), row([0, 0], [1])]
    packed = collate(zeros, [0, 1])
    assert packed.row_lengths == (3, 2)
    assert packed.target_index_T.tolist() == [0, 1, 3]


def test_token_index_is_the_same_in_every_partition():
    values_N = torch.arange(5) * 10
    together = collate(ROWS, [0, 1, 2])
    assert values_N[together.token_index_T].tolist() == [0, 10, 20, 30, 40]
    apart = {i: collate(ROWS, [i]) for i in range(3)}
    assert torch.cat([apart[i].token_index_T for i in range(3)]).tolist() == together.token_index_T.tolist()
    assert collate(ROWS, [2, 0]).token_index_T.tolist() == [3, 4, 0, 1]


def test_rollout_index_counts_rollouts_and_not_rows():
    assert collate(ROWS, [0, 1, 2]).rollout_T.tolist() == [0, 0, 1, 0, 0]
    layout = StepLayout.of(ROWS, rollout_ids=[4, 5, 6, 7])  # rollouts without rows keep their place
    assert collate(ROWS, [0, 1, 2], layout).rollout_T.tolist() == [3, 3, 1, 3, 3]
    with pytest.raises(EvidenceError, match="rollouts \\[7\\]"):
        StepLayout.of(ROWS, rollout_ids=[5])


def test_support_is_restricted_to_trained_tokens_in_their_order():
    rows = [
        row([1, 2, 3], [1, 2], supports=[[2, 9], [3]]),
        row([4, 5], []),
        row([6, 7], [1], supports=[[7, 8, 9]]),
    ]
    packed = collate(rows, [2, 1, 0])
    assert packed.support_offsets.tolist() == [0, 3, 5, 6]
    assert packed.support_ids.tolist() == [7, 8, 9, 2, 9, 3]
    assert collate(ROWS, [0]).support_ids is None


def test_support_of_only_some_rows_is_refused():
    rows = [row([1, 2], [1], supports=[[2]]), row([3, 4], [1])]
    with pytest.raises(EvidenceError, match="1 of 2 rows"):
        collate(rows, [0, 1])
    with pytest.raises(EvidenceError, match="support for 2 tokens, 1 are trained"):
        collate([row([1, 2], [1], supports=[[2], [3]])], [0])


def test_a_dummy_pack_trains_nothing():
    packed = collate(ROWS, [], StepLayout.of(ROWS))
    assert len(packed.target_ids_T) == len(packed.token_index_T) == len(packed.rollout_T) == 0
    assert packed.row_lengths == (2,)
    assert packed.num_tokens == len(packed.position_ids) == 2


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_packing_loses_no_row_and_keeps_the_budget(lengths, budget):
    packs = pack(lengths, budget)
    assert sorted(i for members in packs for i in members) == list(range(len(lengths)))
    for members in packs:
        assert sum(lengths[i] for i in members) <= budget or len(members) == 1
    assert packs == pack(lengths, budget)


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_a_row_goes_to_the_first_pack_with_room(lengths, budget):
    packs: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        with_room = (members for members in packs if sum(lengths[j] for j in [*members, i]) <= budget)
        if (first := next(with_room, None)) is None:
            packs.append([i])
        else:
            first.append(i)
    assert pack(lengths, budget) == packs


def test_packing_is_dense():
    assert [sum([6, 4, 5, 5, 3, 7][i] for i in members) for members in pack([6, 4, 5, 5, 3, 7], 10)] == [10, 10, 10]


def test_a_budget_below_one_token_is_refused():
    with pytest.raises(ValueError, match="token_budget must be at least 1, found 0"):
        pack([1], 0)
