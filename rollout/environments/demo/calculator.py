"""Environment `calculator`: arithmetic with a tool, a task of the demo.

The expression comes from a model. It is parsed, never evaluated as Python: integers, + - * and parentheses only.
Without power and division, a result has at most as many digits as the expression has characters.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from lockstep.rollout.environments.declaration import Declaration
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

    declaration = Declaration(reads="prompt", demo_task="calculator")

    def __init__(self, **settings: Any):
        super().__init__([calculator], **settings)
