"""What is wrong with a spec, in sentences: where, what was given, what is allowed, and for a slip the right word."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from .base import dotted
from .contract import KIND
from .schema import Schema

_LIKENESS = 0.7


def sentence(problem: ErrorDetails, schema: Schema) -> str:
    """`spec.training.beta: Input should be … (got -1)`; `schema` is the structural schema of the spec."""
    path = ["spec", *problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return f"{dotted(path)}: {_unknown(problem['loc'], schema)}"
    # a broken rule over several fields has no single value
    got = "" if problem["type"] == "rule" else f" (got {problem['input']!r:.80})"
    return f"{dotted(path)}: {problem['msg'].removeprefix('Value error, ')}{got}"


def _unknown(location: Sequence[int | str], schema: Schema) -> str:
    """What to write instead of a field that is not there."""
    *parents, name = location
    known = _below(schema, parents).get("properties", {})
    spelled = {field.lower(): field for field in known}
    close = get_close_matches(to_camel(str(name)).lower(), spelled, n=1, cutoff=_LIKENESS)
    if close:
        return f"unknown field; did you mean {spelled[close[0]]}?"
    section = ".".join(["spec", *(str(part) for part in parents if isinstance(part, str))])
    return f"unknown field; `kubectl explain {KIND.lower()}.{section}` lists what there is"


def _below(schema: Schema, parents: Sequence[int | str]) -> dict[str, Any]:
    """The schema of the object at a location."""
    for part in parents:
        inside = schema.get("items") if isinstance(part, int) else schema.get("properties", {}).get(part)
        schema = inside or schema.get("additionalProperties") or {}
    return schema
