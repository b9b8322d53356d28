"""Outcomes of reward calls: a value, or one of the ways in which a function fails to give one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np

from lockstep.rollout.safe_text import safe_text
from lockstep.rollout.system.deadline import DeadlineExceeded, Finished, TooManyAbandoned
from lockstep.rollout.system.user_functions import fault

MAX_DETAIL_CHARS = 2_000
MAX_REWARD = 1e100
"""Largest reward by size: sums and squares of as many as there are do not overflow."""


class Outcome(StrEnum):
    """Result of a reward function on one rollout."""

    VALUE = "value"
    """A finite number."""
    ABSTAINED = "abstained"
    """The function returned None for this rollout: it does not apply. Not an error."""
    TIMEOUT = "timeout"
    """The function did not return in time."""
    EXCEPTION = "exception"
    """The function raised."""
    NON_FINITE = "non_finite"
    """The function returned NaN, an infinity, or a number beyond `MAX_REWARD`."""
    WRONG_TYPE = "wrong_type"
    """The function returned something that is not a number, nor one number per turn where turns have rewards."""
    CRASHED = "crashed"
    """The worker process ended without an answer: `os._exit`, a fault in C code, the kernel."""
    WRONG_LENGTH = "wrong_length"
    """A batch function returned another number of rewards than it got rollouts, or a function other than one per
    turn."""

    @property
    def is_error(self) -> bool:
        return self not in (Outcome.VALUE, Outcome.ABSTAINED)


ERRORS = tuple(outcome for outcome in Outcome if outcome.is_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of one reward function on one rollout."""

    outcome: Outcome
    value: float = math.nan
    """Finite if the outcome is `VALUE`, else NaN."""
    turns: tuple[float, ...] = ()
    """Reward of each turn, with `value` as their sum; empty: one reward for the whole rollout."""
    logged: Mapping[str, Any] = field(default_factory=dict)
    """Columns that the function logged, with their values for the rollout (`rewards/meter.py`)."""
    detail: str = ""
    """For people: the returned value or the error, as safe text (`rollout/safe_text.py`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", safe_text(self.detail, MAX_DETAIL_CHARS))


def judge(value: Any, num_turns: int | None = None) -> Verdict:
    """Return the verdict on a returned value: any finite real number counts, also bool and numpy scalars.

    num_turns: turns of the rollout, for each of which the function may return a number; None: rollouts get one number.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.tolist()
    if isinstance(value, list | tuple) and num_turns is not None:
        return _judge_turns(value, num_turns)
    if not isinstance(value, Real | np.bool_):
        hint = "; one number per turn needs algorithm.turn_rewards=true" if isinstance(value, list | tuple) else ""
        return Verdict(outcome=Outcome.WRONG_TYPE, detail=f"returned {_short(value)}; expected a float{hint}")
    try:
        number = float(value)
    except OverflowError:
        return Verdict(outcome=Outcome.NON_FINITE, detail="returned an integer that does not fit a float")
    if not math.isfinite(number):
        return Verdict(outcome=Outcome.NON_FINITE, detail=f"returned {number}")
    return Verdict(outcome=Outcome.VALUE, value=number)


def judge_batch(
    finished: Finished, num_turns: Sequence[int | None], columns: Mapping[str, Sequence[Any]] = MappingProxyType({})
) -> list[Verdict]:
    """Return the verdicts on a call for some rollouts. A value of None means "does not apply", as in TRL.

    An exception in place of a number is the failure of that rollout alone.

    num_turns: of each rollout, as for `judge`. columns: what the call logged, a value for each rollout.
    """
    return [
        replace(verdict, logged={column: values[index] for column, values in columns.items()})
        for index, verdict in enumerate(_judge_list(finished, num_turns))
    ]


def _judge_list(finished: Finished, num_turns: Sequence[int | None]) -> list[Verdict]:
    count = len(num_turns)
    if finished.error is not None:
        return [_judge_error(finished.error)] * count
    values = finished.value
    if not isinstance(values, list | tuple):
        detail = f"returned {_short(values)}; expected a list of {count} floats"
        return [Verdict(outcome=Outcome.WRONG_TYPE, detail=detail)] * count
    if len(values) != count:
        detail = f"returned {len(values)} rewards for {count} rollouts"
        return [Verdict(outcome=Outcome.WRONG_LENGTH, detail=detail)] * count
    return [_judge_item(value, turns) for value, turns in zip(values, num_turns, strict=True)]


def _judge_item(value: Any, num_turns: int | None) -> Verdict:
    if value is None:
        return Verdict(outcome=Outcome.ABSTAINED)
    verdict = _judge_error(value) if isinstance(value, BaseException) else judge(value, num_turns)
    if max(map(abs, (verdict.value, *verdict.turns))) > MAX_REWARD:
        detail = f"returned {verdict.turns or verdict.value}; expected at most {MAX_REWARD:g} by size"
        return Verdict(outcome=Outcome.NON_FINITE, detail=detail)
    return verdict


def logged_value(value: Any) -> Any:
    """Return a value that JSON holds: numbers and texts as they are, anything else as text."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return value if value is None or is_number else safe_text(str(value), MAX_DETAIL_CHARS)


def _judge_turns(values: Sequence[Any], num_turns: int) -> Verdict:
    """Return the verdict on one number per turn: the sum and the numbers, or the first one that is wrong."""
    if len(values) != num_turns:
        detail = f"returned {len(values)} rewards for the {num_turns} turns of a rollout"
        return Verdict(outcome=Outcome.WRONG_LENGTH, detail=detail)
    verdicts = [judge(value) for value in values]
    for turn, verdict in enumerate(verdicts):
        if verdict.outcome is not Outcome.VALUE:
            return Verdict(outcome=verdict.outcome, detail=f"for turn {turn}: {verdict.detail}")
    turns = tuple(verdict.value for verdict in verdicts)
    total = judge(sum(turns))
    return Verdict(outcome=total.outcome, value=total.value, turns=turns) if total.outcome is Outcome.VALUE else total


def _judge_error(error: BaseException) -> Verdict:
    if isinstance(error, DeadlineExceeded | TooManyAbandoned):
        return Verdict(outcome=Outcome.TIMEOUT, detail=str(error))
    return Verdict(outcome=Outcome.EXCEPTION, detail=fault(error))


def _short(value: Any) -> str:
    # Only the repr of plain values is known to be cheap and harmless.
    plain = value is None or isinstance(value, str | bytes | bool | int | float)
    return f"{type(value).__name__} {value!r:.80}" if plain else f"a {type(value).__name__}"
