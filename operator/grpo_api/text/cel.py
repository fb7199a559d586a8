"""Evaluates rules in Python by the text that the API server evaluates.

Rules are written in CEL (https://cel.dev). All that they use of it is Python in another spelling:
`&&`, `||` and `!`, fields in camelCase, and methods of texts, lists and maps. `? :` is not used.
"""

import ast
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from .quantity import parse_quantity


def _matches(text: str, pattern: str) -> bool:
    # To CEL's expressions, which are RE2's, `$` is the end of a text; to Python's a newline may
    # follow.
    return re.search(pattern.replace("$", r"\Z"), text) is not None


_TEXT = re.compile(r"(r?'[^']*')")
_WORD = re.compile(r"&&|\|\||!(?!=)|(?<=[a-z])[A-Z]+")
_OPERATORS = {"&&": " and ", "||": " or ", "!": " not "}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "has": lambda value: value is not None,
    "size": len,
    "string": str,
    "quantity": parse_quantity,
    "compare_to": lambda quantity, other: quantity - other,
    "contains": lambda text, part: part in text,
    "ends_with": str.endswith,
    "exists": any,
    "filter": list,
    "map": list,
    "matches": _matches,
    "split": str.split,
    "starts_with": str.startswith,
}
"""CEL's functions, and its methods with their receiver as the first argument."""
_PLACE = {"lineno": 1, "col_offset": 0}
"""What the compiler wants to know of each node."""


@cache
def predicate(cel: str) -> Callable[[Any], bool]:
    """The function that says of a model whether it satisfies a rule, in which it is `self`."""
    parts = _TEXT.split(cel)
    parts[::2] = [_WORD.sub(_in_python, part) for part in parts[::2]]
    tree = ast.parse(f"lambda self: {''.join(parts)}", mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            _replace_method(node, node.func.attr, node.func.value)
    function: Callable[[Any], bool] = eval(compile(tree, cel, "eval"), dict(_FUNCTIONS))
    return function


def _in_python(word: re.Match[str]) -> str:
    """An operator, or the capitals of a field in camelCase."""
    return _OPERATORS.get(word[0]) or f"_{word[0].lower()}"


def _replace_method(call: ast.Call, name: str, receiver: ast.expr) -> None:
    """Turn the call of a method into that of a function."""
    call.func = ast.Name(name, ast.Load(), **_PLACE)
    if name not in ("all", "exists", "filter", "map"):
        call.args.insert(0, receiver)
        return
    variable, condition = call.args
    assert isinstance(variable, ast.Name), "it names the items"
    items = ast.comprehension(ast.Name(variable.id, ast.Store(), **_PLACE), receiver, [], 0)
    value = condition
    if name == "filter":
        value, items.ifs = variable, [condition]
    call.args = [ast.GeneratorExp(value, [items], **_PLACE)]
