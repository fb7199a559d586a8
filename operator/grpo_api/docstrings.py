"""The sentences below fields, as the descriptions that `kubectl explain` prints.

Pydantic would read them from the source of each class when it is made, which is a third of a command's start. Only
schemas show them, so they are read for those.
"""

import ast
import inspect
from textwrap import dedent
from typing import Any

from pydantic import BaseModel


def describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Gives each property of a model's JSON schema the sentence below its field, a base class's where it has none."""
    sentences: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if kind is not BaseModel and issubclass(kind, BaseModel):
            sentences |= _sentences(kind)
    for name, field in model.model_fields.items():
        prop = schema.get("properties", {}).get(field.alias or name)
        if prop is not None and name in sentences:
            prop["description"] = sentences[name]


def _sentences(kind: type[BaseModel]) -> dict[str, str]:
    """Text below each field that the class itself declares; none where its source is not at hand."""
    try:
        (definition,) = ast.parse(dedent(inspect.getsource(kind))).body
    except OSError:
        return {}
    assert isinstance(definition, ast.ClassDef), "the source of a class is its definition"
    sentences = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            sentences[field.target.id] = inspect.cleandoc(below.value.value)
    return sentences
