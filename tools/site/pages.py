"""Pages of the reference that the site makes of the code: the CRD's fields and the commands."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from grpo_cli.__main__ import COMMANDS, command_parser

ROOT = Path(__file__).parents[2]
Schema = dict[str, Any]
CORE_TYPES = {"podTemplate", "env", "envFrom", "volumeMounts", "resources"}
"""Fields with core/v1's own shape, which Kubernetes documents."""
_EXIT_CODES = """\
| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the job failed, or what was checked is wrong |
| 2 | wrong arguments or files |
| 3 | `plan`: the job fits nowhere; `diagnose`: the run has findings |
| 4 | the cluster does not answer, or refuses |
| 5 | what the command shows is not there yet: no plan, no pod |
| 6 | `wait`, `submit --wait`: the timeout came first |
| 130 | Ctrl-C |
"""


def fields_page(crd: str) -> str:
    """Return the page of a CRD: a section for each field of the spec, then the status."""
    definition = yaml.load((ROOT / crd).read_text(), yaml.CSafeLoader)
    names, (version,) = definition["spec"]["names"], definition["spec"]["versions"]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    api_version = f"{definition['spec']['group']}/{version['name']}"
    lines = [
        f"# Fields of a {names['kind']}",
        "",
        f"`apiVersion: {api_version}`. A field with * is ",
    ]
    lines[-1] += "required. `kubectl explain` prints the same text."
    for root in ("spec", "status"):
        if root in properties:
            lines += ["", *_sections(root, properties[root])]
    return "\n".join([*lines, ""])


def cli_page() -> str:
    """Return the page of the commands."""
    lines = ["# Command line", "", "`grpo`, also as `kubectl grpo`.", "", _EXIT_CODES]
    for name, command in COMMANDS.items():
        summary = command.summary[0].upper() + command.summary[1:]
        lines += [f"## grpo {name}", "", f"{summary}.", "", *_arguments(name), ""]
    return "\n".join(lines)


def _sections(root: str, schema: Schema) -> Iterator[str]:
    """Yield the lines on a part of the object: its plain fields, then a section for each other."""
    yield f"## {root}"
    yield ""
    nested = {name: field for name, field in schema["properties"].items() if _children(field)}
    plain = {name: field for name, field in schema["properties"].items() if name not in nested}
    yield from _table({**schema, "properties": plain}, "")
    for name, field in nested.items():
        yield ""
        yield f"### {root}.{name}"
        yield ""
        yield field.get("description", "")
        if name in CORE_TYPES:
            continue
        yield ""
        yield from _table(_element(field), "")


def _table(schema: Schema, prefix: str) -> Iterator[str]:
    yield "| field | type | |"
    yield "|---|---|---|"
    yield from _rows(schema, prefix)


def _rows(schema: Schema, prefix: str) -> Iterator[str]:
    """Yield a row for each field, and below it those of its own fields."""
    for name, field in schema.get("properties", {}).items():
        star = "*" if name in schema.get("required", ()) else ""
        description = " ".join(field.get("description", "").split()).replace("|", r"\|")
        yield f"| `{prefix}{name}`{star} | {_type(field)} | {description} |"
        if name not in CORE_TYPES and _children(field):
            brackets = "[]" if field.get("type") == "array" else ""
            yield from _rows(_element(field), f"{prefix}{name}{brackets}.")


def _element(field: Schema) -> Schema:
    """Return the schema of a list's elements or a map's values, else the field's own."""
    values = field.get("additionalProperties")
    element: Schema = field.get("items") or (values if isinstance(values, dict) else field)
    return element


def _children(field: Schema) -> bool:
    return "properties" in _element(field)


def _type(field: Schema) -> str:
    """Return a field's type with its values or limits."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    kind = field.get("type", "integer or string")
    if kind == "array":
        return f"list of {_type(field['items'])}"
    limits = [
        f"{sign} {field[limit]}"
        for limit, sign in (("minimum", "≥"), ("maximum", "≤"))
        if limit in field
    ]
    return f"{kind} {', '.join(limits)}".strip()


def _arguments(name: str) -> Iterator[str]:
    """Yield the table of a command's arguments."""
    subparsers = next(
        action
        for action in command_parser([name])._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    parser = subparsers.choices[name]
    yield "| argument | |"
    yield "|---|---|"
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            yield f"| {_signature(action)} | {(action.help or '').replace('|', chr(92) + '|')} |"


def _signature(action: argparse.Action) -> str:
    """Return an argument as it is typed."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = str(action.metavar or choices or action.dest.upper())
    if not action.option_strings:
        return f"`{choices or action.metavar or action.dest}`"
    takes_value = action.nargs != 0
    return ", ".join(
        f"`{option} {value}`" if takes_value else f"`{option}`" for option in action.option_strings
    )
