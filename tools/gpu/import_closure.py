"""Which packages a program of ours needs, read from the import statements of our own modules.

Statements are read and not run: a module that fails to import on this machine is still counted, and
no import hides behind one that somebody else did first.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.programs.cache import REPOSITORY
from harness.programs.processes import ClusterError

SOURCE_FOLDERS = (REPOSITORY / "operator", REPOSITORY / "trainer_image")
FIRST_PARTY = ("grpo_api", "grpo_trainer", "grpo_acceptance")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of a statement that hold further statements."""


@dataclass(slots=True)
class ImportClosure:
    """What importing some modules imports, directly or through others."""

    first_party: set[str] = field(default_factory=set)
    """Modules of ours."""
    third_party: dict[str, set[str]] = field(default_factory=dict)
    """Top-level names of others' modules, each with the modules of ours that name it."""


def import_closure(modules: Iterable[str], *, inside_functions: bool) -> ImportClosure:
    """Follow the import statements of the modules.

    Args:
        modules: full names of modules of ours.
        inside_functions: whether to follow imports inside functions, too, which run only when the
            function is called.
    """
    closure = ImportClosure()
    pending = [name for module in modules for name in _with_parents(module)]
    while pending:
        module = pending.pop()
        if module in closure.first_party:
            continue
        closure.first_party.add(module)
        for imported in _imported(module, inside_functions):
            top = imported.partition(".")[0]
            if top in FIRST_PARTY:
                pending.extend(_with_parents(imported))
            elif top not in sys.stdlib_module_names:
                closure.third_party.setdefault(top, set()).add(module)
    return closure


def modules_of(package: str) -> list[str]:
    """Return the full names of a package's modules, its own and its __main__ included."""
    folder = _source_file(package).parent
    return [
        package,
        *(
            f"{package}.{path.stem}"
            for path in sorted(folder.glob("*.py"))
            if path.stem != "__init__"
        ),
    ]


def distributions_of(names: Iterable[str]) -> set[str]:
    """Return the distributions that the top-level names of modules belong to.

    Raises:
        ClusterError: a module is not installed here.
    """
    owners = _owners()
    if missing := sorted(set(names) - owners.keys()):
        raise ClusterError(f"no installed distribution has the modules {', '.join(missing)}")
    return {str(canonicalize_name(owners[name][0])) for name in names}


@cache
def _owners() -> Mapping[str, list[str]]:
    """Return the distributions by top-level names of modules; it reads the lists of all files that
    are installed."""
    return metadata.packages_distributions()


def required_by(
    distributions: Iterable[str], python: str, *, stop_at: Iterable[str] = ()
) -> set[str]:
    """Return the distributions and all that they require, by the metadata of what is installed
    here.

    Args:
        distributions: names to begin with.
        python: version of the Python that markers are evaluated for, such as 3.12.
        stop_at: distributions that are neither returned nor followed.
    """
    found: set[str] = set()
    pending = [(str(canonicalize_name(name)), "") for name in distributions]
    followed = set()
    while pending:
        name, extra = pending.pop()
        if (name, extra) in followed or name in stop_at:
            continue
        followed.add((name, extra))
        found.add(name)
        environment = {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "extra": extra,
        }
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                required = str(canonicalize_name(requirement.name))
                pending.extend((required, wanted) for wanted in ("", *requirement.extras))
    return found


@cache
def _imported(module: str, inside_functions: bool) -> tuple[str, ...]:
    """Return the full names of what a module's statements import. Two closures have most modules in
    common."""
    return tuple(_names_of_imports(module, inside_functions))


def _names_of_imports(module: str, inside_functions: bool) -> Iterator[str]:
    path = _source_file(module)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for statement in _import_statements(
        ast.parse(path.read_text(encoding="utf-8")).body, inside_functions
    ):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
            continue
        base = statement.module or ""
        if statement.level:
            parents = package.split(".")
            base = ".".join(
                [*parents[: len(parents) - statement.level + 1], *([base] if base else [])]
            )
        yield base
        # `from package import module` imports the module, too
        yield from (
            f"{base}.{alias.name}" for alias in statement.names if _find(f"{base}.{alias.name}")
        )


def _import_statements(
    body: Iterable[ast.AST], inside_functions: bool
) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield import statements that run when the module is imported, or also those of its
    functions."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions:
            continue
        elif isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            yield from _import_statements(node.orelse, inside_functions)
        else:
            for block in BLOCKS:
                yield from _import_statements(getattr(node, block, ()), inside_functions)


def _with_parents(module: str) -> Iterator[str]:
    """Yield a module and the packages that importing it imports first."""
    parts = module.split(".")
    yield from (name for end in range(1, len(parts) + 1) if _find(name := ".".join(parts[:end])))


def _source_file(module: str) -> Path:
    """Return the file of a module of ours."""
    path = _find(module)
    if path is None:
        raise ModuleNotFoundError(f"{module} is not in {', '.join(map(str, SOURCE_FOLDERS))}")
    return path


def _find(module: str) -> Path | None:
    """Return the file of a module, or None if it is not in our source folders."""
    for folder in SOURCE_FOLDERS:
        path = folder / module.replace(".", "/")
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None
