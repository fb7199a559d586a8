"""Explains an error of a spec: the field, the given value, and what is allowed there.

Pydantic's own words are those of a Python program ("Input should be a valid dictionary"). A user
writes YAML, and reads the same in the words of the spec. For a misspelled word there is the right
one.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from .base import dotted_path
from .contract import KIND
from .messages import value_text
from .names import (
    RESOURCE_NAME,
    RESOURCE_NAMES,
    DataKey,
    DNSLabel,
    Endpoint,
    Image,
    LabelKey,
    LabelValue,
    Name,
    Path,
    Repository,
    Revision,
    RewardName,
    ServiceURL,
    SubPath,
    VariableName,
)
from .quantity import Quantity
from .schema import Schema, schema_fields

_LIKENESS = 0.8
_LONG = 200
"""Characters of a list of values from which one that is meant is named alone."""
_MAX_PLACES = 5
"""A name that the spec has at more places, such as `path`, doesn't say which one is meant."""
_DEPTH_OF_SETTINGS = 2
"""Dots in the path of a setting, such as spec.training.beta; deeper ones are parts of it."""


def _pattern(field_type: Any) -> str:
    """Return the pattern of an annotated text."""
    limits = (
        limit for field in get_args(field_type)[1:] for limit in getattr(field, "metadata", ())
    )
    return next(str(limit.pattern) for limit in limits if getattr(limit, "pattern", None))


_NO_BLANKS = "must have no blanks"
_PATTERNS = {
    _pattern(Name): "must be a name of Kubernetes: small letters, digits, `-` and `.`",
    _pattern(DNSLabel): "must be a name of small letters, digits and `-`",
    _pattern(LabelKey): "must be the key of a label, such as example.com/pool",
    _pattern(LabelValue): "must be the value of a label: letters, digits, `-`, `_` and `.`",
    RESOURCE_NAME: f"must be {RESOURCE_NAMES}",
    _pattern(Repository): _NO_BLANKS,
    _pattern(Revision): "must be a commit, tag or branch, without blanks",
    _pattern(SubPath): "must be a path inside the volume: remove `/` from its beginning",
    _pattern(Image): _NO_BLANKS,
    _pattern(Path): "must be an absolute path without `:`",
    _pattern(DataKey): "must be a key of a Secret or ConfigMap: letters, digits, `-`, `_` and `.`",
    _pattern(VariableName): "must be letters, digits, `_`, `-` and `.`, with a letter or `_` first",
    _pattern(RewardName): "must be letters, digits, `_` and `-`, with no digit first",
    _pattern(ServiceURL): "write it as https://HOST/PATH, without user and query",
    _pattern(Quantity): "write it as 500m, 4 or 16Gi",
    _pattern(Endpoint): "write it as http://HOST:PORT or https://HOST",
}
"""What a text must be that breaks one of the patterns which many fields have."""

_OTHER_VALUES = {
    "vllm": "Colocated",
    "hf": "Transformers",
    "true": "Enabled",
    "false": "Disabled",
    "bf16": "bfloat16",
    "fp32": "float32",
    "adamw_torch": "AdamW",
    "rwo": "ReadWriteOnce",
    "rwx": "ReadWriteMany",
}
"""Values by other names, in small letters."""

