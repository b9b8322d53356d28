"""`Distributed.together`: a failure on one rank is the same error on all."""

from __future__ import annotations

import pytest

from rollout.errors import ConfigError, EngineError, LockstepError
from trainer.distributed.distributed import Distributed


class SecondRank(Distributed):
    """Rank 1 of two, while rank 0 reports the given error."""

    def __init__(self, report: bytes) -> None:
        self._report = report

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        return [self._report, payload]


@pytest.mark.parametrize("kind", [EngineError, ConfigError])
def test_an_error_of_another_rank_keeps_its_type_and_message(kind: type[LockstepError]) -> None:
    with pytest.raises(kind) as raised:
        SecondRank(f"{kind.__name__}: the engine: is dead\nlog".encode()).together(lambda: 1)
    assert type(raised.value) is kind
    assert str(raised.value) == "the engine: is dead\nlog"


def test_an_error_of_a_foreign_type_is_reported_with_its_rank() -> None:
    with pytest.raises(LockstepError, match=r"^rank 0 failed: ZeroDivisionError: division by zero$"):
        SecondRank(b"ZeroDivisionError: division by zero").together(lambda: 1)


def test_an_error_of_this_rank_is_raised_unchanged() -> None:
    own = ValueError("mine")

    def fail() -> None:
        raise own

    with pytest.raises(ValueError, match="mine") as raised:
        SecondRank(b"").together(fail)
    assert raised.value is own
