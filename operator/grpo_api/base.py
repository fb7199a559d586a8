"""What every type of the contract shares: strict camelCase models, CEL rules and the quantities that users write.

Exists so that the CRD, the plan and the report are written in one style. Imported by every module of grpo_api.
"""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

MIB, GIB = 2**20, 2**30
"""Bytes of one MiB and of one GiB."""

_PARAMETER_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_BYTE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTE_UNITS |= {"Ki": 2**10, "Mi": MIB, "Gi": GIB, "Ti": 2**40}


class Rule(NamedTuple):
    """A rule over several fields: once in CEL for the API server, once in Python for a laptop and for the operator."""

    cel: str
    """The rule as the API server evaluates it; `self` is the model."""
    message: str
    """What a user reads who breaks it: what is allowed and how to fix it."""
    holds: Callable[[Any], bool] | None = None
    """The same in Python. None for rules over metadata and over the old object, which only the API server sees."""
    field_path: str = ""
    """The field that the API server blames, such as `.spec.model`. Empty: the model."""


def _add_rules(schema: dict[str, Any], model: type["Model"]) -> None:
    """Put a model's rules into its JSON schema, where they become the CRD's."""
    if model.RULES:
        schema["x-kubernetes-validations"] = [
            {"rule": rule.cel, "message": rule.message} | ({"fieldPath": rule.field_path} if rule.field_path else {})
            for rule in model.RULES
        ]


class Model(BaseModel):
    """A strict record: camelCase outside, snake_case inside, unknown fields refused, frozen once made."""

    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Rules over several fields; checked after the fields' own types and limits."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        json_schema_extra=_add_rules,
    )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        """Refuse a record that breaks a rule, with the messages of all rules that it breaks."""
        broken = [rule.message for rule in self.RULES if rule.holds and not rule.holds(self)]
        if broken:
            raise PydanticCustomError("rule", "{messages}", {"messages": "; ".join(broken)})
        return self


def map_list(*keys: str) -> dict[str, Any]:
    """Marks a list as a map keyed by the named fields, so that server-side apply merges it item by item."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def stays_inside(path: str | None) -> bool:
    """Whether a relative path stays below its volume."""
    return path is None or ".." not in path.split("/")


SUB_PATH_RULE = Rule(
    "!has(self.subPath) || !self.subPath.split('/').exists(part, part == '..')",
    "subPath must stay inside the volume: remove `..`",
    lambda volume: stays_inside(volume.sub_path),
)
"""For every model with a `subPath`."""


def unique(field: str) -> AfterValidator:
    """Refuse a list with two items of the same `field`, as the API server does for `map_list`."""

    def check(items: list[Any]) -> list[Any]:
        keys = [getattr(item, field) for item in items]
        if repeated := {key for key in keys if keys.count(key) > 1}:
            raise PydanticCustomError("duplicate", "more than one item with {keys}", {"keys": ", ".join(repeated)})
        return items

    return AfterValidator(check)


ATOMIC_LIST: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}

# Patterns are read by two engines, Go's RE2 in the API server and Rust's in pydantic. Where they differ (\s, \w and \d
# are ASCII in one and Unicode in the other) the characters are written out.
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_POSITIVE = r"([1-9][0-9]*(\.[0-9]+)?|0\.[0-9]*[1-9][0-9]*)"

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
"""The name of a Kubernetes object."""

Path = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^/[^\x00-\x1f\x7f:]*$")]
"""An absolute path inside the pods."""

SubPath = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$")]
"""A path relative to a volume; `stays_inside` keeps it there."""

Repository = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x20\x7f]+$")]
"""A Hugging Face hub id such as `openai/gsm8k`, or an absolute path in the pods."""

Revision = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[-._/a-zA-Z0-9]+$")]
"""A commit, tag or branch on the hub."""

Quantity = Annotated[str, Field(min_length=1, max_length=32, pattern=rf"^{_POSITIVE}(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
"""A positive Kubernetes quantity such as `500m`, `4` or `16Gi`."""

ByteQuantity = Annotated[str, Field(min_length=1, max_length=32, pattern=rf"^{_POSITIVE}(k|M|G|T|Ki|Mi|Gi|Ti)?$")]
"""A positive number of bytes such as `16Gi` or `80G`."""

ParameterCount = Annotated[str, Field(min_length=1, max_length=16, pattern=rf"^({_POSITIVE}[KMBT]|[1-9][0-9]*)$")]
"""A number of parameters such as `77K`, `494M`, `1.24B` or `1240000000`."""


def parameter_count(text: str) -> int:
    """The number of parameters that `1.24B` means.

    Raises:
        ValueError: the text is no ParameterCount.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", text)
    if not match:
        raise ValueError(f"{text!r} is no parameter count; write it as 494M or 1.24B")
    return round(float(match[1]) * _PARAMETER_UNITS[match[2]])


def format_parameters(count: int) -> str:
    """The shortest spelling of a parameter count with three digits, such as `1.24B`."""
    for unit in ("T", "B", "M", "K"):
        if count >= _PARAMETER_UNITS[unit]:
            return f"{count / _PARAMETER_UNITS[unit]:.3g}{unit}"
    return str(count)


def quantity_bytes(text: str) -> int:
    """Bytes that a Kubernetes quantity such as `16Gi` or `80G` means.

    Raises:
        ValueError: the text is no quantity of bytes.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]i?)?", text.replace("k", "K"))
    if not match:
        raise ValueError(f"{text!r} is no quantity of bytes; write it as 16Gi or 80G")
    return round(float(match[1]) * _BYTE_UNITS[match[2] or ""])


def dotted(location: Sequence[int | str]) -> str:
    """A pydantic error location as users write it: `spec.rewards[1].format.pattern`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
