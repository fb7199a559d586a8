"""What generated tests have in common: their profile, and one source of chance, seeded by `--hypothesis-seed`."""

import random

import pytest
from hypothesis import settings

from tests import generated  # noqa: F401  registers the profiles

settings.load_profile("test")  # `--hypothesis-profile` replaces it


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """What tests draw from that hypothesis can't drive; without a seed, the same numbers every time."""
    return random.Random(str(request.config.getoption("--hypothesis-seed")))
