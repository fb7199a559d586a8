"""Renders pydantic models as the structural schema of a CustomResourceDefinition.

The models are the only source of the CRD. What structural means:
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

from pydantic import BaseModel

from .names import LABEL_KEY, RESOURCE_NAME, RESOURCE_NAMES
from .quantity import PATTERN_HINT

Schema = dict[str, Any]

_EXCLUSIVE = (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))
_BOUNDS = {"string": "maxLength", "array": "maxItems", "map": "maxProperties"}
_MAX_DEPTH = 24


class NotStructural(ValueError):
    """A model that has no structural schema, or an unbounded one; the message names the field's
    path."""


def structural_schema(model: type[BaseModel], *, defaults: bool) -> Schema:
    """The structural schema of a model, references resolved, every string, list and map bounded.

    With `defaults` the API server fills in the models' defaults. Sub-objects with a default factory
    get the whole default object: the server defaults only inside objects that are present, and
    judges the default itself by the object's rules. Without, defaults are left out: a status is
    written whole by its controller.

    Raises:
        NotStructural: a union, a recursion, or a string, list or map without a bound.
    """
    raw = json.loads(_json_schema(model))
    return _Converter(raw.pop("$defs", {}), defaults).convert(raw, model.__name__)


@cache
def _json_schema(model: type[BaseModel]) -> str:
    """The model's schema as pydantic makes it, in more than a second for a whole job; as text,
    which no caller can alter."""
    return json.dumps(model.model_json_schema(by_alias=True, mode="validation"))


def schema_fields(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every field below a structural schema with its path, such as
    `spec.rewards[].format.pattern`."""
    for name, child in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        yield below, child
        yield from schema_fields(child, below)
    for key, suffix in (("items", "[]"), ("additionalProperties", ".*")):
        if key in schema:
            yield path + suffix, schema[key]
            yield from schema_fields(schema[key], path + suffix)


class _Converter:
    """Rewrites one JSON schema; `path` in its methods is the place that errors name."""

    def __init__(self, definitions: dict[str, Schema], defaults: bool) -> None:
        self._definitions = definitions
        self._defaults = defaults
        self._described: set[str] = set()

    def convert(self, schema: Schema, path: str) -> Schema:
        """The structural form of a schema and of everything below it."""
        if path.count(".") > _MAX_DEPTH:
            raise NotStructural(
                f"{path}: deeper than {_MAX_DEPTH} levels; a recursive model has no structural "
                "schema"
            )
        result = self._keywords(self._without_references(schema, path))
        if "properties" in result:
            result["properties"] = self._properties(result, path)
            result.pop("additionalProperties", None)
        elif isinstance(result.get("additionalProperties"), dict):
            result["additionalProperties"] = self.convert(
                result["additionalProperties"], f"{path}.*"
            )
        if "items" in result:
            result["items"] = self.convert(result["items"], f"{path}[]")
            # Server-side apply replaces a list whole, unless MapList says how to merge it.
            result.setdefault("x-kubernetes-list-type", "atomic")
        _require_bound(result, path)
        return result

    def _without_references(self, schema: Schema, path: str) -> Schema:
        """The schema without `$ref` and without the null of an optional field; its own keywords
        win."""
        schema = dict(schema)
        if "x-kubernetes-int-or-string" in schema:
            schema.pop("type", None)
            return schema
        if "$ref" in schema:
            name = schema.pop("$ref").rsplit("/", 1)[1]
            return self._without_references(self._definition(name) | schema, path)
        if "anyOf" not in schema:
            return schema
        options = [option for option in schema.pop("anyOf") if option.get("type") != "null"]
        if len(options) != 1:
            raise NotStructural(
                f"{path}: a union; write it as optional fields and a rule that exactly one is set"
            )
        return self._without_references(options[0] | schema, path)

    def _definition(self, name: str) -> Schema:
        """A copy of a definition, since shared parts would become anchors in YAML.

        A status, which no user writes, describes the fields of a repeated part once: `kubectl
        apply` and Argo CD refuse a CRD of 262,144 bytes.
        """
        definition = deepcopy(self._definitions[name])
        if not self._defaults and name in self._described:
            for field in definition.get("properties", {}).values():
                field.pop("description", None)
        self._described.add(name)
        return definition

    def _keywords(self, schema: Schema) -> Schema:
        """The schema in the keywords that a CRD knows."""
        schema.pop("title", None)
        if schema.get("additionalProperties") is True:
            # Values of any kind, which x-kubernetes-preserve-unknown-fields makes the server keep.
            schema.pop("additionalProperties")
        if _kind(schema) == "map":
            _map_keywords(schema)
        if "const" in schema:
            schema["enum"] = [schema.pop("const")]
        for flag, bound in _EXCLUSIVE:
            if flag in schema:
                schema[bound], schema[flag] = schema[flag], True
        if schema.get("type") == "integer":
            schema["format"] = "int64"
        hint = schema.pop(PATTERN_HINT, None)
        if hint:
            _replace_pattern(schema, hint)
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())
        if not self._defaults or schema.get("default", 0) is None:
            schema.pop("default", None)
        return schema

    def _properties(self, schema: Schema, path: str) -> dict[str, Schema]:
        required = schema.get("required", ())
        properties = {}
        for name, raw in schema["properties"].items():
            child = self.convert(raw, f"{path}.{name}")
            if (
                self._defaults
                and name not in required
                and "default" not in raw
                and child.get("type") == "object"
            ):
                inner = child.get("properties", {})
                child["default"] = {
                    k: deepcopy(part["default"]) for k, part in inner.items() if "default" in part
                }
            properties[name] = child
        return properties


