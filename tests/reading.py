"""How hard Python code is to read: what each statement of a package asks of its reader.

Lengths of files and functions say little, since a function stays short if its statements are dense.
So a statement is measured by its own syntax nodes, and by the decisions that a reader takes in it.
"""

import ast
import gc
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DECISIONS = (
    ast.IfExp,
    ast.BoolOp,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.Lambda,
    ast.NamedExpr,
)
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.match_case,
)
COMPOUND = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.Match,
)
DECLARATIONS = (ast.AnnAssign, ast.Import, ast.ImportFrom)
"""Statements that are read as data: fields of a schema, and imports."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Statement:
    """One statement's place and size."""

    place: str
    nodes: int
    """Syntax nodes, without those of statements inside it."""
    decisions: int
    """Conditional expressions, `and`/`or` chains, comprehensions, lambdas and assignment
    expressions."""
    is_simple: bool
    """No statement is nested in it."""


@dataclass(frozen=True)
class Reading:
    """The measures of one package."""

    statements: tuple[Statement, ...]
    complexities: dict[str, int]
    """Branches of each function plus one, with every operand of `and` and `or` after the first."""
    nested_conditionals: tuple[str, ...]
    """Places of conditional expressions inside conditional expressions."""

    @property
    def mean_nodes(self) -> float:
        """Mean syntax nodes per statement."""
        return statistics.mean(statement.nodes for statement in self.statements)

    @property
    def p90_nodes(self) -> float:
        """Syntax nodes that 90 % of the statements do not exceed."""
        return statistics.quantiles((statement.nodes for statement in self.statements), n=10)[-1]

    @property
    def dense_share(self) -> float:
        """Share of simple statements with two or more decisions."""
        simple = [statement for statement in self.statements if statement.is_simple]
        return sum(statement.decisions >= 2 for statement in simple) / len(simple)

    def densest(self, count: int) -> list[str]:
        """Return the places of the simple statements with the most decisions, the worst first."""
        simple = [statement for statement in self.statements if statement.is_simple]
        worst_first = sorted(simple, key=lambda statement: (-statement.decisions, -statement.nodes))
        return [statement.place for statement in worst_first[:count]]


@cache
def syntax_tree(path: Path) -> ast.Module:
    """Return what a module parses to; a process parses it once for all tests."""
    module = ast.parse(path.read_text())
    gc.freeze()  # collections walked the trees of all modules for longer than parsing them takes
    return module


def functions(module: ast.Module) -> Iterator[Function]:
    """Yield all functions and methods of a module, without a walk through its expressions."""
    todo: list[ast.AST] = [module]
    while todo:
        node = todo.pop()
        if isinstance(node, Function):
            yield node
        todo += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]


def read(folder: Path) -> Reading:
    """Return the measures of all modules below a folder."""
    statements: list[Statement] = []
    complexities: dict[str, int] = {}
    nested: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder.parent).as_posix()
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, Function):
                complexities[f"{name}:{node.lineno} {node.name}"] = complexity(node)
            if isinstance(node, ast.IfExp) and _holds_conditional(node):
                nested.append(f"{name}:{node.lineno}")
            if isinstance(node, ast.stmt) and not (
                _is_docstring(node) or isinstance(node, DECLARATIONS)
            ):
                statements.append(_measured(node, f"{name}:{node.lineno}"))
    return Reading(tuple(statements), complexities, tuple(nested))


def complexity(function: ast.AST) -> int:
    """Return the branches of a function plus one; each operand of `and` and `or` after the first is
    a branch."""
    total = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
    return total


def _measured(statement: ast.stmt, place: str) -> Statement:
    nodes = list(_own_nodes(statement))
    decisions = sum(isinstance(node, DECISIONS) for node in nodes)
    return Statement(place, len(nodes), decisions, not isinstance(statement, COMPOUND))


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the statement's nodes, but not those of statements inside it."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        yield node
        todo += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _holds_conditional(node: ast.IfExp) -> bool:
    inner = (
        inner_node for part in (node.test, node.body, node.orelse) for inner_node in ast.walk(part)
    )
    return any(isinstance(inner_node, ast.IfExp) for inner_node in inner)
