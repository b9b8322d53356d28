"""Declaration of a setting: default, meaning, range, and the condition under which it has an effect.

Checks (`trainer/checks`), docs/settings.md and the command line read these declarations. Imports nothing heavy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from lockstep.rollout.system.user_functions import names_function

NOT_MEASURED = "not measured on a GPU yet"
"""Reason for which a setting is experimental."""


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """The condition under which a setting has an effect."""

    instead: str
    """Overrides that fulfill the condition, as typed on the command line."""
    holds: Callable[[Any], bool]
    """Takes the whole configuration."""
    because: tuple[str, ...] = ()
    """Settings shown as the reason; by default those in `instead`."""

    def causes(self) -> tuple[str, ...]:
        return self.because or tuple(re.findall(r"([\w.]+)=", self.instead))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Declaration without name and type."""

    default: Any
    description: str
    """One phrase, with the unit in brackets."""
    choices: tuple[Any, ...] | None = None
    or_function: bool = False
    """True if `path/to/file.py:function` is a value, too."""
    is_path: bool = False
    """True if it may name a file or directory to read, which a settings file may have beside it."""
    low: float | None = None
    """Smallest value."""
    high: float | None = None
    """Largest value."""
    above: float | None = None
    """Exclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""
    length: int | None = None
    """Number of entries of a list; bounds apply to each entry."""
    may_be_infinite: bool = False
    when: When | None = None
    """None: always."""
    example: str | None = None
    """Override to paste, of a setting that has no default: its value here is empty."""
    experimental: str | None = None
    """Reason why it may change with any version (docs/stability.md), as a phrase; None: stable."""

    def problem(self, value: Any) -> str | None:
        """Return the problem of a value as a phrase that follows it, or None."""
        if self.or_function and names_function(value):
            return None
        if self.choices and value not in self.choices:
            other = ", or path/to/file.py:function" if self.or_function else ""
            return f"is not one of {', '.join(map(str, self.choices))}{other}"
        if self.length is not None:
            if len(value) == self.length and all(self.problem_of_number(entry) is None for entry in value):
                return None
            return f"must be {self.length} numbers, each {self.range}"
        return self.problem_of_number(value)

    def problem_of_number(self, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not self.may_be_infinite)):
            return "is not a finite number"
        return None if self._is_inside(value) else f"must be {self.range}"

    def _is_inside(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @property
    def range(self) -> str:
        """The range in words, or an empty text."""
        if self.low is not None and self.high is not None:
            return f"between {self.low} and {self.high}"
        bounds = {"at least": self.low, "at most": self.high, "greater than": self.above, "less than": self.below}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)


def setting(default: Any, description: str, **declared: Any) -> Any:
    """Return a dataclass field with its declaration. declared: other fields of `Setting`."""
    return as_field(Setting(default=default, description=description, **declared))


def as_field(declaration: Setting) -> Any:
    default, metadata = declaration.default, {"setting": declaration}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def declarations(settings: Any, prefix: str = "") -> dict[str, tuple[Setting, Any]]:
    """Return dotted name -> (declaration, value) for every setting of a dataclass instance, nested ones included."""
    pairs: dict[str, tuple[Setting, Any]] = {}
    for one in fields(settings):
        value = getattr(settings, one.name)
        if is_dataclass(value):
            pairs |= declarations(value, f"{prefix}{one.name}.")
        else:
            pairs[f"{prefix}{one.name}"] = (one.metadata["setting"], value)
    return pairs


def experimental(settings: Any) -> dict[str, str]:
    """Return the reason by name of each experimental setting that is on and differs from the default of the schema."""
    return {
        name: entry.experimental
        for name, (entry, value) in declarations(settings).items()
        if entry.experimental and value and value != entry.default
    }


def free_form(settings: Any) -> tuple[str, ...]:
    """Return the settings that are dicts, whose keys the user chooses (arguments, functions, columns, outcomes)."""
    return tuple(name for name, (_, value) in declarations(settings).items() if isinstance(value, dict))


def typed(value: Any) -> str:
    """Format a value for the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
