"""What a job says about GRPOConfig reaches the live class."""

import dataclasses
from typing import Any

from trl import GRPOConfig

from grpo_api.spec.trl_fields import FIELDS


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field as JSON has it."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def test_the_generated_list_is_the_live_class() -> None:
    live = dataclasses.fields(GRPOConfig)
    assert list(FIELDS) == [field.name for field in live]
    assert {name: field.default for name, field in FIELDS.items()} == {
        field.name: default_of(field) for field in live
    }
    declared = GRPOConfig.__annotations__
    assert {name for name, field in FIELDS.items() if field.is_own} == set(declared)
