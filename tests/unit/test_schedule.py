"""Learning rates at the places where schedules go wrong: the first, the last, the end of the warm-up."""

import pytest

from trainer.schedule import is_due, learning_rate


def lr(update: int, schedule: str = "linear", warmup: int = 0, total: int = 11, final: float = 0.0) -> float:
    return learning_rate(
        update, peak=1.0, schedule=schedule, warmup_updates=warmup, total_updates=total, final_fraction=final
    )


def test_the_first_update_of_a_warm_up_already_moves() -> None:
    assert [lr(u, warmup=4) for u in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_linear_ends_at_the_final_fraction() -> None:
    assert lr(0) == 1.0
    assert lr(5) == pytest.approx(0.5)
    assert lr(10) == 0.0
    assert lr(10, final=0.1) == pytest.approx(0.1)


def test_cosine_passes_half_way_at_half_time() -> None:
    assert lr(5, "cosine") == pytest.approx(0.5)
    assert lr(10, "cosine") == pytest.approx(0.0)


def test_constant_stays() -> None:
    assert {lr(u, "constant") for u in range(11)} == {1.0}


def test_updates_past_the_end_stay_at_the_end() -> None:
    assert lr(50) == 0.0


def test_what_is_due_every_few_updates_is_not_missed_by_steps_of_several() -> None:
    """16 updates a step and a checkpoint every 20: after the second step, not only after the fifth."""
    due = [after for after in range(16, 97, 16) if is_due(20, before=after - 16, after=after)]
    assert due == [32, 48, 64, 80]  # each passes 20, 40, 60, 80; 96 passes none
    assert not is_due(20, before=40, after=40), "a step without an update makes nothing due a second time"
    assert not is_due(0, before=0, after=7)
