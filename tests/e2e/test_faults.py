"""What is broken while a job trains, and what must still come out of it: Succeeded, on the real
cluster.

Each test breaks something by hand in a run of its own; none of them may lose more than the steps
since the last checkpoint, and none may show in the operator's log as a traceback.
"""

import json
import time
from collections.abc import Iterator

import pytest

from harness.fixtures import AnyCluster
from harness.jobs import TIMEOUT, Jobs, Object, attempt, condition, progress
from harness.programs.processes import until
from harness.stack import SYSTEM_NAMESPACE

EVERY = 4
STEPS = {"maxSteps": 20}
LONG = {"maxSteps": 50}
"""A step takes a third of a second on two idle cores: such a run is still on after what is done to
it, as when the API server has been away for 20 s, or a new operator has to come up."""
SAVING = {
    "everySteps": EVERY,
    "keep": 2,
    "volume": {"claimName": "first-job", "subPath": "checkpoints"},
}


@pytest.fixture(autouse=True)
def room(jobs: Jobs) -> Iterator[None]:
    """Leaves no job behind, whatever became of the test: the next one needs the machine."""
    yield
    jobs.kubectl("delete", "grpojobs", "--all")
    jobs.kubectl(
        "wait", "--for=delete", "pods", "--timeout", "120s", "--selector", "grpo.dev/job-name"
    )


@pytest.fixture
def quiet_operator(jobs: Jobs) -> Iterator[None]:
    """Fails the test when the operator logged a traceback meanwhile, in any of its pods that is
    still there."""
    yield
    assert "Traceback" not in operator_log(jobs)


def operator_log(jobs: Jobs) -> str:
    """What the operator has written since its pod started."""
    return jobs.access.kubectl(
        *(
            "logs",
            "--namespace",
            SYSTEM_NAMESPACE,
            "--selector",
            "app.kubernetes.io/name=grpo-operator",
        ),
        *("--tail", "-1"),
    )


def resumed_from(jobs: Jobs, job: Object) -> list[int]:
    """Steps at which the pods of the current attempt began, as rank 0's log tells."""
    log = jobs.kubectl("logs", f"job/{job['metadata']['name']}-{attempt(job)}", "--all-pods")
    lines = [line[line.index("{") :] for line in log.splitlines() if '"resumedFromStep"' in line]
    return [int(json.loads(line)["resumedFromStep"]) for line in lines]


def wait_saved(jobs: Jobs, job: Object, step: int) -> None:
    """Wait until the job's current attempt has a checkpoint of that step or a later one.

    The volume shows it at once. The status lags behind by seconds, more on a busy machine, and a
    run may have ended by then.
    """
    folder = jobs.checkpoints / f"{job['metadata']['name']}-{job['metadata']['uid']}"

    def has_saved() -> bool:
        manifests = [json.loads(file.read_text()) for file in folder.rglob("manifest.json")]
        return any(
            manifest["attempt"] == attempt(job) and manifest["step"] >= step
            for manifest in manifests
        )

    until(f"a checkpoint of step {step} by attempt {attempt(job)}", has_saved, TIMEOUT)


def check_fencing(jobs: Jobs, job: Object) -> None:
    """Every checkpoint folder of the job was written by one attempt only: the one that its name
    carries."""
    folder = jobs.checkpoints / f"{job['metadata']['name']}-{job['metadata']['uid']}"
    manifests = sorted(folder.rglob("manifest.json"))
    assert manifests
    for manifest in manifests:
        written = json.loads(manifest.read_text())
        assert f"attempt-{written['attempt']}" in manifest.as_posix()


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_operator")
def test_the_operator_and_the_service_may_vanish_without_the_run_noticing(jobs: Jobs) -> None:
    jobs.create("calm", LONG, checkpoint=SAVING)
    jobs.wait_step("calm", 3)
    jobs.kubectl("delete", "service", "--all")
    jobs.access.kubectl("delete", "pod", "--namespace", SYSTEM_NAMESPACE, "--all", "--wait=false")
    job = jobs.wait_succeeded("calm")
    assert attempt(job) == 1
    assert job["status"]["restarts"] == 0
    assert progress(job)["step"] == LONG["maxSteps"]
    assert jobs.list("jobs", "calm")[0]["metadata"]["name"] == "calm-1"
    assert jobs.kubectl("get", "services", "--output", "name").strip()


