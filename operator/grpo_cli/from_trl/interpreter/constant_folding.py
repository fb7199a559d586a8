"""Computes what Python's operators and functions make of constants, where that is cheap and
certain."""

import ast
import operator
from collections.abc import Callable
from typing import Any

MAX_EXPONENT = 64
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Invert: operator.inv,
    ast.Not: operator.not_,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
PLAIN_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (bool, float, int, max, min, round, str)
}
"""Functions of numbers and texts."""
TEXT_METHODS = ("lower", "lstrip", "replace", "rstrip", "split", "strip", "upper")


def operate(kind: ast.operator, left: Any, right: Any) -> Any:
    """The result of an operator.

    Raises:
        TypeError, ValueError, ArithmeticError: it has none, or none that is cheap to compute.
    """
    is_number = isinstance(left, int | float) and isinstance(right, int | float)
    is_joined = isinstance(left, str) and isinstance(right, str) and isinstance(kind, ast.Add)
    function = _OPERATORS.get(type(kind))
    if function is None or not (is_number or is_joined):
        raise TypeError(type(kind).__name__)
    # `9**9**9` would take the memory of the machine.
    if isinstance(kind, ast.Pow) and max(abs(left), abs(right)) > MAX_EXPONENT:
        raise OverflowError
    return function(left, right)


def call_plain(name: str, *values: Any) -> Any:
    """The result of one of PLAIN_FUNCTIONS.

    Raises:
        TypeError, ValueError, ArithmeticError: it has none. A list may stand for a tuple, whose
            text is another.
    """
    if not all(isinstance(value, int | float | str) for value in values):
        raise TypeError(name)
    return PLAIN_FUNCTIONS[name](*values)
