"""Environment `calculator`: arithmetic with a tool, a task of the demo; `slow_calculator`: the same with delays.

The expression comes from a model. It is parsed, never evaluated as Python: integers, + - * and parentheses only.
Without power and division, a result has at most as many digits as the expression has characters.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import operator
import random
import re
from collections.abc import Callable
from typing import Any

from lockstep.rollout.environments.tools import ToolEnvironment

MAX_EXPRESSION_CHARS = 200
_ALLOWED = re.compile(r"[0-9+\-*() ]+")
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_UNARY: dict[type[ast.unaryop], Callable[[int], int]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(expression: str) -> int:
    """Evaluate an integer expression as Python does.

    Raises `ValueError`: anything but integers, + - * and parentheses, or more than `MAX_EXPRESSION_CHARS` characters.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_EXPRESSION_CHARS} are allowed")
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("only integers, + - * and parentheses are allowed")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"not an expression: {error.msg}") from error


def calculator(expression: str) -> int:
    """Evaluate an integer expression with + - * and parentheses.

    Args:
        expression: for example 64*22-55
    """
    return evaluate(expression)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
    raise ValueError("only integers, + - * and parentheses are allowed")


class CalculatorEnvironment(ToolEnvironment):
    """`ToolEnvironment` with the calculator as its tool."""

    def __init__(self, **settings: Any):
        super().__init__([calculator], **settings)


class SlowCalculatorEnvironment(ToolEnvironment):
    """`CalculatorEnvironment` with a uniform delay of up to `max_delay_s` seconds per call (docs/asynchrony.md)."""

    def __init__(self, *, max_delay_s: float = 2.0, delay_seed: int = 0, **settings: Any):
        """delay_seed: the n-th call of the process has the same delay in every run; which call is n-th may differ."""
        self._max_delay_s = max_delay_s
        self._delays = _delays(delay_seed)
        super().__init__([self.calculator], **settings)

    async def calculator(self, expression: str) -> int:
        """Evaluate an integer expression with + - * and parentheses.

        Args:
            expression: for example 64*22-55
        """
        await asyncio.sleep(self._delays.uniform(0, self._max_delay_s))
        return evaluate(expression)


@functools.cache
def _delays(seed: int) -> random.Random:
    """Return a generator shared by all episodes: with one each, all first calls would have the same delay."""
    return random.Random(seed)
