"""Learning rates of the first and the last update and at the end of the warm-up, and periodic actions."""

import pytest
import torch
from transformers import get_scheduler

from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.update.schedule import is_due, learning_rate


def lr(update: int, schedule: str = "linear", warmup: int = 0, total: int = 11, final: float = 0.0) -> float:
    settings = OptimizerConfig(lr=1.0, schedule=schedule, warmup_updates=warmup, final_lr_fraction=final)
    return learning_rate(update, settings, total_updates=total)


def test_the_first_update_of_a_warm_up_already_moves() -> None:
    assert [lr(u, warmup=4) for u in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_linear_falls_by_as_much_with_each_update_and_the_last_one_still_moves() -> None:
    """u of N updates have 1 − u/N, as in lm-human-preferences (a polynomial decay over all updates)."""
    assert [lr(u, total=4) for u in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert lr(4, total=4) == 0.0
    assert [lr(u, total=6, warmup=2) for u in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert lr(4, total=4, final=0.1) == pytest.approx(0.1)


def test_cosine_passes_half_way_at_half_time() -> None:
    assert lr(5, "cosine", total=10) == pytest.approx(0.5)
    assert 0 < lr(9, "cosine", total=10) < 0.03
    assert lr(10, "cosine", total=10) == pytest.approx(0.0)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_equal_those_of_transformers(schedule: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=7)
    for update in range(7):
        assert lr(update, schedule, total=7) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="'constnat'; expected constant, linear or cosine"):
        lr(1, "constnat")


def test_constant_stays() -> None:
    assert {lr(u, "constant") for u in range(11)} == {1.0}


def test_updates_past_the_end_stay_at_the_end() -> None:
    assert lr(50) == 0.0


def test_steps_of_several_updates_do_not_miss_a_periodic_action() -> None:
    """16 updates a step and a checkpoint every 20: after the second step, not only after the fifth."""
    due = [after for after in range(16, 97, 16) if is_due(20, before=after - 16, after=after)]
    assert due == [32, 48, 64, 80]  # each passes 20, 40, 60, 80; 96 passes none
    assert not is_due(20, before=40, after=40), "after a step without an update nothing is due again"
    assert not is_due(0, before=0, after=7)