@pytest.mark.usefixtures("quiet_operator")
def test_a_lost_pod_and_a_deleted_job_resume_from_the_last_checkpoint(jobs: Jobs) -> None:
    jobs.create("lossy", LONG, checkpoint=SAVING)
    first = jobs.wait("lossy", "in its first attempt", lambda job: attempt(job) == 1)
    wait_saved(jobs, first, EVERY)
    lost = next(
        pod
        for pod in jobs.list("pods", "lossy")
        if pod["metadata"]["labels"]["grpo.dev/attempt"] == "1"
    )
    jobs.kubectl("delete", "pod", lost["metadata"]["name"], "--wait=false")
    second = jobs.wait("lossy", "in its second attempt", lambda job: attempt(job) == 2)
    wait_saved(jobs, second, 2 * EVERY)
    assert resumed_from(jobs, second)[0] >= EVERY
    jobs.kubectl("delete", "job", "lossy-2", "--wait=false")
    job = jobs.wait_succeeded("lossy")
    assert attempt(job) == 3
    assert resumed_from(jobs, job)[0] >= 2 * EVERY
    assert progress(job)["step"] == LONG["maxSteps"]
    check_fencing(jobs, job)


@pytest.mark.slow
def test_a_failed_attempt_keeps_its_logs(jobs: Jobs) -> None:
    rewards = [{"format": {"pattern": ".*"}}, {"python": {"function": "no_such_module:reward"}}]
    jobs.create("broken", STEPS, rewards=rewards, restarts={"limit": 0})
    job = jobs.wait(
        "broken", "failed", lambda job: condition(job, "Failed").get("status") == "True"
    )
    assert "no_such_module" in condition(job, "Failed")["message"]
    assert job["status"]["outcome"]["result"] == "BadInput"
    assert jobs.wait_ended("broken")
    assert "no_such_module" in jobs.kubectl("logs", "job/broken-1")


@pytest.mark.slow
def test_a_pod_that_a_real_kubelet_evicts_for_disk_is_tried_twice(jobs: Jobs) -> None:
    fill = "dd if=/dev/zero of=/full/file bs=1M count=4; sleep 600"
    volume = {"name": "full", "emptyDir": {"sizeLimit": "1Mi"}}
    mount = {"name": "full", "mountPath": "/full"}
    init = {"name": "fill", "command": ["sh", "-c", fill], "volumeMounts": [mount]}
    pods = {"spec": {"volumes": [volume], "initContainers": [init]}}
    jobs.create("full", STEPS, podTemplate=pods, restarts={"limit": 9})
    job = jobs.wait("full", "failed", lambda job: condition(job, "Failed").get("status") == "True")
    failed = condition(job, "Failed")
    assert failed["reason"] == "OutOfDisk", failed
    assert "out of disk twice in a row" in failed["message"]
    assert 'Usage of EmptyDir volume "full" exceeds the limit "1Mi"' in failed["message"]
    assert (attempt(job), job["status"]["restarts"]) == (2, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_operator")
def test_the_api_server_may_be_away_for_20_seconds(jobs: Jobs, node_cluster: AnyCluster) -> None:
    jobs.create("blackout", LONG, checkpoint=SAVING)
    jobs.wait_step("blackout", 3)
    node_cluster.stop_apiserver()
    time.sleep(20)
    node_cluster.start_apiserver()
    job = jobs.wait_succeeded("blackout")
    assert attempt(job) == 1
    assert progress(job)["step"] == LONG["maxSteps"]
