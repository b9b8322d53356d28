"""Errors in units of floors, on values that are written down."""

from __future__ import annotations

import pytest
import torch

from lockstep.lab.locate.comparison import MIN_FLOOR_EPS, Errors, compare, compare_all
from lockstep.lab.locate.landmarks import Landmark, Part

AT = Landmark("model.layers.3.self_attn.o_proj", Part.OUTPUT)
TRUTH = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
SCALE = TRUTH.square().mean().sqrt()
EPS = torch.finfo(torch.float32).eps


def errors(*, engine: float = 0.0, trainer: float = 0.0, floor: float = 0.0) -> Errors:
    """Shift each value by this many parts of the truth's root mean square."""
    values = {
        "engine": TRUTH + engine * SCALE,
        "trainer": TRUTH + trainer * SCALE,
        "engine_floor": TRUTH + floor * SCALE,
        "trainer_floor": TRUTH + floor * SCALE,
    }
    return compare(TRUTH, landmark=AT, engine_dtype=torch.float32, trainer_dtype=torch.float32, **values)


def test_errors_are_relative_to_the_truth() -> None:
    found = errors(engine=1e-3, trainer=2e-3, floor=1e-3)
    assert (found.engine, found.trainer) == (pytest.approx(1e-3), pytest.approx(2e-3))
    assert (found.engine_ratio, found.trainer_ratio) == (pytest.approx(1), pytest.approx(2))


@pytest.mark.parametrize(
    ("engine", "trainer", "leaves", "side"),
    [(1, 1, False, "trainer"), (3, 1, True, "engine"), (1, 3, True, "trainer"), (2.4, 2.4, False, "trainer")],
)
def test_the_side_that_is_further_from_the_truth_leaves_its_floor(
    engine: float, trainer: float, leaves: bool, side: str
) -> None:
    found = errors(engine=engine * 1e-5, trainer=trainer * 1e-5, floor=1e-5)
    assert (found.leaves_floor, found.side) == (leaves, side)


def test_an_operator_without_rounding_has_the_floor_of_its_dtype() -> None:
    found = errors(engine=EPS)
    assert found.engine_floor == pytest.approx(MIN_FLOOR_EPS * EPS)
    assert found.engine_ratio == pytest.approx(1 / MIN_FLOOR_EPS, rel=1e-3)


def test_each_side_has_the_floor_of_its_own_dtype() -> None:
    found = compare(
        TRUTH, landmark=AT, engine=TRUTH + 1e-3, trainer=TRUTH + 1e-3, engine_floor=TRUTH, trainer_floor=TRUTH,
        engine_dtype=torch.bfloat16, trainer_dtype=torch.float32,
    )  # fmt: skip
    assert found.engine_ratio < 1 < found.trainer_ratio


def test_a_value_that_is_not_finite_leaves_every_floor() -> None:
    found = compare(
        TRUTH, landmark=AT, engine=TRUTH * torch.nan, trainer=TRUTH, engine_floor=TRUTH, trainer_floor=TRUTH,
        engine_dtype=torch.float32, trainer_dtype=torch.float32,
    )  # fmt: skip
    assert (found.leaves_floor, found.side) == (True, "engine")


def test_the_error_is_known_at_each_position() -> None:
    trainer = TRUTH.clone()
    trainer[4] += 1e-2
    found = compare(
        TRUTH, landmark=AT, engine=TRUTH, trainer=trainer, engine_floor=TRUTH, trainer_floor=TRUTH,
        engine_dtype=torch.float32, trainer_dtype=torch.float32,
    )  # fmt: skip
    assert found.ratio_T.argmax().item() == 4
    assert found.ratio_T.count_nonzero().item() == 1


def test_landmarks_that_a_side_lacks_are_left_out_and_the_order_is_the_trainers() -> None:
    first, second, third = (Landmark(f"model.layers.{n}.mlp", Part.OUTPUT) for n in range(3))
    all_three = {third: TRUTH, first: TRUTH, second: TRUTH}
    found = compare_all(
        all_three, engine={first: TRUTH, third: TRUTH}, trainer=all_three, engine_floor=all_three,
        trainer_floor=all_three, engine_dtype=torch.float32, trainer_dtype=torch.float32,
    )  # fmt: skip
    assert [one.landmark for one in found] == [third, first]
