"""Plans: every row once, equal numbers of microbatches, even work, equal results on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.trainer.batch import assignment
from lockstep.trainer.batch.assignment import plan, row_cost


def log_normal_lengths(count: int, *, median: int = 600) -> list[int]:
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(np.log(median), 0.8, count), 8, 4000).astype(int).tolist()


@given(st.lists(st.integers(1, 80), max_size=40), st.integers(1, 4), st.integers(1, 100))
@settings(max_examples=300, deadline=None)
def test_every_row_runs_once_on_equally_many_microbatches_within_the_budget(lengths, num_ranks, budget):
    result = plan(lengths, num_ranks=num_ranks, token_budget=budget)
    packs = [members for microbatches in result.microbatches for members in microbatches]
    assert sorted(i for members in packs for i in members) == list(range(len(lengths)))
    assert len(result.microbatches) == num_ranks
    assert {len(microbatches) for microbatches in result.microbatches} == {result.num_microbatches}
    assert result.num_microbatches >= 1
    for members in packs:
        assert sum(lengths[i] for i in members) <= budget or len(members) == 1
    assert result.num_oversized == sum(length > budget for length in lengths)
    assert result == plan(lengths, num_ranks=num_ranks, token_budget=budget)


@given(st.lists(st.tuples(st.integers(0, 80), st.floats(0, 9)), max_size=40), st.integers(1, 6), st.integers(1, 100))
@settings(max_examples=300, deadline=None)
def test_each_row_goes_to_the_cheapest_pack_with_room(rows, num_packs, budget):
    lengths, costs = [length for length, _ in rows], [cost for _, cost in rows]
    packs: list[list[int]] | None = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for i in sorted(range(len(rows)), key=lambda i: (-costs[i], i)):
        with_room = [p for p in range(num_packs) if not packs[p] or sum(lengths[j] for j in [*packs[p], i]) <= budget]
        if not with_room:
            packs = None
            break
        cheapest = min(with_room, key=lambda p: (totals[p], p))
        packs[cheapest].append(i)
        totals[cheapest] += costs[i]
    assert assignment._spread(lengths, costs, num_packs, budget) == packs


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_get_even_work_also_within_each_microbatch(num_ranks):
    result = plan(log_normal_lengths(40 * num_ranks), num_ranks=num_ranks, token_budget=8192)
    assert result.rank_imbalance < 1.05
    assert result.step_imbalance < 1.08
    assert result.packing_ratio > 0.7


def test_attention_counts_so_a_long_row_outweighs_the_same_tokens_in_short_rows():
    assert row_cost(16_000) > 1.5 * 16 * row_cost(1_000)
    lengths = [16_000, *[1_000] * 32]
    by_cost, by_tokens = (plan(lengths, num_ranks=2, token_budget=48_000, costs=costs) for costs in (None, lengths))
    tokens_beside_the_long_row = [
        next(sum(lengths[i] for i in ms[0]) for ms in p.microbatches if 0 in ms[0]) for p in (by_cost, by_tokens)
    ]
    assert tokens_beside_the_long_row[0] < tokens_beside_the_long_row[1]
    assert by_cost.rank_imbalance < 1.05


def test_metrics_are_exact_on_a_plan_made_by_hand():
    result = plan([60, 40, 50], num_ranks=2, token_budget=100, costs=[60, 40, 50])
    assert result.microbatches == (((1, 2),), ((0,),))  # 50 joins 40, not 60; the costliest pack goes first
    assert result.packing_ratio == 150 / 200
    assert result.rank_imbalance == 90 / 75


def test_fewer_rows_than_ranks_leave_empty_microbatches():
    result = plan([10], num_ranks=3, token_budget=100)
    assert sorted(result.microbatches) == [((),), ((),), ((0,),)]


def test_no_rows_still_run_one_microbatch():
    result = plan([], num_ranks=2, token_budget=100)
    assert result.microbatches == (((),), ((),))
    assert result.rank_imbalance == 1.0


def test_tight_packings_are_found_where_even_ones_do_not_fit():
    lengths = [6, 6, 6, 4, 4, 4]
    result = plan(lengths, num_ranks=1, token_budget=10)
    assert result.num_microbatches == 3
    assert result.packing_ratio == 1.0


def test_a_plan_needs_at_least_one_rank():
    with pytest.raises(ValueError, match="num_ranks must be at least 1"):
        plan([1], num_ranks=0, token_budget=1)
