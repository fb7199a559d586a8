"""A job that runs out of memory on the real cluster gets another plan, goes on from its checkpoint
and succeeds.

A fault from outside the product (tests/support/faults/memory) takes memory as long as the
micro-batch is too large for it: torch's exception of a GPU, or host memory until the kernel kills
the container at its cgroup's limit.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import pytest

from harness.access import CommandError
from harness.images.recipes import CONTAINER_SITE_PACKAGES
from harness.jobs import Jobs, Object, attempt, condition, is_true, progress
from tests.support.faults.memory import sitecustomize

pytestmark = pytest.mark.slow

EVERY = 4
SAVING = {
    "everySteps": EVERY,
    "keep": 2,
    "volume": {"claimName": "first-job", "subPath": "checkpoints"},
}
PER_STEP = 8
"""Micro-batches of a step on one node with the first plan: 256 completions on two nodes, sixteen at
a time."""


@pytest.fixture(autouse=True)
def room(jobs: Jobs) -> Iterator[None]:
    """Puts the fault where pods find it, and leaves no job behind: the next test needs the
    machine."""
    folder = jobs.checkpoints / "fault"
    folder.mkdir(parents=True, exist_ok=True)
    jobs.checkpoints.chmod(0o777)  # the kubelet would make it so; pods are not root
    shutil.copy(sitecustomize.__file__, folder)
    folder.chmod(0o755)
    (folder / "sitecustomize.py").chmod(0o644)
    yield
    jobs.kubectl("delete", "grpojobs", "--all")
    jobs.kubectl(
        "wait", "--for=delete", "pods", "--timeout", "120s", "--selector", "grpo.dev/job-name"
    )


def short_of_memory(jobs: Jobs, name: str, fault: str) -> None:
    """A job with that fault."""
    env = {
        "PYTHONPATH": f"/checkpoints/fault:{CONTAINER_SITE_PACKAGES}",
        sitecustomize.FAULT_ENV: fault,
    }
    variables = [{"name": key, "value": value} for key, value in env.items()]
    jobs.create(name, {"maxSteps": 12}, checkpoint=SAVING, env=variables, restarts={"limit": 9})


def run_to_the_end(jobs: Jobs, name: str) -> tuple[Object, dict[int, dict[int, Object]]]:
    """The job once it has succeeded, and what its attempts logged: each is read while it is there.

    Old attempts go, and of one that has failed the survivors' pods, with what rank 0 has told.
    """
    logged: dict[int, dict[int, Object]] = {}

    def read(job: Object) -> bool:
        for number in range(max(1, attempt(job) - 1), attempt(job) + 1):
            with suppress(CommandError):
                logged.setdefault(number, {}).update(lines(jobs, name, number))
        return is_true(job, "Succeeded") or is_true(job, "Failed")

    # several attempts, each with its processes' start
    job = jobs.wait(name, "ended", read, timeout=600)
    assert is_true(job, "Succeeded"), json.dumps(job["status"], indent=1)
    return job, logged


def lines(jobs: Jobs, name: str, number: int) -> dict[int, Object]:
    """What rank 0 of an attempt has logged, by step; kubectl puts `[pod/…] ` before each line."""
    log = jobs.kubectl("logs", f"job/{name}-{number}", "--all-pods")
    texts = (line.partition("] ")[2] for line in log.splitlines())
    found = [json.loads(text) for text in texts if '"totalSteps"' in text]
    return {line["step"]: line for line in found}


@pytest.mark.parametrize("kind", ["device", "host"])
def test_a_job_declared_too_small_is_planned_anew_and_goes_on_with_the_same_losses(
    jobs: Jobs, kind: str
) -> None:
    name = f"short-{kind}"
    short_of_memory(jobs, name, f"backward:{PER_STEP * (EVERY + 1) + 1}:8:{kind}")
    job, logged = run_to_the_end(jobs, name)
    assert attempt(job) == len(logged) > 1
    assert progress(job)["step"] == 12
    plan, learned = job["status"]["plan"], job["status"]["learned"]
    assert plan["microBatch"] <= 8
    assert plan["microBatch"] * plan["gradientAccumulation"] == 16 * PER_STEP
    assert "after OutOfMemory" in plan["changes"][0]
    assert len(learned["shortfalls"]) == attempt(job) - 1
    for number, (before, after) in enumerate(pairwise(logged.values()), 1):
        step = min(after)
        assert (
            step == number * EVERY + 1
        )  # from the newest checkpoint, and the attempt before had taken this step, too
        assert after[step]["reward"] == before[step]["reward"]
        for key in ("loss", "grad_norm"):
            assert after[step][key] == pytest.approx(before[step][key], rel=1e-5, abs=1e-5)


def test_one_that_can_never_fit_fails_with_what_was_tried(jobs: Jobs) -> None:
    short_of_memory(jobs, "hopeless", "backward:1:0:host")
    # four attempts, with a pause after each that ended soon
    job = jobs.wait(
        "hopeless",
        "failed",
        lambda job: condition(job, "Failed").get("status") == "True",
        timeout=600,
    )
    assert attempt(job) == 4
    failed = condition(job, "Failed")
    assert failed["reason"] == "OutOfMemory"
    assert "micro-batch 1, with checkpointing" in failed["message"]
    assert "of host memory per pod would probably do" in failed["message"]
    assert len(job["status"]["learned"]["shortfalls"]) == attempt(job)
