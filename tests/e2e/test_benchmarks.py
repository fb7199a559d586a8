"""Benchmarks that train or start a cluster run at their smallest size, each as the command that
people type."""

import subprocess
import sys

import pytest

from harness.programs.cache import REPOSITORY
from tests.benchmark_sizes import IN_THE_GATE, SMALLEST, WITH_LIMITS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [name for name in SMALLEST if name not in IN_THE_GATE])
def test_a_benchmark_prints_its_table(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks", name, *SMALLEST[name]]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode in ((0, 1) if name in WITH_LIMITS else (0,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "|" in done.stdout
