"""What all tests have in common: the order of their files, and the profile and the chance of generated ones."""

import random

import pytest
from hypothesis import settings

from tests import generated  # noqa: F401  registers the profiles

LONGEST = (
    "test_chaos",
    "test_memory_truth",
    "test_memory_ranks",
    "test_reference_gang",
    "test_worker",
    "test_resume",
    "test_resume_exact",
)
"""Files that take a minute or more. Whichever process is free gets the next file, so the long ones must come first."""

settings.load_profile("test")  # `--hypothesis-profile` replaces it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others in their order."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """What tests draw from that hypothesis can't drive; without a seed, the same numbers every time."""
    return random.Random(str(request.config.getoption("--hypothesis-seed")))
