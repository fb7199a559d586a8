"""Public functions say what they do or what they return (style.md, section 1).

A function that returns bool begins with is_, has_, may_ or should_. No public function is named by
a bare participle or preposition. `EXCEPTIONS` holds the names of today that break this. It may only
shrink: the test fails for a name in it that has been renamed.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.reading import syntax_tree

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for folder in ("operator", "trainer_image")
    for path in (ROOT / folder).glob("grpo_*/__init__.py")
)
PREDICATES = ("is_", "has_", "may_", "should_")
NOUNS = frozenset({"embed", "feed", "need", "seed", "shed", "speed"})
"""Words that end like a participle and are none."""
BARE = re.compile(
    r"about|again|anew|aside|begun|built|came|chosen|cut|deaf|drawn|due|fed|felt|forgotten|found|"
    r"given|gone|got|heard|held|kept|known|late|left|led|lost|made|meant|met|news|of|own|ran|"
    r"ready|said|saw|seen|sent|shared_out|shown|sound|spent|split|spoken|standing|taken|taught|"
    r"thought|told|took|understood|unseen|woken|words|written|wrote"
)
"""Irregular participles, past tenses, prepositions and words that name anything."""
ACTIONS = frozenset(
    {
        "await_engines",
        "begin_sync",
        "continue_generation",
        "drop_denied",
        "fetch_missing_pods",
        "put_if_unchanged",
        "sample_remaining",
        "wait_for_text",
    }
)
"""Functions that act on an object, and return True if they did something."""

EXCEPTIONS: dict[str, set[str]] = {
    "grpo_trainer": {
        "Lease.take",
        "any_rank",
        "uses_deepspeed",
    },
}


@cache
def public_functions(package: str) -> dict[str, bool]:
    """Return the package's public functions and methods as `Class.name`, each with whether it
    returns bool."""
    functions: dict[str, bool] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        for name, function in definitions(syntax_tree(path)):
            returns_bool = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
            functions[name] = functions.get(name, False) or returns_bool
    return functions


def definitions(
    body: ast.Module | ast.ClassDef, owner: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the public functions and methods below a module or class, with their qualified
    names."""
    for node in body.body:
        if isinstance(node, ast.ClassDef):
            yield from definitions(node, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
            "_"
        ):
            yield f"{owner}{node.name}", node


def breaks_rule(name: str, returns_bool: bool) -> bool:
    """Return True if the name of a function breaks the house rule."""
    if name in ACTIONS:
        return False
    if returns_bool:
        return not name.startswith(PREDICATES)
    is_participle = "_" not in name and name.endswith("ed") and name not in NOUNS
    return is_participle or BARE.fullmatch(name) is not None


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_say_what_they_do_or_return(package: str) -> None:
    offenders = {
        qualified
        for qualified, returns_bool in public_functions(package).items()
        if breaks_rule(qualified.rpartition(".")[2], returns_bool)
    }
    known = EXCEPTIONS.get(package.rpartition("/")[2], set())
    assert offenders - known == set(), "rename these"
    assert known - offenders == set(), "these are renamed: take them out of EXCEPTIONS"


@pytest.mark.parametrize(
    ("name", "returns_bool", "breaks"),
    [
        ("told", False, True),
        ("merged", False, True),
        ("of", False, True),
        ("seed", False, False),
        ("sort_queue", False, False),
        ("advantages", False, False),
        ("fits", True, True),
        ("is_known", True, False),
        ("may_start", True, False),
    ],
)
def test_a_participle_or_a_predicate_without_a_verb_is_found(
    name: str, returns_bool: bool, breaks: bool
) -> None:
    assert breaks_rule(name, returns_bool) == breaks
