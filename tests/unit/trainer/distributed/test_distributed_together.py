"""`Distributed.together`: an error of one rank is raised on all ranks."""

from __future__ import annotations

import pytest

from lockstep.rollout.errors import ConfigError, EngineError, LockstepError
from tests.fixtures.distributed import FakeRank, on_ranks


def raised_by_ranks(failure: BaseException) -> list[BaseException]:
    """The error that each of two ranks raises when work fails on rank 0."""

    def run(rank: FakeRank) -> BaseException:
        def work() -> None:
            if rank.is_main:
                raise failure

        with pytest.raises(type(failure) if rank.is_main else LockstepError) as raised:
            rank.together(work)
        return raised.value

    return on_ranks(2, run)


@pytest.mark.parametrize("kind", [EngineError, ConfigError])
def test_an_error_of_another_rank_has_its_type_and_its_message(kind: type[LockstepError]) -> None:
    _, found = raised_by_ranks(kind("the engine: is dead\nlog"))
    assert type(found) is kind
    assert str(found) == "the engine: is dead\nlog"


def test_an_error_of_another_type_names_the_rank_that_failed() -> None:
    _, found = raised_by_ranks(ZeroDivisionError("division by zero"))
    assert type(found) is LockstepError
    assert str(found) == "rank 0 failed: ZeroDivisionError: division by zero"


def test_the_rank_that_failed_raises_its_own_error() -> None:
    own = ValueError("mine")
    assert raised_by_ranks(own)[0] is own


def test_every_rank_gets_its_own_result() -> None:
    assert on_ranks(2, lambda rank: rank.together(lambda: rank.rank)) == [0, 1]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ValueError("a model wrote \ud800"), "rank 0 failed: ValueError: a model wrote \\ud800"),
        (EngineError("answered \x1b[2J\udfff"), "answered \\x1b[2J\\udfff"),
        (Unprintable(), "rank 0 failed: Unprintable: (its message cannot be printed)"),
        (ValueError(), "rank 0 failed: ValueError: "),
        (SystemExit(3), "rank 0 failed: SystemExit: 3"),
    ],
    ids=["surrogate", "engine", "unprintable", "empty", "exit"],
)
def test_no_failure_is_lost_whatever_its_text(failure: BaseException, expected: str) -> None:
    own, found = raised_by_ranks(failure)
    assert own is failure
    assert str(found) == expected


def test_a_rank_does_not_wait_for_one_whose_error_is_very_long() -> None:
    _, found = raised_by_ranks(ValueError("begin" + "x" * 10_000_000 + "end"))
    assert len(str(found)) < 30_000
    assert str(found).endswith("end")


def test_a_failed_rank_leaves_process_groups_open_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(FakeRank, "close", lambda self: closed.append(self.world_size))
    for world_size in (1, 2):
        with FakeRank(world_size=world_size):
            pass
        with pytest.raises(EngineError), FakeRank(world_size=world_size):
            raise EngineError("dead")
    assert closed == [1, 1, 2], "closing waits for ranks that are in a collective"
