"""Comparison of both sides with the truth at every landmark, in units of their rounding.

The truth is the same operator in float64, on the engine's inputs. The floor of a side is the error of that operator in
the side's dtype. An operator that computes what it should is at 0.6 to 1.0 floors; the smallest fault that was planted
is at 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.lab.locate.landmarks import Landmark

MAX_RATIO = 2.5
"""Error of an operator, in floors, above which it leaves them."""
MIN_FLOOR_EPS = 0.3
"""Least floor in units of the dtype's epsilon: rounding the result alone gives that much."""

Side = Literal["engine", "trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of one landmark. All are root mean squares relative to the root mean square of the truth."""

    landmark: Landmark
    engine: float
    trainer: float
    engine_floor: float
    trainer_floor: float
    engine_T: Tensor
    """(T,) error at each position, relative to the whole landmark."""
    trainer_T: Tensor

    @property
    def engine_ratio(self) -> float:
        return self.engine / self.engine_floor

    @property
    def trainer_ratio(self) -> float:
        return self.trainer / self.trainer_floor

    @property
    def side(self) -> Side:
        """The side that is further from the truth, in its floors."""
        return "engine" if self.engine_ratio > self.trainer_ratio else "trainer"

    @property
    def ratio(self) -> float:
        return max(self.engine_ratio, self.trainer_ratio)

    @property
    def leaves_floor(self) -> bool:
        return self.ratio > MAX_RATIO

    @property
    def ratio_T(self) -> Tensor:
        """(T,) the larger error at each position, in floors."""
        return torch.maximum(self.engine_T / self.engine_floor, self.trainer_T / self.trainer_floor)


def compare(
    truth: Tensor,
    *,
    landmark: Landmark,
    engine: Tensor,
    trainer: Tensor,
    engine_floor: Tensor,
    trainer_floor: Tensor,
    engine_dtype: torch.dtype,
    trainer_dtype: torch.dtype,
) -> Errors:
    """Compare (T, C) values of a landmark. engine_floor, trainer_floor: its values in the dtypes of the sides.

    A value that is not finite on a side gives that side an infinite error.
    """
    truth = truth.double()
    scale = truth.square().mean().sqrt().item() or 1.0

    def error(values: Tensor) -> float:
        relative = (values.double() - truth).square().mean().sqrt().item() / scale
        return relative if math.isfinite(relative) else math.inf

    def by_position(values: Tensor) -> Tensor:
        return (values.double() - truth).square().mean(-1).sqrt() / scale

    return Errors(
        landmark=landmark,
        engine=error(engine),
        trainer=error(trainer),
        engine_floor=max(error(engine_floor), MIN_FLOOR_EPS * torch.finfo(engine_dtype).eps),
        trainer_floor=max(error(trainer_floor), MIN_FLOOR_EPS * torch.finfo(trainer_dtype).eps),
        engine_T=by_position(engine),
        trainer_T=by_position(trainer),
    )


def compare_all(
    truth: Mapping[Landmark, Tensor],
    *,
    engine: Mapping[Landmark, Tensor],
    trainer: Mapping[Landmark, Tensor],
    engine_floor: Mapping[Landmark, Tensor],
    trainer_floor: Mapping[Landmark, Tensor],
    engine_dtype: torch.dtype,
    trainer_dtype: torch.dtype,
) -> list[Errors]:
    """Compare at the landmarks that all have, in the order of the trainer's computation."""
    return [
        compare(
            truth[landmark],
            landmark=landmark,
            engine=engine[landmark],
            trainer=trainer[landmark],
            engine_floor=engine_floor[landmark],
            trainer_floor=trainer_floor[landmark],
            engine_dtype=engine_dtype,
            trainer_dtype=trainer_dtype,
        )
        for landmark in trainer
        if all(landmark in values for values in (truth, engine, engine_floor, trainer_floor))
    ]
