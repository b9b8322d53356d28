"""Sums of an optimizer step over its microbatches and ranks, which all must report the same names.

    microbatches ─► add ─► names of this rank ─► compared over ranks ─► total

Ranks add up one flat vector, so a name that only some of them have would shift the values of all others, or leave ranks
waiting for each other. A rank's names travel as a digest in the collective of the gradient norm. Only if digests differ
are the names themselves gathered, for the message.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.distributed.distributed import Distributed, RanksDiffer
from lockstep.trainer.update.components.component import Reporter, Sums


class StepSums:
    """Sums by term and name, on the device, in float64."""

    def __init__(self, terms: Sequence[Reporter]) -> None:
        """terms: all token sets and their terms, in the same order on every rank."""
        self._sums: dict[Reporter, dict[str, Tensor]] = {term: {} for term in terms}
        self._numbers = {term: number for number, term in enumerate(self._sums)}
        self._microbatches: Counter[int] = Counter()
        """Microbatches by number of the term."""
        self._reported: Counter[tuple[int, str, tuple[int, ...]]] = Counter()
        """Microbatches that reported a name with a shape, by number of the term, name and shape."""

    def add(self, term: Reporter, sums: Mapping[str, Tensor]) -> None:
        """Add the sums of one microbatch."""
        number, own = self._numbers[term], self._sums[term]
        self._microbatches[number] += 1
        for name, value in sums.items():
            self._reported[number, name, tuple(value.shape)] += 1
            if name not in own:
                own[name] = value.detach().double()
            elif own[name].shape == value.shape:  # `total` refuses others
                own[name] = own[name] + value.detach().double()

    def gradient_norm(self, distributed: Distributed) -> float:
        """Return the gradient norm of the step, and compare the names of all ranks on the way; a collective.

        Raises `TrainingError` on all ranks if a name is missing in a microbatch of a rank.
        """
        own = self._names()
        try:
            norm = distributed.gradient_norm(claim=json.dumps(own).encode())
        except RanksDiffer as error:
            reports = [json.loads(report) for report in distributed.gather_bytes(json.dumps(own).encode())]
            raise TrainingError(_gap(reports)) from error
        if not all(own.values()):
            raise TrainingError(_gap([own] * distributed.world_size))
        return norm

    def total(self, distributed: Distributed) -> Sums:
        """Return float64 sums over ranks, on the host; a collective, after `gradient_norm`."""
        entries = list(self._entries())
        flat = torch.cat([torch.zeros(0).double(), *(value.reshape(-1).cpu() for *_, value in entries)])
        parts = distributed.sum(flat).split([value.numel() for *_, value in entries])
        totals: dict[Reporter, dict[str, Tensor]] = {term: {} for term in self._sums}
        for (term, name, value), part in zip(entries, parts, strict=True):
            totals[term][name] = part.view(value.shape)
        return totals

    def _names(self) -> dict[str, bool]:
        """Return by number of the term, name and shape if every microbatch of this rank reported it."""
        return {
            f"{number} {name} {list(shape)}": count == self._microbatches[number]
            for (number, name, shape), count in sorted(self._reported.items())
        }

    def _entries(self) -> Iterator[tuple[Reporter, str, Tensor]]:
        """Yield all sums in an order on which all ranks agree."""
        for term, of_term in self._sums.items():
            for name in sorted(of_term):
                yield term, name, of_term[name]


def _gap(reports: Sequence[Mapping[str, bool]]) -> str:
    """Say which sum which rank does not report in every microbatch. reports: `StepSums._names` of each rank."""
    key = next(key for key in dict.fromkeys(chain(*reports)) if not all(report.get(key) for report in reports))
    _, _, name = key.partition(" ")
    name, _, shape = name.rpartition(" [")
    suffix = f" with the shape [{shape}" if shape != "]" else ""
    ranks = {
        how: [str(rank) for rank, report in enumerate(reports) if report.get(key) is status]
        for how, status in (("every microbatch", True), ("some microbatches", False), ("no microbatch", None))
    }
    places = ", ".join(f"in {how} of rank {' and '.join(numbers)}" for how, numbers in ranks.items() if numbers)
    return (
        f"a loss reports the metric {name!r}{suffix} {places}; expected the same names and shapes in every microbatch "
        "of every rank: let the function of algorithm.loss report a sum of 0 where it has no token to count"
    )
