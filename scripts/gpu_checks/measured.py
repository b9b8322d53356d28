"""Measured numbers of a check, each with its expectation and whether it was met."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MEAN, LARGEST = 2.0, 3.0
"""Accepted multiples of a measured floor: of its mean, and of its largest value, which varies more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured value."""

    name: str
    value: float | str
    expected: str = ""
    is_met: bool = True
    """True also for values without an expectation."""


def below(name: str, value: float, bound: float) -> Measured:
    """Expect a value below the bound. NaN fails."""
    return Measured(name=name, value=value, expected=f"< {bound:g}", is_met=bool(value < bound))


def above(name: str, value: float, bound: float) -> Measured:
    """Expect a value above the bound. NaN fails."""
    return Measured(name=name, value=value, expected=f"> {bound:g}", is_met=bool(value > bound))


def equal(name: str, value: float | str, expected: float | str) -> Measured:
    """Expect exactly this value."""
    return Measured(name=name, value=value, expected=f"= {expected}", is_met=value == expected)


def unbounded(name: str, value: float | str) -> Measured:
    """Show a value without an expectation."""
    return Measured(name=name, value=value)


def within_floor(name: str, differences: torch.Tensor, floor: torch.Tensor, *, least: float) -> list[Measured]:
    """Expect differences in logprobs that are no larger than a floor measured on the same tokens.

    least: mean that is accepted where the floor is lower, for example 0 because both sides compute alike.
    """
    mean, largest = max(MEAN * floor.mean().item(), least), max(LARGEST * floor.max().item(), 10 * least)
    return [
        below(f"{name}: mean |Δ|", differences.mean().item(), mean),
        below(f"{name}: largest |Δ|", differences.max().item(), largest),
    ]
