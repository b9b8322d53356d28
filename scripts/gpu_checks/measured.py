"""Measured numbers of a check, each with its expectation and whether it was met."""

from __future__ import annotations

from dataclasses import dataclass


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


def shown(name: str, value: float | str) -> Measured:
    """Show a value without an expectation."""
    return Measured(name=name, value=value)
