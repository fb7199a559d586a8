"""Facts of Python's syntax tree: what is called and imported, and which names code needs."""

import ast
import symtable
import warnings
from collections import deque
from collections.abc import Iterator, Sequence


def parse(text: str) -> ast.Module:
    """The syntax tree of a script.

    Raises:
        SyntaxError, ValueError: it is no Python.
        RecursionError, MemoryError: its expressions are nested too deeply.
    """
    with warnings.catch_warnings():
        # Of strings such as "\d", which are the script's affair.
        warnings.simplefilter("ignore")
        return ast.parse(text)


def join_cells(module: ast.Module) -> ast.Module:
    """The module with the statements of marimo's cells, which share their names, in the place of
    the functions that hold them."""
    body: list[ast.stmt] = []
    for statement in module.body:
        marks = [
            dotted_name(mark.func if isinstance(mark, ast.Call) else mark)
            for mark in getattr(statement, "decorator_list", [])
        ]
        if "app.cell" in marks and isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            body += [part for part in statement.body if not isinstance(part, ast.Return)]
        else:
            body.append(statement)
    return ast.Module(body, [])


def walk_reachable(module: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a script, without those that `if False:` leaves out."""
    pending: deque[ast.AST] = deque([module])
    while pending:
        node = pending.popleft()
        yield node
        match node:
            case ast.If(test=ast.Constant(value=False), orelse=orelse):
                pending += orelse
            case _:
                pending += ast.iter_child_nodes(node)


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` of an expression of names; empty for others."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def called_name(call: ast.AST) -> str:
    """Last name of what is called: `from_pretrained` of `AutoModel.from_pretrained(…)`; empty for
    what is no call."""
    function = call.func if isinstance(call, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def is_run_in_parts(function: ast.AST) -> bool:
    """True for a function whose body does not run once and as a whole at each call: a generator, or
    one that calls itself."""
    name = getattr(function, "name", "")
    for node in ast.walk(function):
        match node:
            case ast.Yield() | ast.YieldFrom():
                return True
            case ast.Call(func=ast.Name(id=called)) if called == name:
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=called)) if (
                called == name
            ):
                return True
    return False


def global_names(node: ast.stmt | ast.expr) -> list[str]:
    """Names that a statement or an expression takes from what is around it."""
    pending = [symtable.symtable(ast.unparse(node), "script", "exec")]
    names: dict[str, None] = {}
    while pending:
        table = pending.pop()
        pending += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or table.get_type() == "module":
                names[symbol.get_name()] = None
    return list(names)


def is_main_guard(statement: ast.stmt) -> bool:
    """True for `if __name__ == "__main__":`."""
    match statement:
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()])):
            return True
    return False


def whole_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that can be copied one by one: a condition or a loop only as a whole, a `with`
    only where it opens what the statements in it need."""
    for statement in body:
        is_opening = isinstance(statement, ast.With) and any(
            called_name(item.context_expr) in OPENING for item in statement.items
        )
        is_plain_with = isinstance(statement, ast.With) and not is_opening
        if isinstance(statement, ast.If | ast.With) and (is_plain_with or is_main_guard(statement)):
            yield from whole_statements(statement.body)
        else:
            yield statement


OPENING = (
    "load_from_disk", "open", "read_bytes", "read_csv", "read_json", "read_parquet", "read_pickle",
    "read_text",
)  # fmt: skip
"""Calls that open a file."""
