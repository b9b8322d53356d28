"""The tree of ranks: what they agree on, with how many messages, and what they say of a rank that does not answer.

Ranks are threads here; `tests/unit/trainer/collect/test_several_ranks.py` lets real ones die.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from lockstep.rollout.errors import RankLostError
from lockstep.trainer.distributed.rank_tree import RankTree
from tests.fixtures.distributed import FakeRank, on_ranks


@pytest.mark.parametrize("ranks", range(2, 10))
def test_all_ranks_get_the_highest_number_of_any(ranks: int) -> None:
    def agree(rank: FakeRank) -> list[int]:
        return (
            RankTree(rank)
            .highest(torch.tensor([10 - rank.rank, *(int(rank.rank == n) for n in range(ranks))]))
            .tolist()
        )

    assert on_ranks(ranks, agree) == [[10, *[1] * ranks]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 8, 40])
def test_a_rank_talks_to_three_others_at_most_and_once_in_each_direction(ranks: int) -> None:
    def agree(rank: FakeRank) -> tuple[Counter[int], Counter[int]]:
        counted: tuple[Counter[int], Counter[int]] = Counter(), Counter()
        send, receive = rank.send, rank.receive
        rank.send = lambda tensor, other: (counted[0].update([other]), send(tensor, other))[1]  # type: ignore[method-assign]
        rank.receive = lambda tensor, other: (counted[1].update([other]), receive(tensor, other))[1]  # type: ignore[method-assign]
        RankTree(rank).highest(torch.zeros(1, dtype=torch.int64))
        return counted

    counts = on_ranks(ranks, agree)
    assert sum(sent.total() for sent, _ in counts) == 2 * (ranks - 1), "no tree has fewer"
    for sent, received in counts:
        assert sent == received
        assert set(sent.values()) == {1}
        assert len(sent) <= 3


def late(*_: object) -> Callable[[], object]:
    raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation")


def test_a_rank_that_does_not_answer_one_other_is_an_error_on_all() -> None:
    def agree(rank: FakeRank) -> str:
        receive = rank.receive
        rank.receive = lambda tensor, other: (late if (rank.rank, other) == (1, 3) else receive)(tensor, other)  # type: ignore[method-assign]
        with pytest.raises(RankLostError) as raised:
            RankTree(rank).highest(torch.zeros(1, dtype=torch.int64))
        return str(raised.value)

    found = on_ranks(5, agree)
    assert found.pop(1).startswith(
        "rank 1: rank 3 does not answer: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out"
    )
    assert all("rank 3 is lost: its process or its machine has ended. Its log says why" in text for text in found)


def test_a_rank_that_is_lost_on_the_way_down_is_an_error_of_the_next_meeting() -> None:
    """The others already know the result of this one, and would wait in the next one for a rank that raises."""

    def agree(rank: FakeRank) -> list[int]:
        send, tree = rank.send, RankTree(rank)
        rank.send = lambda tensor, other: (send(tensor, other), rank.rank or late())[0]  # type: ignore[method-assign]
        result = tree.highest(torch.tensor([rank.rank])).tolist()
        with pytest.raises(RankLostError):
            tree.highest(torch.tensor([rank.rank]))
        return result

    assert on_ranks(3, agree) == [[2]] * 3
