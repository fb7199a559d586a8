"""Reads and writes YAML whose every value is what kubectl reads.

kubectl has the YAML of a Go library. It differs from PyYAML's: `5e-6` is a number only there, and
`y` is true; `1:30` is a number only here.
"""

import json
import re
from collections.abc import Callable, Hashable
from typing import Any, NoReturn, TypeVar

import yaml

_T = TypeVar("_T")
_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "merge": ("<<", ["<"]),
    "null": ("~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (
        "y|Y|yes|Yes|YES|on|On|ON|true|True|TRUE|n|N|no|No|NO|off|Off|OFF|false|False|FALSE",
        [*"yYnNtTfFoO"],
    ),
    "int": (
        "[-+]?(0|0[oO]?[0-7][0-7_]*|0[bB]_*[01][01_]*|0[xX]_*[0-9a-fA-F][0-9a-fA-F_]*|[1-9][0-9_]*)",
        [*"-+0123456789"],
    ),
    "float": (
        r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9][0-9_]*)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
}
"""What a scalar without quotes must match to be no text, and how it may begin."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with kubectl's scalars. It refuses what would end a reader or lose a value."""

    yaml_implicit_resolvers = {}
    yaml_constructors = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in {*_SCALARS, "str", "seq", "map"}
    }
    bool_values = yaml.SafeLoader.bool_values | {"y": True, "n": False}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse an alias inside of the value that it refers to."""
        node = super().compose_node(parent, index)
        # PyYAML sets the end of a list or a mapping when it has all of its items.
        if node is not None and node.end_mark is None:
            _refuse("an alias stands inside of its own anchor", node)
        return node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Refuse a key that is set twice: its first value would be lost."""
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                _refuse("a key can't be a list or a mapping; if this is a template, render it", key)
            if key.value in names:
                _refuse(f"{key.value} is set twice; keep one of the two", key)
            names.add(key.value)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping whose keys are texts, as in JSON."""
        mapping = super().construct_mapping(node, deep)
        return {
            key if isinstance(key, str) else json.dumps(key): value
            for key, value in mapping.items()
        }

    def construct_integer(self, node: yaml.ScalarNode) -> int | str:
        """An int, octal after a zero, or text where it has more digits than Python reads."""
        text = node.value.replace("_", "")
        try:
            return int(re.sub("^([-+]?)0(?=[0-7])", r"\g<1>0o", text), 0)
        except ValueError:
            return str(node.value)

    def construct_number(self, node: yaml.ScalarNode) -> float | str:
        """A float, an int where there is no fraction, or text where no float is that large."""
        value: float = self.construct_yaml_float(node)
        if abs(value) == float("inf") and node.value[-1].isdigit():
            return str(node.value)
        return int(value) if value.is_integer() else value


for _name, (_pattern, _beginnings) in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), _beginnings)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_integer)
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_number)


class KubectlDumper(yaml.SafeDumper):
    """SafeDumper with quotes around each text that kubectl or PyYAML would take for no text."""

    yaml_implicit_resolvers = {
        first: _Loader.yaml_implicit_resolvers.get(first, [])
        + yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
        for first in {*_Loader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
    }


def _refuse(problem: str, node: yaml.Node) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def load_documents(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML stream, those of Lists among them. Empty documents and what is no
    object are left out.

    Raises:
        ValueError: the text is no YAML; the message is one line, which says where.
    """
    documents = _checked(lambda: list(yaml.load_all(text, Loader=_Loader)))
    objects = []
    for document in documents:
        is_list = isinstance(document, dict) and str(document.get("kind")).endswith("List")
        items = document.get("items") if is_list else None
        objects += items if isinstance(items, list) else [document]
    return [document for document in objects if isinstance(document, dict)]


def load_value(text: str) -> Any:
    """One YAML value, such as `5e-6`, `[q_proj, v_proj]` or `null`.

    Raises:
        ValueError: as load_documents.
    """
    return _checked(lambda: yaml.load(text, Loader=_Loader))


def load_lines(text: str) -> dict[str, tuple[Any, int]]:
    """The entries of one YAML mapping, each with its line.

    Raises:
        ValueError: as load_documents; or it is no mapping.
    """
    node = _checked(lambda: yaml.compose(text, Loader=_Loader))
    values = load_value(text)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(  # noqa: TRY004  # of the text, not of a type
            "the file holds no settings; write them as key: value"
        )
    lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
    return {key: (value, lines.get(key, 0)) for key, value in values.items()}


def _checked(load: Callable[[], _T]) -> _T:
    """Return what a load gives, with its errors as one line."""
    try:
        return load()
    except yaml.MarkedYAMLError as error:
        problem = str(error.problem)
        if problem == "but found another document":  # PyYAML's half of a sentence
            problem = "a second document begins here; give a file with one"
        if "'\\t'" in problem:
            problem += "; indent by blanks"
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{problem}") from error
    except yaml.reader.ReaderError as error:
        raise ValueError(f"character {error.position + 1} is not allowed in YAML") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
