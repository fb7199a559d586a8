"""The fields of the pinned TRL's GRPOConfig, for grpo_api, which may import neither TRL nor torch.

They are read from the installed sources without importing them: TRL imports torch, and codegen
would take seconds for that. A test of the trainer compares the list with the live class.
"""

import ast
import json
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

_CLASSES = (
    ("transformers", "transformers/training_args.py", "TrainingArguments"),
    ("trl", "trl/trainer/base_config.py", "_BaseConfig"),
    ("trl", "trl/trainer/grpo_config.py", "GRPOConfig"),
)
"""GRPOConfig behind its bases, each with its package and its file."""
_OWN = "GRPOConfig"


class _Declaration(NamedTuple):
    """One field as a class declares it."""

    name: str
    type: str
    default: Any


def render() -> str:
    """Return trl_fields.json: one field per line, in the order of the dataclass."""
    fields: dict[str, dict[str, Any]] = {}
    for package, path, class_name in _CLASSES:
        for declared in _declarations(
            Path(str(distribution(package).locate_file(path))), class_name
        ):
            fields[declared.name] = {
                "name": declared.name,
                "type": declared.type,
                "default": declared.default,
                "isOwn": class_name == _OWN,
            }
    lines = ",\n".join(json.dumps(field) for field in fields.values())
    return f"[\n{lines}\n]\n"


def _declarations(source: Path, class_name: str) -> Iterator[_Declaration]:
    """Yield the dataclass fields that a class declares in its own body."""
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if not (isinstance(node, ast.ClassDef) and node.name == class_name):
            continue
        constants = _constants(node)
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                default = _default(field.value, constants)
                yield _Declaration(field.target.id, ast.unparse(field.annotation), default)


def _constants(node: ast.ClassDef) -> dict[str, Any]:
    """The constants that the class's body assigns, which defaults may name.

    TrainingArguments assigns `default_optim` again under a condition that every torch since 2.8
    meets, so that the last assignment counts.
    """
    return {
        target.id: statement.value.value
        for statement in ast.walk(node)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _default(value: ast.expr | None, constants: dict[str, Any]) -> Any:
    """The default of a field: what stands behind `=`, or an argument of `field(...)`."""
    if isinstance(value, ast.Call):
        arguments = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in arguments:
            return {"list": [], "dict": {}}[ast.unparse(arguments["default_factory"])]
        value = arguments["default"]
    if isinstance(value, ast.Name):
        return constants[value.id]
    assert value is not None, "every field of GRPOConfig has a default"
    return ast.literal_eval(value)
