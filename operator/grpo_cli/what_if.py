"""`--what-if KEY=VALUE`: which field of the spec a short key means, and the spec with it changed.

Users type `numGenerations=16` instead of a path.
"""

from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from grpo_api.job import GRPOJobSpec, SpecInvalid
from grpo_api.spec.generation import ENGINES_OF, GenerationSpec
from grpo_planner.explain.fixes import with_value

from .errors import OptionError
from .manifest import load_value

SECTIONS = ("training", "placement", "adapter", "reference", "generation", "model", "checkpoint")
"""Where a short key is looked for, in this order."""
ENGINE = "spec.generation.engine"


def changed(spec: GRPOJobSpec, change: str) -> GRPOJobSpec:
    """The spec with `KEY=VALUE` applied; `gpus=8` pins the number of GPUs, and `KEY=null` unsets a field.

    Another engine comes without the settings of the one before; see left_out.

    Raises:
        OptionError: the key names no field, there is no `=`, the value is no YAML or not allowed there.
    """
    key, separator, text = change.partition("=")
    if not separator:
        raise OptionError(f"--what-if {change!r} has no value; write it as numGenerations=16")
    value = _value(change, text)
    if key == "gpus" and isinstance(value, int):
        value = {"min": value, "max": value}
    path = path_of(key)
    try:
        if path == ENGINE:
            spec = _without(spec, _others_settings(spec, value))
        return with_value(spec, path, value)
    except SpecInvalid as error:
        raise OptionError(*(f"--what-if {change}: {problem}" for problem in error.problems)) from error


def left_out(before: GRPOJobSpec, after: GRPOJobSpec) -> list[str]:
    """Paths of what a change of the engine took away with it: settings that belong to the one before."""
    engine = after.generation.engine
    return [] if engine == before.generation.engine else _others_settings(before, engine)


def _others_settings(spec: GRPOJobSpec, engine: object) -> list[str]:
    """Paths of what is set and belongs to engines other than this; without an engine it is the default."""
    wanted = spec.generation.model_copy(update={"engine": engine or GenerationSpec().engine})
    return [f"spec.generation.{to_camel(name)}" for name in wanted.belong_elsewhere(*ENGINES_OF)]


def _without(spec: GRPOJobSpec, paths: list[str]) -> GRPOJobSpec:
    for path in paths:
        spec = with_value(spec, path, None)
    return spec


def _value(change: str, text: str) -> Any:
    try:
        return load_value(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionError(f"--what-if {change!r}: {text!r} is no YAML value") from error


def path_of(key: str) -> str:
    """Return the path that a key means: the key itself if it begins with `spec.`, else the field with this name.

    Raises:
        OptionError: no field has this name.
    """
    if key.startswith("spec."):
        return key
    if "." in key and key.split(".", maxsplit=1)[0] in SECTIONS:
        return f"spec.{key}"
    name = to_camel(key)
    for section in SECTIONS:
        kind = GRPOJobSpec.model_fields[section].annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and name in _names(kind):
            return f"spec.{section}.{name}"
    raise OptionError(f"--what-if: {key!r} is no field of {', '.join(SECTIONS)}; write the path, spec.training.…")


def _names(kind: type[BaseModel]) -> set[str]:
    """Field names as users write them."""
    names: set[str] = set()
    for name, field in kind.model_fields.items():
        names.add(field.alias or name)
    return names
