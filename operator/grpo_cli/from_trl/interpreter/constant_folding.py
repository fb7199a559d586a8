"""Computes what Python's operators and functions make of constants, where that is cheap and
certain."""

import ast
import operator
from collections.abc import Callable
from textwrap import dedent
from typing import Any

MAX_EXPONENT = 64
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Invert: operator.inv,
    ast.Not: operator.not_,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
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
    function.__name__: function for function in (bool, dedent, float, int, max, min, round, str)
}
"""Functions of numbers and texts."""
TEXT_METHODS = ("lower", "lstrip", "replace", "rstrip", "split", "strip", "upper")
MAX_LETTERS = 10_000
"""Of a text whose methods are called: `replace` may make the square of it."""


def operate(kind: ast.AST, *values: Any) -> Any:
    """The result of an operator.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError: it has none, or none that is cheap.
    """
    is_number = all(isinstance(value, int | float) for value in values)
    is_joined = isinstance(kind, ast.Add) and all(isinstance(value, str) for value in values)
    if isinstance(kind, ast.operator) and not (is_number or is_joined):
        raise TypeError(type(kind).__name__)
    # `9**9**9` would take the memory of the machine.
    if isinstance(kind, ast.Pow) and max(map(abs, values)) > MAX_EXPONENT:
        raise OverflowError
    return OPERATORS[type(kind)](*values)


def call_plain(name: str, *values: Any) -> Any:
    """The result of one of PLAIN_FUNCTIONS.

    Raises:
        TypeError, ValueError, ArithmeticError: it has none. A list may stand for a tuple, whose
            text is another.
    """
    if not all(isinstance(value, int | float | str) for value in values):
        raise TypeError(name)
    return PLAIN_FUNCTIONS[name](*values)


def call_text_method(name: str, *values: Any) -> Any:
    """The result of one of TEXT_METHODS.

    Raises:
        TypeError, ValueError: it has none, or none that is cheap.
    """
    if sum(len(value) for value in values if isinstance(value, str)) > MAX_LETTERS:
        raise ValueError(name)
    return getattr(str, name)(*values)
