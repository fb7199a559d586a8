"""A map of JSON values that a library defines: bounded here, judged by the library.

A CustomResourceDefinition has no type for any JSON value. So the API server keeps what it is given
(x-kubernetes-preserve-unknown-fields), and Python checks keys, size and depth.
"""

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

MAX_KEYS = 32
MAX_BYTES = 8192
"""Of the whole map as compact JSON: a plan has all of them and goes into an annotation."""
MAX_DEPTH = 8
MOST_DIGITS = 1e21
"""Go writes larger numbers with an exponent, which no integer has."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class HashableMap(dict[str, Any]):
    """A map in a frozen record, whose hash the planner's caches need."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none
        return hash(json.dumps(self, sort_keys=True))


def _validate_map(values: dict[str, Any]) -> HashableMap:
    """Reject keys that no Python argument has, and what is too deep or too large."""
    for name in values:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r:.80} is no name of an argument: letters, digits and _")
    if _is_deeper(values, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes of JSON, at most {MAX_BYTES} are allowed")
    # A key of YAML that is a number is text in JSON.
    return HashableMap(_as_served(json.loads(text)))


def _as_served(value: Any) -> Any:
    """The value as the API server returns it: 2.0 is the integer 2."""
    if isinstance(value, dict):
        return {name: _as_served(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_served(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < MOST_DIGITS:
        return int(value)
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """True if lists and objects are nested deeper than `levels`."""
    if not isinstance(value, list | dict):
        return False
    children = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(child, levels - 1) for child in children)


JSONMap = Annotated[
    dict[str, Any],
    Field(max_length=MAX_KEYS, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
    AfterValidator(_validate_map),
]
"""Arguments of a library by their names there."""
