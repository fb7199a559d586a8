"""A pytest plugin that forbids builds inside tests: `make tools` makes programs and images before.

A compiler inside a fixture outlasts its test and takes the second core from the tests beside it.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from harness.programs.cache import NO_BUILDS
from harness.programs.processes import ClusterError

os.environ[NO_BUILDS] = "1"  # workers and the processes that tests start inherit it


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """Name the fixture beside the tool that it lacks, since the error knows the tool only."""
    try:
        return (yield)
    except ClusterError as error:
        error.add_note(f"in the fixture `{fixturedef.argname}`")
        raise
