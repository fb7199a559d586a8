"""Jobs that name an engine which does not start, or computes wrong numbers: each ends trained.

On CPUs vLLM runs the first rung's model runner anyway, so Transformers samples in the second
attempt. A fault from outside the product (tests/support/faults/engine) plays the cause in real
training pods with real vLLM.
"""

import shutil
from collections.abc import Iterator

import pytest

from harness.fixtures import AnyCluster
from harness.images import recipes as images
from harness.images.recipes import CONTAINER_ENGINE_PACKAGES, CONTAINER_SITE_PACKAGES
from harness.jobs import Jobs, Object, attempt, condition, progress
from tests.support.faults.engine import sitecustomize

pytestmark = pytest.mark.slow

STEPS = 3
AT_ONCE = 2
"""Jobs that run beside each other: each of them loads vLLM."""
WRONG_NUMBERS = tuple(sitecustomize.NUMBERS)


@pytest.fixture(scope="module")
def ended_jobs(jobs: Jobs, node_cluster: AnyCluster) -> Iterator[dict[str, Object]]:
    """The jobs by fault, once they have ended; leaves none behind."""
    image = images.engine_trainer_image()
    node_cluster.load(image.archive)
    folder = jobs.checkpoints / "engine-fault"
    folder.mkdir(parents=True, exist_ok=True)
    jobs.checkpoints.chmod(0o777)  # the kubelet would make it so; pods are not root
    shutil.copy(sitecustomize.__file__, folder)
    folder.chmod(0o755)
    (folder / "sitecustomize.py").chmod(0o644)
    ended: dict[str, Object] = {}
    for first in range(0, len(sitecustomize.CAUSES), AT_ONCE):
        faults = sitecustomize.CAUSES[first : first + AT_ONCE]
        for fault in faults:
            create(jobs, fault, image.name)
        for fault in faults:
            ended[fault] = jobs.wait_succeeded(f"no-{fault}")
    yield ended
    jobs.kubectl("delete", "grpojobs", "--all")
    jobs.kubectl(
        "wait", "--for=delete", "pods", "--timeout", "120s", "--selector", "grpo.dev/job-name"
    )


def create(jobs: Jobs, fault: str, image: str) -> None:
    """A job of one pod with this fault; its folder is on the volume of the checkpoints."""
    folders = ("/checkpoints/engine-fault", CONTAINER_SITE_PACKAGES, CONTAINER_ENGINE_PACKAGES)
    env = {"PYTHONPATH": ":".join(folders), sitecustomize.FAULT_ENV: fault}
    jobs.create(
        *(f"no-{fault}", {"maxSteps": STEPS}),
        image=image,
        env=[{"name": key, "value": value} for key, value in env.items()],
        generation={"engine": "Colocated"},
        placement={"accelerator": "CPU", "nodes": 1},
        checkpoint={
            "everySteps": STEPS,
            "volume": {"claimName": "first-job", "subPath": "checkpoints"},
        },
        restarts={"limit": 0},
    )


@pytest.mark.parametrize("fault", sitecustomize.CAUSES)
def test_a_job_whose_named_engine_fails_is_trained_by_transformers(
    fault: str, ended_jobs: dict[str, Object]
) -> None:
    job = ended_jobs[fault]
    status = job["status"]
    assert (attempt(job), progress(job)["step"], status.get("restarts", 0)) == (2, STEPS, 0)
    assert "engine" not in status["plan"]
    (failure,) = status["learned"]["engineFailures"]
    expected = "EngineMismatch" if fault in WRONG_NUMBERS else "EngineFailed"
    assert (failure["reason"], failure["rung"]) == (expected, "Transformers")
    fallback = condition(job, "EngineFallback")
    assert (fallback["status"], fallback["reason"]) == ("True", "Transformers")
    assert failure["message"][:60] in fallback["message"]


def test_what_is_trained_does_not_depend_on_how_the_engine_failed(
    ended_jobs: dict[str, Object],
) -> None:
    rewards = {job["status"]["metrics"]["reward"] for job in ended_jobs.values()}
    assert len(rewards) == 1
