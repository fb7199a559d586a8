"""The fields of the pinned TRL's GRPOConfig, known without TRL.

trl_fields.json is generated from the installed sources of TRL and transformers by `make codegen`.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple


class TrlField(NamedTuple):
    """One field of GRPOConfig."""

    name: str
    type: str
    """Its annotation in TRL's source, such as `list[float] | None`."""
    default: Any
    """Its default, as JSON has it."""
    is_own: bool
    """Whether GRPOConfig declares it; it inherits the others, most from TrainingArguments."""


def _fields() -> dict[str, TrlField]:
    rows = json.loads(files(__package__).joinpath("trl_fields.json").read_text(encoding="utf-8"))
    return {
        row["name"]: TrlField(row["name"], row["type"], row["default"], row["isOwn"])
        for row in rows
    }


FIELDS: Mapping[str, TrlField] = _fields()
"""Every field of GRPOConfig by its name, in GRPOConfig's order."""
