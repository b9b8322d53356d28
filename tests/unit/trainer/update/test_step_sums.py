"""Sums over microbatches and ranks, and their refusal if names or shapes differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.update.components.component import Share, Sums, Term, mean_over
from lockstep.trainer.update.step_sums import StepSums
from tests.fixtures.distributed import FakeRank, on_ranks


def silent() -> Term:
    """Return a term that is only a key."""
    nothing = Share(loss_T=None)
    return Term(name="silent", weight=1.0, num_tokens=1, normalized=mean_over(1), share=lambda outputs: nothing)


def summed(rank: FakeRank, terms: list[Term], microbatches: list[dict[str, Tensor]]) -> Sums:
    with_gradient(rank)
    sums = StepSums(terms)
    for one in microbatches:
        for term in terms:
            sums.add(term, one)
    sums.gradient_norm(rank)
    return sums.total(rank)


def with_gradient(rank: FakeRank) -> None:
    for parameter in rank.module.parameters():
        parameter.grad = torch.ones_like(parameter)


def tensors(**values: float | list[float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def test_sums_of_each_term_add_up_over_microbatches_and_ranks_in_any_order_of_names() -> None:
    terms = [silent(), silent()]

    def work(rank: FakeRank) -> Sums:
        one = tensors(loss=1.0 + rank.rank, load=[1.0, 2.0])
        other = dict(reversed(tensors(loss=0.5, load=[10.0, 20.0]).items()))
        return summed(rank, terms, [one, other] if rank.rank else [other, one])

    for totals in on_ranks(2, work):
        assert list(totals) == terms
        for term in terms:
            assert totals[term]["loss"] == 4.0
            assert totals[term]["load"].tolist() == [22.0, 44.0]
            assert totals[term]["loss"].dtype == torch.float64


@pytest.mark.parametrize(
    ("of_ranks", "sentence"),
    [
        ([[{}, {}], [{"x": 1.0}, {"x": 1.0}]], "'x' in every microbatch of rank 1, in no microbatch of rank 0;"),
        ([[{"x": 1.0}, {}], [{"x": 1.0}, {}]], "'x' in some microbatches of rank 0 and 1;"),
        ([[{"x": 1.0}, {"x": 1.0}], [{}, {"x": 1.0}]], "'x' in every microbatch of rank 0, in some"),
        ([[{"x": 1.0}], [{"x": [1.0, 2.0]}]], "'x' in every microbatch of rank 0, in no microbatch of rank 1;"),
        ([[{"x": [1.0, 2.0]}], [{}]], r"'x' with the shape \[2\] in every microbatch of rank 0, in no"),
        ([[{"x": 1.0}, {"x": [1.0, 2.0]}], [{"x": 1.0}, {"x": [1.0, 2.0]}]], "'x' in some microbatches"),
        ([[{"a": 1.0, "y": 1.0}], [{"a": 1.0, "z": 1.0}]], "'y' in every microbatch of rank 0, in no"),
    ],
)
def test_every_rank_names_the_sum_that_is_not_reported_everywhere(
    of_ranks: list[list[dict[str, Any]]], sentence: str
) -> None:
    def work(rank: FakeRank) -> str:
        with pytest.raises(TrainingError, match=sentence) as caught:
            summed(rank, [silent()], [tensors(**one) for one in of_ranks[rank.rank]])
        return str(caught.value)

    first, second = on_ranks(2, work)
    assert first == second


def test_a_name_of_one_term_does_not_stand_for_that_of_another() -> None:
    terms = [silent(), silent()]

    def work(rank: FakeRank) -> None:
        with_gradient(rank)
        sums = StepSums(terms)
        for number, term in enumerate(terms):
            sums.add(term, tensors(x=1.0) if number == rank.rank else {})
        with pytest.raises(TrainingError, match="'x' in every microbatch of rank 0, in no microbatch of rank 1"):
            sums.gradient_norm(rank)

    on_ranks(2, work)


def test_one_rank_alone_refuses_names_that_differ_between_its_microbatches() -> None:
    with pytest.raises(TrainingError, match="'x' in some microbatches of rank 0; expected"):
        summed(FakeRank(), [silent()], [tensors(x=1.0), {}])
