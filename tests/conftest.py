"""What all tests have in common: the order of their files, and the profile and the chance of
generated ones."""

import gc
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import generated

pytest_plugins = (
    "tests.built_tools",
    "tests.file_scheduling",
    "tests.message_rules",
    "tests.real_world",
)

LONGEST = (
    "test_chaos",
    "test_memory_truth",
    "test_memory_ranks",
    "test_reference_gang",
    "test_worker",
    "test_resume",
    "test_resume_exact",
)
"""Files that take a minute or more. Whichever process is free gets the next file, so the long ones
must come first."""

REAL_FOLDERS = tuple(Path(__file__).parent / name for name in ("integration", "e2e"))
"""Folders whose tests all stand on a real API server or real kubelets."""

# Tests look for sentences, which a line of 80 columns would break.
os.environ["COLUMNS"] = "240"
# Control planes, containerd and helm collect their garbage less often: an API server then takes a
# third less processor time and 0.5 GB more memory (measured on 382 tests of API objects).
os.environ.setdefault("GOGC", "400")
# A shell that starts a command in the background lets it ignore Ctrl-C, and all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.load_profile(generated.GATE)  # `--hypothesis-profile` replaces it


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of real folders as realtime; put the longest files first and leave the others
    in their order."""
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in REAL_FOLDERS):
            item.add_marker(pytest.mark.realtime)
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)
        )
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while modules are imported, and keep them and the tests, which live to
    the end, out of every later collection: it was a sixth of the processor time of pure tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """What tests draw from that hypothesis can't drive; without a seed, the same numbers every
    time."""
    return random.Random(str(request.config.getoption("--hypothesis-seed")))
