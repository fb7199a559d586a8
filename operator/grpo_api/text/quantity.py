"""The quantities of the contract: Kubernetes amounts such as `500m`, `16Gi` and `1e3`, and
parameter counts.

Amounts are read here and nowhere else, and exactly: two spellings of one amount must not differ in
the last digit.
"""

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from .units import GIB, MIB

MAX_COUNT = 2**53 - 1
"""Largest number of steps or bytes that is believed: every reader of JSON keeps it exactly (RFC
8259, section 6)."""

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]

_SCALES = {
    suffix: Fraction(1000) ** power
    for power, suffix in enumerate(("n", "u", "m", "", *"kMGTPE"), -3)
}
_SCALES |= {f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_EXPONENT = r"[eE][+-]?[0-9]{1,2}"
_SUFFIX = rf"([numkMGTPE]|[KMGTPE]i|{_EXPONENT})?"
_QUANTITY = re.compile(rf"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+){_SUFFIX}")
_LONGEST = 64
_POSITIVE = r"([0-9]*[1-9][0-9]*(\.[0-9]*)?|[0-9]*\.[0-9]*[1-9][0-9]*)"
_PARAMETER_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _text(value: Any) -> Any:
    """The quantity as text if it was written as a whole number, such as `cpu: 2`."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    return str(int(value)) if whole else value


PATTERN_HINT = "x-pattern-hint"
"""Key of a JSON schema: what to write where the pattern is not met. The CRD has it as the message
of a rule in the pattern's place, since the message of a pattern is the pattern."""


def _int_or_string(pattern: str, least: int, **more: str) -> Any:
    """The limits of a field in the shape that controller-gen gives a resource.Quantity."""
    schema: dict[str, Any] = {
        "x-kubernetes-int-or-string": True,
        "pattern": pattern,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "minimum": least,
        **more,
    }
    return Field(min_length=1, max_length=32, pattern=pattern, json_schema_extra=schema)


Quantity = Annotated[
    str, BeforeValidator(_text), _int_or_string(rf"^\+?([0-9]+\.?[0-9]*|\.[0-9]+){_SUFFIX}$", 0)
]
"""A Kubernetes quantity from 0 on, such as `500m`, `4` or `16Gi`."""

_BYTES = rf"^\+?{_POSITIVE}([kMGTPE]|[KMGTPE]i|[eE]\+?[0-9]{{1,2}})?$"
ByteQuantity = Annotated[
    str,
    BeforeValidator(_text),
    _int_or_string(_BYTES, 1, **{PATTERN_HINT: "write it as 100G, 100Gi or a number of bytes"}),
]
"""A positive number of bytes such as `16Gi` or `80G`; thousandths of a byte are a slip of the
pen."""

ParameterCount = Annotated[
    str,
    Field(
        min_length=1,
        max_length=16,
        pattern=r"^(([1-9][0-9]*(\.[0-9]+)?|0\.[0-9]*[1-9][0-9]*)[KMBT]|[1-9][0-9]*)$",
        json_schema_extra={PATTERN_HINT: "write it as 7B, 1.24B, 494M or 1240000000"},
    ),
]
"""A number of parameters such as `77K`, `494M`, `1.24B` or `1240000000`."""


@lru_cache(maxsize=4096)
def parse_quantity(value: str | int) -> Fraction:
    """The exact number that a resource.Quantity means: cores for cpu, bytes for memory.

    The grammar is that of k8s.io/apimachinery/pkg/api/resource, with at most 64 characters and
    exponents below 100.

    Raises:
        ValueError: the value is not a quantity.
    """
    text = str(value)
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if not match:
        raise ValueError(f"{text!r:.80} is not a quantity; write it as 500m, 4 or 16Gi")
    sign, digits, suffix = match[1], match[2], match[3] or ""
    scale = _SCALES[suffix] if suffix in _SCALES else Fraction(10) ** int(suffix[1:])
    # Kubernetes allows `.5` and `5.`, which Fraction does not read.
    number = f"0{digits}" if digits[0] == "." else digits.rstrip(".")
    magnitude = Fraction(number) * scale
    return -magnitude if sign == "-" else magnitude


def quantity_bytes(value: str | int) -> int:
    """Bytes that a quantity such as `16Gi` or `80G` means; a part of a byte counts as one, as in
    Kubernetes.

    Raises:
        ValueError: the value is not a quantity.
    """
    return math.ceil(parse_quantity(value))


def parameter_count(text: str) -> int:
    """The number of parameters that `1.24B` means.

    Raises:
        ValueError: the text is not a ParameterCount.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", text)
    if not match:
        raise ValueError(f"{text!r} is not a parameter count; write it as 494M or 1.24B")
    return round(float(match[1]) * _PARAMETER_UNITS[match[2]])


def format_bytes(count: int) -> str:
    """A number of bytes for people, with three digits, such as `1.24 GiB`."""
    for unit, size in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= size:
            digits = ".3g" if count < 999.5 * size else ".0f"  # .3g of 999.9 is 1e+03
            return f"{count / size:{digits}} {unit}"
    return f"{count} B"


def format_parameters(count: int) -> str:
    """The shortest spelling of a parameter count with three digits, such as `1.24B`."""
    for unit in ("T", "B", "M", "K"):
        size = _PARAMETER_UNITS[unit]
        # What rounds to 1000 of a unit is 1 of the next.
        if count >= 0.9995 * size:
            digits = ".3g" if count < 999.5 * size else ".0f"
            return f"{count / size:{digits}}{unit}"
    return str(count)
