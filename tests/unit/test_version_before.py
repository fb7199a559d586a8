"""What the version before may have stored, this one reads: no field of its definition is gone, and
none is narrower.

Rules over several fields are left out: how the API server ratchets is tried in
tests/integration/test_api_versions.py.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_codegen.crd import definition
from tests import version_before

Schema = dict[str, Any]
SAME = (
    "type",
    "format",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
)
MOST = ("maxLength", "maxItems", "maxProperties", "maximum")
LEAST = ("minLength", "minItems", "minProperties", "minimum")
INSIDE = ("items", "additionalProperties")


def pattern(schema: Schema) -> str | None:
    """What a text must match, which a rule may say in the place of a pattern."""
    for rule in schema.get("x-kubernetes-validations", ()):
        said = re.fullmatch(r'(?:type\(self\) == int \|\| )?self\.matches\((".*")\)', rule["rule"])
        if said:
            return str(json.loads(said[1]))
    return schema.get("pattern")


def narrowed(path: str, before: Schema, now: Schema) -> Iterator[str]:
    """Where a schema refuses what an earlier one took."""
    yield from (f"{path}: another {word}" for word in SAME if before.get(word) != now.get(word))
    if pattern(before) != pattern(now):
        yield f"{path}: another pattern"
    yield from (
        f"{path}: {word}"
        for word in MOST
        if now.get(word, float("inf")) < before.get(word, float("inf"))
    )
    yield from (
        f"{path}: {word}"
        for word in LEAST
        if now.get(word, -float("inf")) > before.get(word, -float("inf"))
    )
    if "enum" in now and not ("enum" in before and set(before["enum"]) <= set(now["enum"])):
        yield f"{path}: enum"
    yield from (
        f"{path}.{name}: required"
        for name in set(now.get("required", ())) - set(before.get("required", ()))
    )
    for name, field in before.get("properties", {}).items():
        if name in now.get("properties", {}):
            yield from narrowed(f"{path}.{name}", field, now["properties"][name])
        else:
            yield f"{path}.{name}: gone"
    for word in INSIDE:
        if isinstance(before.get(word), dict):
            yield from narrowed(f"{path}[]", before[word], now.get(word) or {})


def parts(crd: Schema) -> dict[str, Schema]:
    found: dict[str, Schema] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return {name: found[name] for name in ("spec", "status")}


def test_what_the_version_before_stored_is_still_taken() -> None:
    before, now = parts(version_before.definition()), parts(definition())
    assert [found for name in before for found in narrowed(name, before[name], now[name])] == []


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"type": "string"}, {"type": "integer"}, ["x: another type"]),
        ({"pattern": "a"}, {"pattern": "b"}, ["x: another pattern"]),
        ({"pattern": "a"}, {"x-kubernetes-validations": [{"rule": 'self.matches("a")'}]}, []),
        ({}, {"maximum": 5}, ["x: maximum"]),
        ({"maxLength": 6}, {"maxLength": 5}, ["x: maxLength"]),
        ({"minimum": 0}, {"minimum": 1}, ["x: minimum"]),
        ({"enum": ["a", "b"]}, {"enum": ["a"]}, ["x: enum"]),
        ({}, {"enum": ["a"]}, ["x: enum"]),
        ({"properties": {"a": {}}}, {"properties": {"b": {}}}, ["x.a: gone"]),
        ({}, {"properties": {"a": {}}, "required": ["a"]}, ["x.a: required"]),
        ({"items": {"maximum": 5}}, {"items": {"maximum": 4}}, ["x[]: maximum"]),
        (
            {"enum": ["a"], "minimum": 1},
            {"enum": ["a", "b"], "minimum": 0, "properties": {"a": {}}},
            [],
        ),
    ],
)
def test_every_narrowing_is_found(before: Schema, now: Schema, found: list[str]) -> None:
    assert list(narrowed("x", before, now)) == found
