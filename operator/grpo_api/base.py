"""What every type of the contract shares: strict camelCase models, CEL rules and the quantities that users write.

Exists so that the CRD, the plan and the report are written in one style. Imported by every module of grpo_api.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

_PARAMETER_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_BYTE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTE_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class Model(BaseModel):
    """A strict record: camelCase outside, snake_case inside, unknown fields refused, frozen once made."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """CEL rules of a model or field, as (rule, message) pairs, for `json_schema_extra`."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def map_list(*keys: str) -> dict[str, Any]:
    """Marks a list as a map keyed by the named fields, so that server-side apply merges it item by item."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


ATOMIC_LIST: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""The name of a Kubernetes object."""

Path = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^/[^\x00]*$")]
"""An absolute path inside the pods."""

Quantity = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(m|[kKMGT]i?)?$")]
"""A Kubernetes quantity such as `500m`, `4` or `16Gi`."""

ParameterCount = Annotated[str, Field(min_length=1, max_length=16, pattern=r"^[0-9]+(\.[0-9]+)?[KMBT]?$")]
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
