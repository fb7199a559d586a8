"""How many cases the generated tests make: few and the same ones in `make test`, many and new ones in `make soak`.

A test command that stumbles over a new failure on somebody else's change is no use to them, and one that never looks
for a new failure is none to anybody; so each is a profile of its own.
"""

from hypothesis import HealthCheck, settings

SOAK = "soak"
SOAK_TIMES = 10
"""A round of `make soak` makes so many times the cases of `make test`."""

# A loaded machine of two cores is slow at moments, which is no failure of what is tested.
_PATIENT = settings(
    deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("test", _PATIENT, derandomize=True)
settings.register_profile(SOAK, _PATIENT, derandomize=False, database=None, max_examples=100 * SOAK_TIMES)


def cases(number: int) -> int:
    """How many cases to make where `make test` makes `number`. Call it no earlier than test modules are imported."""
    return number * SOAK_TIMES if settings.get_current_profile_name() == SOAK else number
