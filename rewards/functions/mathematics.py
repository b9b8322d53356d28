"""Mathematical equality, computed by math-verify (extra `math`).

math-verify limits its own time by SIGALRM, which fails off the main thread and cannot interrupt C code. Its limits are
off here: the function runs in a worker that is killed at the deadline, so that a timeout counts as one and never as 0.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from lockstep.rewards.functions.answers import expected
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout

_TEXT = re.compile(r"\\text *\{[^{}]*\}")
_PROSE = re.compile(r"\$|\\[(\[]|\\boxed|(?<![\\a-zA-Z])[a-zA-Z]{4}")
"""Parts of texts that no expression has: of `2^{10}` without dollars, math-verify would read the 2 alone."""
INSTALL = "pip install 'lockstep-rl[math]'"


def math_equal(rollout: Rollout, *, column: str = "answer", precision: int = 6) -> float:
    """Return 1 if the answer equals the reference as mathematics: 1/2, 0.5 and \\frac{1}{2} are the same.

    A boxed answer wins over others. The reference, or what follows its last `####`, is one expression with or without
    dollar signs around it, or a text with one.
    Raises `ConfigError` without math-verify, `DataError` if the reference cannot be parsed.
    """
    reference = expected(rollout, column)
    bare = reference.rpartition("####")[2].strip()
    forms = (bare, f"${bare}$") if _PROSE.search(_TEXT.sub("", bare)) else (f"${bare}$", bare)
    gold = read(forms[0]) or read(forms[1])
    if not gold:
        raise DataError(f"math_equal: column {column!r} is not a mathematical expression: {reference!r:.80}")
    answer = read(rollout.answer)
    return float(bool(answer) and is_equal(gold, answer, precision=precision))


def read(text: str) -> list[Any]:
    """Return the mathematical expression of a text as math-verify parses it; empty without one."""
    return _math_verify().parse(text, parsing_timeout=None)


def is_equal(gold: list[Any], answer: list[Any], *, precision: int = 6) -> bool:
    """Return True if two results of `read` are equal as mathematics. precision: decimals of floats."""
    return _math_verify().verify(gold, answer, float_rounding=precision, timeout_seconds=None)


def _math_verify() -> ModuleType:
    try:
        import math_verify
    except ImportError as error:
        raise ConfigError(f"the reward math_equal needs math-verify; {INSTALL}") from error
    return math_verify
