"""Computes what Python's operators and functions make of constants, where that is cheap and
certain."""

import ast
import operator
from collections.abc import Callable, Sequence
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
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (bool, float, int, max, min, round, str)
}
"""Functions of numbers and texts."""


def operate(kind: ast.operator, left: Any, right: Any) -> Any:
    """The result of an operator.

    Raises:
        TypeError, ValueError, ArithmeticError: it has none, or none that is cheap to compute.
    """
    is_number = isinstance(left, int | float) and isinstance(right, int | float)
    is_joined = type(left) is type(right) and isinstance(left, str | list)
    function = _OPERATORS.get(type(kind))
    if function is None or not (is_number or (is_joined and isinstance(kind, ast.Add))):
        raise TypeError(type(kind).__name__)
    # `9**9**9` would take the memory of the machine.
    if isinstance(kind, ast.Pow) and max(abs(left), abs(right)) > MAX_EXPONENT:
        raise OverflowError
    return function(left, right)


def apply(name: str, values: Sequence[Any]) -> Any:
    """The result of one of FUNCTIONS.

    Raises:
        TypeError, ValueError, ArithmeticError: it has none. A list may stand for a tuple, whose
            text is another.
    """
    if not all(isinstance(value, int | float | str) for value in values):
        raise TypeError(name)
    return FUNCTIONS[name](*values)
