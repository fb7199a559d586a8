"""What docs/tutorials/on-a-laptop.md promises of `make cluster`: its end is a cluster on which a
first job runs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = "examples/quickstart.yaml"
JOBS = ("grpojob/quickstart", "grpojob/quickstart-evaluation")


@pytest.fixture
def exports() -> Iterator[str]:
    """What `make cluster` prints for a shell, of a cluster beside those of other tests."""
    harness = [sys.executable, "-m", "harness", "--name", f"laptop-{os.getpid()}"]
    try:
        yield subprocess.run(
            [*harness, "up", "--operator"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    finally:
        subprocess.run([*harness, "down"], cwd=ROOT, check=True)


@pytest.mark.slow
def test_make_cluster_ends_with_an_operator_that_runs_the_quickstart(exports: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "$(CLUSTER) up --operator" in makefile
    assert f"kubectl apply -f {QUICKSTART}" in exports
    shell = f"""set -e
{exports}
kubectl apply -f {QUICKSTART}
kubectl wait --for=condition=Finished {" ".join(JOBS)} --timeout=15m
kubectl wait --for=condition=Succeeded {" ".join(JOBS)} --timeout=1s
"""
    done = subprocess.run(
        ["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