def _kind(schema: Schema) -> str:
    """The schema's type; `map` for an object whose keys are the user's, empty where users may write
    anything."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return ""
    kind = str(schema.get("type", ""))
    if kind == "object" and "properties" not in schema:
        return "map"
    return kind


_KEYS = {
    LABEL_KEY: "every key must be a label's key, such as team or example.com/team",
    RESOURCE_NAME: f"every key must be {RESOURCE_NAMES}",
}
"""What keys must be that have one of these patterns."""


def _map_keywords(schema: Schema) -> None:
    """Turn the bounds of a map's keys, which a CRD can't say, into CEL rules."""
    bounds = schema.pop("propertyNames", {})
    rules = []
    for pattern, values in schema.pop("patternProperties", {}).items():
        schema["additionalProperties"] = values
        rules.append(
            (
                f"self.all(key, key.matches({json.dumps(pattern)}))",
                _KEYS.get(pattern, f"every key must match {pattern}"),
            )
        )
    if "maxLength" in bounds:
        least, most = bounds.get("minLength", 0), bounds["maxLength"]
        rule = f"self.all(key, size(key) >= {least} && size(key) <= {most})"
        rules.append((rule, f"every key must have {least} to {most} characters"))
    schema["x-kubernetes-validations"] = [
        {"rule": rule, "message": message} for rule, message in rules
    ]


def _replace_pattern(schema: Schema, hint: str) -> None:
    """Turn a pattern into a CEL rule whose message says what to write."""
    rule = f"self.matches({json.dumps(schema.pop('pattern'))})"
    if "x-kubernetes-int-or-string" in schema:
        rule = f"type(self) == int || {rule}"
    schema["x-kubernetes-validations"] = [{"rule": rule, "message": hint}]


def _require_bound(schema: Schema, path: str) -> None:
    """Reject what has no upper size: the API server would reject its CEL rules as too dear."""
    kind = _kind(schema)
    bound = _BOUNDS.get(kind)
    if bound and bound not in schema and "enum" not in schema:
        raise NotStructural(f"{path}: a {kind} without {bound}")
