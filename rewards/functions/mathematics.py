"""Mathematical equality, by the library math-verify (extra `math`).

It limits its own time by SIGALRM, which fails off the main thread and cannot interrupt C code. Here its limits are off:
the function runs in a worker whose death is the limit, so that a timeout is counted as one and is never a zero.
"""

from __future__ import annotations

from rewards.functions.answers import expected, final_answer
from rollout.errors import ConfigError, DataError
from rollout.records import Rollout


def math_equal(rollout: Rollout, *, column: str = "answer", precision: int = 6) -> float:
    """1 if the answer equals the reference as mathematics: 1/2, 0.5 and \\frac{1}{2} are the same.

    A boxed answer wins over others. The reference is read with and without dollar signs around it. Needs
    math-verify: `pip install lockstep-rl[math]`.

    Raises:
        DataError: the reference cannot be read.
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
        raise DataError(f"math reward: column {column!r} holds no mathematics: {reference!r:.80}")
    answer = read(final_answer(rollout))
    if not answer:
        return 0.0
    return float(verify(gold, answer, float_rounding=precision, timeout_seconds=None))  # type: ignore[arg-type]
