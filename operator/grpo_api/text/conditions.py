"""Conditions on a model's fields, of which rules are made: each is CEL and Python at once.

Fields are named by their paths as users write them, such as `reference.sync`. Those on the way to
them are always there.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic.alias_generators import to_snake

from .base import Rule


class Condition(NamedTuple):
    """What may hold of a model."""

    cel: str
    """As the API server evaluates it."""
    holds: Callable[[Any], bool]
    """The same in Python."""


def any_of(message: str, *conditions: Condition) -> Rule:
    """The rule that one of the conditions holds, or several."""

    def has_any(model: Any) -> bool:
        return any(condition.holds(model) for condition in conditions)

    cel = " || ".join(condition.cel for condition in conditions)
    return Rule(cel, message, has_any)


def is_one_of(path: str, *values: str) -> Condition:
    """The field has one of these values."""
    read = attrgetter(to_snake(path))
    return Condition(f"self.{path} in {list(values)}", lambda model: read(model) in values)


def equals(path: str, value: str | float) -> Condition:
    """The field has this value."""
    read = attrgetter(to_snake(path))
    return Condition(f"self.{path} == {value!r}", lambda model: read(model) == value)


def differs(path: str, value: str | float) -> Condition:
    """The field has another value."""
    read = attrgetter(to_snake(path))
    return Condition(f"self.{path} != {value!r}", lambda model: read(model) != value)


def exceeds(path: str, number: float) -> Condition:
    """The field is above this number."""
    read = attrgetter(to_snake(path))
    return Condition(f"self.{path} > {number}", lambda model: read(model) > number)


def is_at_most(path: str, other: str) -> Condition:
    """The field is not above the other one; both are set."""
    read = attrgetter(to_snake(path), to_snake(other))

    def is_in_order(model: Any) -> bool:
        less, more = read(model)
        return bool(less <= more)

    return Condition(f"self.{path} <= self.{other}", is_in_order)


def is_set(path: str) -> Condition:
    """The optional field is set."""
    read = attrgetter(to_snake(path))
    return Condition(f"has(self.{path})", lambda model: read(model) is not None)


def unset(*paths: str) -> Condition:
    """None of these optional fields is set."""
    readers = [attrgetter(to_snake(path)) for path in paths]

    def has_none(model: Any) -> bool:
        return all(read(model) is None for read in readers)

    return Condition(" && ".join(f"!has(self.{path})" for path in paths), has_none)
