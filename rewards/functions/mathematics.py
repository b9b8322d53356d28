"""Mathematical equality, computed by math-verify (extra `math`).

math-verify limits its own time by SIGALRM, which fails off the main thread and cannot interrupt C code. Its limits are
off here: the function runs in a worker that is killed at the deadline, so that a timeout counts as one and never as 0.
"""

from __future__ import annotations

from rewards.functions.answers import expected, final_answer
from rollout.errors import ConfigError, DataError
from rollout.records import Rollout


def math_equal(rollout: Rollout, *, column: str = "answer", precision: int = 6) -> float:
    """Return 1 if the answer equals the reference as mathematics: 1/2, 0.5 and \\frac{1}{2} are the same.

    A boxed answer wins over others. The reference is parsed with and without dollar signs around it.
    Raises `ConfigError` without math-verify, `DataError` if the reference cannot be parsed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError("the reward math_equal needs math-verify; pip install 'lockstep-rl[math]'") from error

    def read(text: str) -> list:
        return parse(text, parsing_timeout=None)  # type: ignore[arg-type]  # None is "no limit" in its code

    reference = expected(rollout, column)
    gold = read(reference) or read(f"${reference}$")
    if not gold:
        raise DataError(f"math_equal: column {column!r} is not a mathematical expression: {reference!r:.80}")
    answer = read(final_answer(rollout))
    if not answer:
        return 0.0
    return float(verify(gold, answer, float_rounding=precision, timeout_seconds=None))  # type: ignore[arg-type]
