"""Specs of GRPOJobs with generated mistakes: fields of any value, at any place that the schema has.

Most are wrong in one place, so that a second mistake hides none. What is written is what a user's
file may say: nulls, numbers with a fraction of zero and unknown fields too.
"""

import copy
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from grpo_api.text.schema import Schema
from grpo_codegen.crd import job_schema
from tests.samples import GOOD, changed

NUMBERS = (0, 1, -1, 2, 3, 7, 8.0, 2.0, 0.0, -1.0, 0.5, 1e-6, 1e3, 2**31, 2**53, 1e300)
TEXTS = (
    "",
    "a",
    "x" * 70,
    "7b",
    "7B",
    "100GB",
    "16Gi",
    "a b",
    "größe",
    "../x",
    "/a",
    "a:b",
    "1",
    "0",
)
MOST_CHANGES = 3


@cache
def spec_schema() -> Schema:
    """The schema of a spec, which nobody alters."""
    schema: Schema = job_schema()["properties"]["spec"]
    return schema


def dirty_spec(chance: random.Random) -> dict[str, Any]:
    """A spec that may be right or wrong."""
    # `changed` shares the values of the sample, which other tests use, too
    spec = copy.deepcopy(changed(GOOD[chance.choice(sorted(GOOD))]))
    for _ in range(chance.choice((1, 1, 1, 2, MOST_CHANGES))):
        _spoil(chance, spec)
    return spec


def _spoil(chance: random.Random, spec: dict[str, Any]) -> None:
    """Change one field of the spec, at a random place of it or of the schema."""
    places = list(_places(spec, spec_schema()))
    place, schema = chance.choice(places)
    if isinstance(place, list):
        _spoil_list(chance, place, schema)
        return
    known: dict[str, Schema] = schema.get("properties") or {}
    others: Schema = schema.get("additionalProperties") or {}
    name = chance.choice([*known, *place]) if known or place else "key"
    if name in place and chance.random() < 0.15:
        del place[name]
    elif chance.random() < 0.05:
        place[f"{name}x"] = _any_value(chance)
    else:
        place[name] = value(chance, known.get(name, others))


def _spoil_list(chance: random.Random, place: list[Any], schema: Schema) -> None:
    if place and chance.random() < 0.3:
        place.append(copy.deepcopy(chance.choice(place)))
    elif place and chance.random() < 0.5:
        place[chance.randrange(len(place))] = value(chance, schema["items"])
    else:
        place.append(value(chance, schema["items"]))


def _places(value: Any, schema: Schema) -> Iterator[tuple[Any, Schema]]:
    """Every object, map and list in a value, with its schema."""
    if isinstance(value, dict) and schema.get("type") == "object":
        yield value, schema
        for name, part in value.items():
            below = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            yield from _places(part, below or {})
    elif isinstance(value, list) and "items" in schema:
        yield value, schema
        for item in value:
            yield from _places(item, schema["items"])


def value(chance: random.Random, schema: Schema) -> Any:
    """A value that the schema takes, one at its bounds, null, or one of another type."""
    kind = chance.random()
    if kind < 0.15:
        return None
    if kind < 0.3:
        return _any_value(chance)
    return _fitting(chance, schema)


def _any_value(chance: random.Random) -> Any:
    words: tuple[Any, ...] = (True, [], {}, [None], {"a": None}, {"a": "b"})
    return chance.choice((*NUMBERS, *TEXTS, *words))


def _fitting(chance: random.Random, schema: Schema) -> Any:
    """A value of the schema's type; numbers and lists at their bounds or one beyond."""
    if "enum" in schema:
        return chance.choice([*schema["enum"], "none"])
    if "default" in schema and chance.random() < 0.3:
        return copy.deepcopy(schema["default"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        bounds = [schema[name] for name in ("minimum", "maximum") if name in schema]
        number = chance.choice(
            [*NUMBERS, *(bound + step for bound in bounds for step in (-1, 0, 1))]
        )
        return float(number) if chance.random() < 0.3 else number
    if kind == "boolean":
        return chance.random() < 0.5
    if kind == "array":
        return [value(chance, schema["items"]) for _ in range(chance.randrange(3))]
    if kind == "object":
        fields = schema.get("properties")
        if fields is None:
            keys = chance.sample(TEXTS, chance.randrange(3))
            return {key: value(chance, schema.get("additionalProperties", {})) for key in keys}
        required = schema.get("required", [])
        names = {*required, *chance.sample(sorted(fields), min(len(fields), chance.randrange(3)))}
        return {name: value(chance, fields[name]) for name in sorted(names)}
    return chance.choice((*TEXTS, 4, 1.0) if "x-kubernetes-int-or-string" in schema else TEXTS)
