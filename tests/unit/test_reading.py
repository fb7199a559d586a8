"""The product's statements ask one thing of their reader (style.md's measures, by
`tests/reading.py`)."""

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import reading

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for folder in ("operator", "trainer_image")
    for path in (ROOT / folder).glob("grpo_*/__init__.py")
    if path.parent.name != "grpo_codegen"
)
MOST_DENSE = 0.02
"""Share of simple statements with two or more decisions."""
MOST_COMPLEX = 15
MOST_WHOLE_PLANS = 40
"""Functions of the trainer that may take all of the plan: those that lead a process, or hand the
plan on whole."""


HARD_ROOMS = (
    "operator/grpo_kube",
    "operator/grpo_operator/admission",
    "operator/grpo_planner/memory",
    "operator/grpo_planner/search",
    "trainer_image/grpo_trainer/checkpoints",
    "trainer_image/grpo_trainer/generation",
)
LEAST_COMMENTS = 4.0
"""Comments per 100 lines of a hard room."""


@cache
def measured(package: str) -> reading.Reading:
    """Return the package's measures."""
    return reading.read(ROOT / package)


@pytest.mark.parametrize("package", PACKAGES)
def test_few_statements_take_two_decisions(package: str) -> None:
    found = measured(package)
    assert found.dense_share <= MOST_DENSE, found.densest(20)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_is_complex(package: str) -> None:
    assert {
        place: size for place, size in measured(package).complexities.items() if size > MOST_COMPLEX
    } == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_conditional_expression_holds_another(package: str) -> None:
    assert measured(package).nested_conditionals == ()


@pytest.mark.parametrize("room", HARD_ROOMS)
def test_hard_rooms_say_why(room: str) -> None:
    lines = comments = 0
    for path in sorted((ROOT / room).rglob("*.py")):
        text = path.read_text()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments += sum(token.type == tokenize.COMMENT for token in tokens)
        lines += sum(bool(line.strip()) for line in text.splitlines()) - _docstring_lines(path)
    assert 100 * comments / lines >= LEAST_COMMENTS


def _docstring_lines(path: Path) -> int:
    texts = (
        node
        for node in ast.walk(reading.syntax_tree(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in texts)


def test_statements_functions_and_conditionals_are_counted(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        '''"""A docstring is no statement."""
def chosen(a, b):
    if a and b:
        return [x for x in a if x] or (1 if b else 2)
    field: int = 3 if a else 4
    return 1 if a else 2 if b else 3
'''
    )
    found = reading.read(tmp_path)
    by_line = {int(statement.place.split(":")[1]): statement for statement in found.statements}
    assert {line: (by_line[line].decisions, by_line[line].is_simple) for line in by_line} == {
        2: (0, False),
        3: (1, False),
        4: (3, True),
        6: (2, True),
    }
    assert by_line[3].nodes == 7
    assert found.dense_share == 1.0
    assert found.nested_conditionals == (f"{tmp_path.name}/module.py:6",)
    # the function, `if`, `and`, `or`, the comprehension and four conditional expressions
    assert found.complexities == {f"{tmp_path.name}/module.py:2 chosen": 9}
    assert reading.complexity(ast.parse("x = a and b and c")) == 3


def whole_plan_takers(module: ast.Module) -> Iterator[str]:
    """Yield the names of functions with a parameter of type TrainingPlan, and of classes with such
    a field."""
    for node in ast.walk(module):
        annotations: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            annotations += [
                each.annotation
                for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            ]
        elif isinstance(node, ast.ClassDef):
            annotations += [
                each.annotation for each in node.body if isinstance(each, ast.AnnAssign)
            ]
        else:
            continue
        if any(each and "TrainingPlan" in ast.unparse(each) for each in annotations):
            yield node.name


def test_few_functions_of_the_trainer_take_the_whole_plan() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "trainer_image").rglob("*.py"))
        for name in whole_plan_takers(reading.syntax_tree(path))
    ]
    assert len(found) <= MOST_WHOLE_PLANS, (
        "pass the sections of the plan that a function uses:\n" + "\n".join(found)
    )


def test_functions_and_classes_that_take_the_whole_plan_are_counted() -> None:
    source = """
class Setup:
    plan: TrainingPlan
    step: int

class Run:
    def __init__(self, *, plan: "TrainingPlan | None"): ...

async def serve(plan: plans.TrainingPlan): ...
def read(text: str) -> TrainingPlan: ...
def save(execution: ExecutionPlan): plan: TrainingPlan = make(execution)
"""
    assert sorted(whole_plan_takers(ast.parse(source))) == ["Setup", "__init__", "serve"]
