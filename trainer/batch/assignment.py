"""Assignment of rows to ranks and microbatches: even work everywhere, no row dropped.

Losses are divided by one denominator of the whole step (trainer/objective/loss_normalization.py), so rows may go to any
rank and microbatch without changing the update. The plan balances time: a row of twice the length costs more than twice
as much, and ranks wait for each other in every microbatch (ZeRO-3 gathers parameters collectively), so both the totals
of ranks and the packs that run at the same time must be even.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from lockstep.trainer.batch.packing import pack

ATTENTION_CROSSOVER = 24_576
"""Row length at which causal attention costs as much as everything else. Per token a layer spends 24 d² FLOPs on its
weights (12 d² parameters, as in most decoders) and 2 d L on attention to half of L tokens: equal at L = 12 d, taken
here at d = 2048. Twice or half of it changes a plan little."""


class RankShare(NamedTuple):
    """The part of a plan that one rank computes."""

    packs: tuple[tuple[int, ...], ...]
    """Row indices of each microbatch; equally many microbatches on all ranks."""
    metrics: Mapping[str, float]
    """Metrics of the whole plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Assignment of rows. Every rank has the same number of microbatches; empty ones run dummy packs."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """`microbatches[rank][m]` holds row indices."""
    packing_ratio: float
    """Tokens over ranks × microbatches × token budget. 1 is full; above 1 if rows exceed the budget."""
    rank_imbalance: float
    """Cost of the busiest rank over the mean of ranks. 1 is even."""
    step_imbalance: float
    """`cost` over the mean of ranks. 1 is even."""
    num_oversized: int
    """Number of rows above the token budget, each in its own microbatch; they may need more memory than planned."""
    cost: float
    """Time of all microbatches if ranks wait for the slowest one in each, in the unit of `row_cost`."""
    shared_fraction: float = 0.0
    """Share of tokens that are not computed, because another row of the pack has them too."""

    @property
    def num_microbatches(self) -> int:
        return len(self.microbatches[0])

    def share(self, rank: int) -> RankShare:
        return RankShare(packs=self.microbatches[rank], metrics=self.metrics())

    def metrics(self) -> dict[str, float]:
        return {
            "perf/packing_ratio": self.packing_ratio,
            "perf/rank_imbalance": self.rank_imbalance,
            "perf/step_imbalance": self.step_imbalance,
            "perf/oversized_rows": float(self.num_oversized),
            "perf/microbatches": float(self.num_microbatches),
            "perf/shared_tokens_frac": self.shared_fraction,
        }


def row_cost(length: int) -> float:
    """Return the time of a row, in units of the time of a token without attention."""
    return length * (1 + length / ATTENTION_CROSSOVER)


def plan(
    row_lengths: Sequence[int],
    *,
    num_ranks: int,
    token_budget: int,
    costs: Sequence[float] | None = None,
) -> Plan:
    """Assign every row to a rank and a microbatch. Deterministic.

    First-fit decreasing gives the number of packs, rounded up to a multiple of the ranks. Rows are spread over them
    longest processing time first (Graham 1969: at most 4/3 of the optimum), within the token budget. Packs of similar
    cost then form a microbatch, and each goes to the rank with the least work so far.

    Args:
        row_lengths: tokens of all rows of one optimizer step, over all ranks; none gives one microbatch of dummies.
        token_budget: largest number of tokens in a pack.
        costs: by default `row_cost` of each; other ones for bundles (trainer/batch/prefix_bundles.py).

    Raises `ValueError` if num_ranks or token_budget is below 1.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, found {num_ranks}")
    costs = costs or [row_cost(length) for length in row_lengths]
    dense = pack(row_lengths, token_budget)
    num_microbatches = max(1, -(-len(dense) // num_ranks))
    packs = _spread(row_lengths, costs, num_microbatches * num_ranks, token_budget)
    if packs is None:  # even packs do not always fit where dense ones do
        packs = dense + [[] for _ in range(num_microbatches * num_ranks - len(dense))]

    pack_costs = [sum(costs[i] for i in members) for members in packs]
    by_cost = sorted(range(len(packs)), key=lambda p: (-pack_costs[p], packs[p]))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    slowest = 0.0
    for m in range(num_microbatches):
        wave = by_cost[m * num_ranks : (m + 1) * num_ranks]
        slowest += pack_costs[wave[0]]
        for p, rank in zip(wave, sorted(range(num_ranks), key=lambda r: (totals[r], r)), strict=True):
            ranks[rank].append(tuple(sorted(packs[p])))
            totals[rank] += pack_costs[p]

    mean = sum(totals) / num_ranks
    return Plan(
        microbatches=tuple(tuple(microbatches) for microbatches in ranks),
        packing_ratio=sum(row_lengths) / (num_ranks * num_microbatches * token_budget),
        rank_imbalance=max(totals) / mean if mean else 1.0,
        step_imbalance=slowest / mean if mean else 1.0,
        num_oversized=sum(length > token_budget for length in row_lengths),
        cost=slowest,
    )


def _spread(
    row_lengths: Sequence[int], costs: Sequence[float], num_packs: int, token_budget: int
) -> list[list[int]] | None:
    """Put each row, costliest first, into the cheapest of `num_packs` packs with room; None if there is no room."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    tokens = [0] * num_packs
    candidates = [(0.0, p) for p in range(num_packs)]  # heap: the cheapest one first
    too_full: list[tuple[int, tuple[float, int]]] = []  # heap of candidates without room: the one with most first
    for i in sorted(range(len(row_lengths)), key=lambda i: (-costs[i], i)):
        while too_full and row_lengths[i] <= -too_full[0][0]:
            heappush(candidates, heappop(too_full)[1])
        while True:
            if not candidates:
                return None
            total, p = heappop(candidates)
            if not packs[p] or tokens[p] + row_lengths[i] <= token_budget:
                break
            heappush(too_full, (tokens[p] - token_budget, (total, p)))
        packs[p].append(i)
        tokens[p] += row_lengths[i]
        heappush(candidates, (total + costs[i], p))
    return packs