_REQUIREMENTS = {
    "missing": "is required",
    "extra_forbidden": "unknown field",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} item{s}, not {actual_length}",
    "too_long": "must have at most {max_length} item{s}, not {actual_length}",
    "string_too_short": "must have at least {min_length} character{s}",
    "string_too_long": "must have at most {max_length} character{s}",
    "string_type": "must be text",
    "string_unicode": "must be text of Unicode characters",
    "dict_type": "must be an object of keys and values",
    "int_from_float": "must be a whole number",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false, without quotes",
    "bool_parsing": "must be true or false, without quotes",
}
"""What is allowed, by pydantic's type of an error, with the limits of the field."""
_NUMBERS = ("int_type", "int_parsing", "float_type", "float_parsing")
_NUMBER = re.compile(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?")


def problem_message(
    problem: ErrorDetails,
    schema: Schema,
    other_name: Callable[[Sequence[int | str]], str] = lambda _: "",
    kind: str = KIND,
) -> str:
    """`spec.training.beta: must be at least 0 (got -1)`.

    `other_name`: of the path of an unknown field what to write, if it is another program's; `kind`:
    of the object that has the spec.
    """
    path = ["spec", *problem["loc"]]
    if problem["type"] == "extra_forbidden":
        other = other_name(problem["loc"])
        message = _unknown_field_message(problem["loc"], schema, other, kind)
        return f"{dotted_path(path)}: {message}"
    # A broken rule over several fields has no single value, what is missing has none, and a list
    # that is too long says so by its length.
    has_value = problem["type"] not in ("rule", "missing", "too_long")
    value = f" (got {value_text(problem['input'])})" if has_value else ""
    return f"{dotted_path(path)}: {requirement(problem, schema)}{value}"


def requirement(problem: ErrorDetails, schema: Schema) -> str:
    """Return what is allowed at the place of an error; `schema` is the structural schema of the
    object, or empty if it has no schema."""
    kind, limits = problem["type"], problem.get("ctx", {})
    place = _schema_at(schema, problem["loc"])
    if kind == "string_pattern_mismatch":
        return _text_requirement(limits["pattern"], place)
    if kind == "literal_error":
        return _choice_requirement(problem, place)
    if kind == "string_type" and isinstance(problem["input"], bool):
        return "must be text; YAML reads y, n, yes, no, on and off without quotes as true and false"
    if kind == "model_type":
        return f"must be an object{_example(place, 'fields such as `', problem['input'])}"
    if kind == "list_type":
        return _list_requirement(problem, place)
    if kind in _REQUIREMENTS:
        # A whole number that is a float, without its fraction.
        numbers = {
            name: int(limit) if isinstance(limit, float) and limit.is_integer() else limit
            for name, limit in limits.items()
        }
        ending = "" if 1 in (limits.get("min_length"), limits.get("max_length")) else "s"
        return _REQUIREMENTS[kind].format(**numbers, s=ending) + _quotes_hint(problem)
    return problem["msg"].removeprefix("Value error, ")


def _list_requirement(problem: ErrorDetails, place: Schema) -> str:
    """Return the list that a text or an object must be instead."""
    text, items = problem["input"], place.get("items", {})
    if not isinstance(text, str) or items.get("type") != "string":
        return f"must be a list{_example(items, 'items such as `- ', text)}"
    if problem["loc"][-1] in ("command", "args") and " " in text:
        return 'must be a list with each word as an item, such as ["python", "-m", "mine"]'
    return f"must be a list: write [{json.dumps(text, ensure_ascii=False)}]"


def _quotes_hint(problem: ErrorDetails) -> str:
    """Say that a number is in quotes, or must be; empty for other values."""
    value = problem["input"]
    if problem["type"] == "string_type":
        return "; a number in quotes is text" if isinstance(value, int | float) else ""
    is_number = isinstance(value, str) and _NUMBER.fullmatch(value)
    return ", without quotes" if is_number and problem["type"] in _NUMBERS else ""


def _example(place: Schema, beginning: str, given: object) -> str:
    """Name a field that an object has, one in the given value where it names one; empty if it has
    none."""
    properties = place.get("properties", {})
    words = given if isinstance(given, list | dict) else [given]
    named = [word for word in words if isinstance(word, str) and word in properties]
    fields = named or place.get("required") or list(properties)
    return f", with {beginning}{fields[0]}: …` below it" if fields else ""


def _text_requirement(pattern: str, place: Schema) -> str:
    """Return what a text must be instead: by the field's own rule, the pattern's sentence, or the
    pattern itself."""
    if "pattern" not in place:
        for rule in place.get("x-kubernetes-validations", ()):
            return str(rule["message"])
    return _PATTERNS.get(pattern) or f"must match {pattern}"


def _choice_requirement(problem: ErrorDetails, place: Schema) -> str:
    """Return the values that a field may have, and which one is meant if the given one is near."""
    values = place.get("enum")
    if not values:
        return f"must be {problem.get('ctx', {}).get('expected', '')}"
    allowed = f"must be one of {', '.join(map(str, values))}"
    if problem["input"] is False and "Off" in values:
        return f"{allowed}; YAML reads Off without quotes as false"
    spelled = {str(value).lower(): str(value) for value in values}
    spelled |= {word: value for word, value in _OTHER_VALUES.items() if value in values}
    close = get_close_matches(str(problem["input"]).lower(), spelled, n=1, cutoff=_LIKENESS)
    if not close:
        return allowed
    if len(allowed) > _LONG:
        allowed = f"must be one of {len(values)} words, which `kubectl explain` lists"
    return f"{allowed}; did you mean {spelled[close[0]]}?"


def _unknown_field_message(
    location: Sequence[int | str], schema: Schema, other_name: str, kind: str
) -> str:
    """What to write instead of a field that is not there."""
    *parents, name = location
    known_fields = _schema_at(schema, parents).get("properties", {})
    spelled = {field.lower(): field for field in known_fields}
    wanted = to_camel(str(name)).lower()
    if wanted not in spelled and other_name:
        return f"unknown field; {other_name}"
    close = get_close_matches(wanted, spelled, n=1, cutoff=_LIKENESS)
    if close:
        return f"unknown field; did you mean {spelled[close[0]]}?"
    section = ".".join(["spec", *(str(part) for part in parents if isinstance(part, str))])
    places = [path for path in _places(schema, wanted) if _is_near(path, section)]
    if 0 < len(places) <= _MAX_PLACES:
        nearest = min(places, key=lambda path: path.count("."))
        return f"unknown field; did you mean {nearest}?"
    longer = [field for key, field in spelled.items() if key.startswith(wanted)]
    if len(longer) == 1:
        return f"unknown field; did you mean {longer[0]}?"
    return f"unknown field; `kubectl explain {kind.lower()}.{section}` lists what there is"


def _places(schema: Schema, wanted: str) -> Iterator[str]:
    """Yield the paths of the fields of this name, in small letters."""
    for path, _ in schema_fields(schema, "spec"):
        if path.lower().rpartition(".")[2] == wanted:
            yield path


def _is_near(path: str, section: str) -> bool:
    """True if a field that is unknown in a section may be meant for this path."""
    # No setting of a job belongs into an item of a pod's list.
    if path.startswith("spec.podTemplate.") and "[]" in path:
        return False
    # Such as the size of a claim, which is no size of a model.
    is_part = path.count(".") > _DEPTH_OF_SETTINGS
    return not is_part or path.replace("[]", "").startswith(f"{section}.")


def _schema_at(schema: Schema, parents: Sequence[int | str]) -> dict[str, Any]:
    """The schema of the object at a location."""
    for part in parents:
        inside = (
            schema.get("items") if isinstance(part, int) else schema.get("properties", {}).get(part)
        )
        schema = inside or schema.get("additionalProperties") or {}
    return schema
