"""Bundles: rows that stay in one pack, so that their common prefix is computed once.

A bundle is a run of rows in the order of their ids. Longer runs compute less in all, shorter ones divide more evenly
over ranks. So `plan_bundles` tries several sizes and takes the fastest plan. If rows share nothing, every bundle is one
row, and the plan is that of `trainer/batch/assignment.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lockstep.trainer.batch.assignment import Plan, plan, row_cost
from lockstep.trainer.batch.prefixes import by_ids, num_shared

PARTS_PER_RANK = (1, 2, 4, 8)
"""Divisors of a rank's fair share of tokens that give the tried limits of a bundle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Rows that go into one pack."""

    rows: tuple[int, ...]
    num_tokens: int
    """Number of tokens computed after prefix sharing."""
    cost: float
    """Time in the unit of `row_cost`."""


def plan_bundles(rows: Sequence[np.ndarray], *, num_ranks: int, token_budget: int) -> Plan:
    """Assign every row to a rank and a microbatch as `plan`, but rows with a common prefix together.

    token_budget: largest number of tokens computed in a pack.
    """
    order = by_ids(rows)
    lengths = [len(rows[i]) for i in order]
    overlaps = [0, *(num_shared(rows[a], rows[b]) for a, b in pairwise(order))][: len(order)]
    fair_share = -(-(sum(lengths) - sum(overlaps)) // num_ranks)
    limits = {
        min(token_budget, max([-(-fair_share // parts), *lengths]))
        for parts in (PARTS_PER_RANK if num_ranks > 1 else (1,))
    }
    plans = []
    for limit in sorted(limits, reverse=True):
        bundles = _bundles(order, lengths, overlaps, limit=limit)
        candidate = plan(
            [bundle.num_tokens for bundle in bundles],
            num_ranks=num_ranks,
            token_budget=token_budget,
            costs=[bundle.cost for bundle in bundles],
        )
        plans.append(_of_rows(candidate, bundles, num_tokens=sum(lengths)))
    return min(plans, key=lambda candidate: candidate.cost)


def _bundles(order: Sequence[int], lengths: Sequence[int], overlaps: Sequence[int], *, limit: int) -> list[Bundle]:
    """Divide rows into runs of at most `limit` computed tokens, or one row; all arguments are in the order of ids."""
    bundles = []
    start = 0
    while start < len(order):
        end, num_tokens = start + 1, lengths[start]
        while end < len(order) and overlaps[end] and num_tokens + lengths[end] - overlaps[end] <= limit:
            num_tokens += lengths[end] - overlaps[end]
            end += 1
        if end < len(order) and overlaps[end]:  # the limit ends the run: cut where the least is recomputed
            end = min(range(start + (end - start + 1) // 2, end + 1), key=lambda i: (overlaps[i], -i))
        behind = range(start + 1, end)
        bundles.append(
            Bundle(
                rows=tuple(order[start:end]),
                num_tokens=lengths[start] + sum(lengths[i] - overlaps[i] for i in behind),
                cost=row_cost(lengths[start]) + sum(row_cost(lengths[i]) - row_cost(overlaps[i]) for i in behind),
            )
        )
        start = end
    return bundles


def _of_rows(of_bundles: Plan, bundles: Sequence[Bundle], *, num_tokens: int) -> Plan:
    """Replace bundles by their rows."""
    num_computed = sum(bundle.num_tokens for bundle in bundles)
    return replace(
        of_bundles,
        microbatches=tuple(
            tuple(tuple(sorted(row for i in pack for row in bundles[i].rows)) for pack in packs)
            for packs in of_bundles.microbatches
        ),
        shared_fraction=1 - num_computed / num_tokens if num_tokens else 0.0,
    )
