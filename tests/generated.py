"""How many cases the generated tests make in each run.

`make check` and `make test` make few and the same ones: a new failure on somebody else's change is
no use to them. `make test-all` makes eight times as many, and more of the costly ones; `make soak`
ten times as many as that, new ones each day.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

T = TypeVar("T")

GATE, ALL, SOAK = "gate", "all", "soak"
SOAK_TIMES = 10
"""A round of `make soak` makes so many times the cases of `make test-all`."""
GATE_PART, GATE_LEAST = 8, 8
"""The gate makes an eighth of the cases, and at least eight."""

# A loaded machine of two cores is slow at moments, which is no failure of what is tested.
_PATIENT = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(GATE, _PATIENT, derandomize=True, max_examples=100 // GATE_PART)
settings.register_profile(ALL, _PATIENT, derandomize=True)
settings.register_profile(
    SOAK, _PATIENT, derandomize=False, database=None, max_examples=100 * SOAK_TIMES
)


def cases(number: int, *, gate: int = 0) -> int:
    """Return how many cases to make: `number` in `make test-all`, and in `make test` an eighth, or
    `gate` if that is given.

    Call it no earlier than test modules are imported.
    """
    profile = settings.get_current_profile_name()
    if profile == SOAK:
        return number * SOAK_TIMES
    if profile == GATE:
        return gate or max(number // GATE_PART, min(number, GATE_LEAST))
    return number


def gated(values: Sequence[T], number: int = 1) -> list[Any]:
    """Return a test's parameters of which only the first so many are in `make test`; the others are
    marked slow."""
    return [
        *values[:number],
        *(pytest.param(value, marks=pytest.mark.slow) for value in values[number:]),
    ]
