"""What the trainer's tests have in common: the processes that they start are not traced by coverage unless they ask."""

import os
from collections.abc import Iterator

import pytest

from harness.ranks.launch import SPARE_TRACER, TRACER


@pytest.fixture(autouse=True, scope="module")
def untraced_processes() -> Iterator[None]:
    """Puts coverage's settings aside for `launch(..., traced=True)`.

    A tracer takes a fifth of a rank's time, and processes of reward functions end by SIGKILL, which tears its file.
    """
    with pytest.MonkeyPatch.context() as environment:
        if settings := os.environ.get(TRACER):
            environment.delenv(TRACER)
            environment.setenv(SPARE_TRACER, settings)
        yield
