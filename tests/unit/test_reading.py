"""The product's statements ask one thing of their reader (style.md's measures, by `tests/reading.py`)."""

import ast
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
    assert {place: size for place, size in measured(package).complexities.items() if size > MOST_COMPLEX} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_conditional_expression_holds_another(package: str) -> None:
    assert measured(package).nested_conditionals == ()


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
