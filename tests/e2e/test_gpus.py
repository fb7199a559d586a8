"""Gangs that compete for GPUs on real kubelets: two nodes with four H100 each, which exist only in
the API.

Since there is no such GPU, an image that only keeps what it was given stands in for the trainer;
the operator, the planner, the scheduler and everything that is asserted are real.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import stack
from harness.fixtures import AnyCluster
from harness.images import recipes as images
from harness.jobs import Jobs, Object, attempt, condition, is_true
from harness.programs.processes import until

NAMESPACE = "gpus"
PRODUCT = "NVIDIA-H100-80GB-HBM3"
ATTEMPT_SECONDS = 2.0
"""By how much an attempt's time may be off, beside 1 %: times of the API server have whole
seconds."""
GPUS_PER_POD = 4
ON_ONE_NODE: dict[str, Any] = {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}
SMALL: Object = {
    "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct", "parameters": "494M"},
    "dataset": {"name": "openai/gsm8k", "config": "main", "promptColumn": "question"},
    "rewards": [{"accuracy": {}}],
    "training": {"promptsPerStep": 8, "numGenerations": 6},
    "export": {"to": "None"},
}


@pytest.fixture(scope="module")
def gangs(installed: AnyCluster, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Jobs that want GPUs, in a namespace of their own."""
    image = images.gpu_stand_in_image()
    installed.load(image.archive)
    stack.create_namespace(installed, NAMESPACE)
    template = {
        "apiVersion": "grpo.dev/v1alpha1",
        "kind": "GRPOJob",
        # the stand-in has nothing that could check a job
        "spec": SMALL | {"image": image.name, "preflight": "Off"},
    }
    return Jobs(installed, NAMESPACE, template, tmp_path_factory.mktemp("none"))


@pytest.fixture
def impatient_operator(gangs: Jobs) -> Iterator[None]:
    """An operator that doesn't wait long for the scheduler."""
    stack.configure_operator(gangs.access, "extraArgs={--scheduling-timeout-seconds=15}")
    yield
    stack.configure_operator(gangs.access, "extraArgs=null")


@pytest.fixture(autouse=True)
def room(gangs: Jobs) -> Iterator[None]:
    """Leaves no job behind: the next test wants all GPUs."""
    yield
    gangs.kubectl("delete", "grpojobs,jobs,pods", "--all", "--wait=true")
    gangs.kubectl("wait", "--for=delete", "pods", "--all", "--timeout", "120s")


def want(gangs: Jobs, name: str, gpus: int, nodes: int = 1, **placement: Any) -> None:
    """A job that needs exactly so many GPUs."""
    gangs.create(name, placement={"gpus": {"min": gpus, "max": gpus}, "nodes": nodes, **placement})


def running(job: Object) -> bool:
    """Whether the whole gang runs."""
    return is_true(job, "Running")


def finish(gangs: Jobs, name: str) -> Object:
    """Lets the newest attempt's pods end well, and waits for the job; pods of an attempt before may
    still be going."""
    newest = gangs.get(name)["status"]["pods"]
    for pod in newest:
        gangs.kubectl("exec", pod["name"], "--", "touch", "/tmp/finish")
    return gangs.wait_succeeded(name)


def foreign_pod(gangs: Jobs, gpus: int) -> None:
    """A pod of somebody else that takes GPUs of the first node."""
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}}
    safe = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "notebook",
        "image": gangs.template["spec"]["image"],
        "resources": resources,
    }
    spec = {
        **ON_ONE_NODE,
        "containers": [container | {"securityContext": safe}],
        "terminationGracePeriodSeconds": 1,
    }
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "notebook"}, "spec": spec}
    gangs.kubectl("create", "--filename", "-", stdin=json.dumps(body))
    gangs.kubectl("wait", "--for=condition=PodScheduled", "pod/notebook", "--timeout", "30s")


def test_a_job_of_eight_waits_while_another_holds_two(gangs: Jobs) -> None:
    want(gangs, "two", 2)
    gangs.wait("two", "running", running)
    want(gangs, "eight", 8, nodes=2)
    job = gangs.wait(
        "eight",
        "waiting",
        lambda job: condition(job, "Scheduled").get("reason") == "WaitingForGPUs",
    )
    message = (
        f"needs 8 × {PRODUCT} on 2 nodes; 6 free, 2 held by {NAMESPACE}/two; 1st of 1 in the queue"
    )
    assert condition(job, "Scheduled")["message"] == message
    assert gangs.list("jobs", "eight") == []
    finish(gangs, "two")
    job = gangs.wait("eight", "running", running)
    assert {pod["node"] for pod in job["status"]["pods"]} == {"node-0", "node-1"}
    assert finish(gangs, "eight")["status"]["attempt"] == 1


@pytest.mark.slow
def test_gpu_seconds_are_those_from_bound_to_end_though_a_pod_is_deleted(
    gangs: Jobs, tmp_path: Path
) -> None:
    """The witness is a watch of the pods: of the first attempt nothing is left when the second one
    ends."""
    with gangs.access.watching("pods", gangs.namespace, tmp_path / "pods") as seen:
        want(gangs, "held", 8, nodes=2)
        first = gangs.wait("held", "running", running)
        gangs.kubectl("delete", "pod", first["status"]["pods"][0]["name"], "--wait=false")
        gangs.wait(
            "held", "on in its second attempt", lambda job: attempt(job) == 2 and running(job)
        )
        finish(gangs, "held")
        usage = gangs.wait("held", "counted", lambda job: not holding(job))["status"]["usage"]
        pods = until("the watch to see four pods end", lambda: all_held_times(seen(), 4))
    assert [one["attempt"] for one in usage["attempts"]] == [1, 2]
    assert len(pods) == 4
    for one in usage["attempts"]:
        told = one.get("goneSeconds", 0.0) + sum(pod["seconds"] for pod in one["pods"])
        truth = sum(
            end - bound
            for name, (bound, end) in pods.items()
            if name.startswith(f"held-{one['attempt']}-")
        )
        assert told == pytest.approx(truth, rel=0.01, abs=one["nodes"] * ATTEMPT_SECONDS)
    whole = GPUS_PER_POD * sum(end - bound for bound, end in pods.values())
    assert usage["heldGpuSeconds"] == pytest.approx(
        whole, rel=0.01, abs=2 * 2 * GPUS_PER_POD * ATTEMPT_SECONDS
    )
    assert sum(usage["gpuSeconds"].values()) == pytest.approx(usage["heldGpuSeconds"])


def holding(job: Object) -> bool:
    """Whether a pod of the job holds GPUs as far as the status says."""
    return any(
        "seconds" not in pod
        for one in job["status"]["usage"]["attempts"]
        for pod in one.get("pods", [])
    )


def ended(pod: Object) -> bool:
    """Whether the pod's container has ended."""
    return any("terminated" in one["state"] for one in pod["status"].get("containerStatuses", []))


def all_held_times(seen: list[Object], count: int) -> dict[str, tuple[float, float]]:
    """Those of all pods that have ended, by name, once these are so many; the watch may lag behind
    the status."""
    found = {pod["metadata"]["name"]: held_times(pod) for pod in seen if ended(pod)}
    return found if len(found) >= count else {}


def held_times(pod: Object) -> tuple[float, float]:
    """Unix times at which a pod was bound and its container ended, in whole seconds as the API
    server has them."""
    (bound,) = (one for one in pod["status"]["conditions"] if one["type"] == "PodScheduled")
    (container,) = pod["status"]["containerStatuses"]
    times = (bound["lastTransitionTime"], container["state"]["terminated"]["finishedAt"])
    begin, end = (datetime.fromisoformat(text).timestamp() for text in times)
    return begin, end


STRANGER: Object = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "a-1"},
    "spec": {
        "suspend": True,
        "template": {
            "spec": {"restartPolicy": "Never", "containers": [{"name": "none", "image": "none"}]}
        },
    },
}


@pytest.mark.slow
@pytest.mark.usefixtures("impatient_operator")
def test_two_gangs_of_three_never_deadlock_whoever_dies_or_grabs_between(gangs: Jobs) -> None:
    """A stranger's Job of its name keeps out the first gang's: what an operator sees that died
    before the start."""
    gangs.kubectl("create", "--filename", "-", stdin=json.dumps(STRANGER))
    for name in "ab":
        want(gangs, name, 3, **ON_ONE_NODE)
    gangs.wait(
        "a", "committed", lambda job: condition(job, "Scheduled").get("reason") == "NameTaken"
    )
    gangs.wait(
        "b", "waiting", lambda job: condition(job, "Scheduled").get("reason") == "WaitingForGPUs"
    )
    foreign_pod(gangs, 2)
    gangs.access.kubectl("delete", "pod", "--namespace", stack.SYSTEM_NAMESPACE, "--all", "--now")
    gangs.kubectl("delete", "job", "a-1")
    job = gangs.wait(
        "a", "released", lambda job: condition(job, "Admitted").get("reason") == "SchedulingTimeout"
    )
    assert attempt(job) == 1
    assert gangs.list("jobs", "b") == []
    gangs.kubectl("delete", "pod", "notebook")
    first, second = runner_and_waiter(gangs)
    assert finish(gangs, first)["status"]["restarts"] == 0
    gangs.wait(second, "running", running)
    assert finish(gangs, second)["status"]["restarts"] == 0


def runner_and_waiter(gangs: Jobs) -> tuple[str, str]:
    """The gang that runs, and the one that waits."""
    gangs.wait("a", "running, or b", lambda _: any(running(gangs.get(name)) for name in "ab"))
    return ("a", "b") if running(gangs.get("a")) else ("b", "a")


TOO_BIG: Object = SMALL | {
    "model": {"name": "Qwen/Qwen2.5-1.5B-Instruct", "parameters": "1.54B"},
    "adapter": {"use": "Never"},
    "placement": {"gpus": {"min": 1, "max": 8}},
    "training": {
        "numGenerations": 16,
        "promptsPerStep": 8,
        "maxCompletionLength": 4096,
        "gradientCheckpointing": "Disabled",
        "perDeviceTrainBatchSize": 16,
    },
}


@pytest.mark.slow
def test_what_cannot_fit_is_refused_with_numbers_and_each_fix_is_admitted(
    gangs: Jobs, tmp_path: Path
) -> None:
    gangs.create("big", **TOO_BIG)
    job = gangs.wait(
        "big", "refused", lambda job: condition(job, "Planned").get("status") == "False"
    )
    message = condition(job, "Planned")["message"]
    assert re.search(r"needs \d+\.\d GiB per GPU at \w+, 78\.9 GiB are usable", message), message
    assert gangs.list("jobs", "big") == []
    fixes = planned(gangs, job, tmp_path)["fixes"]
    assert len(fixes) == 3
    for number, fix in enumerate(fixes):
        name = f"fixed-{number}"
        gangs.create(name, **applied(TOO_BIG, fix))
        job = gangs.wait(name, "running", running)
        assert is_true(job, "Admitted"), fix["message"]
        gangs.kubectl("delete", "grpojob", name)


def planned(gangs: Jobs, job: Object, folder: Path) -> Object:
    """What `grpo plan` says of the job on this cluster; nothing fits."""
    (folder / "job.json").write_text(json.dumps(job))
    command = [
        sys.executable,
        "-m",
        "grpo_cli",
        "plan",
        "-f",
        str(folder / "job.json"),
        "-o",
        "json",
    ]
    context = gangs.access.kubectl("config", "current-context").strip()
    command += ["--context", context]
    done = subprocess.run(
        command, env=gangs.access.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    result: Object = json.loads(done.stdout)
    return result


def applied(spec: Object, fix: Object) -> Object:
    """The spec with the fix's fields set, each as YAML reads it, or removed where that is null."""
    changed: Object = json.loads(json.dumps(spec))
    for change in fix["changes"]:
        *parents, last = change["path"].removeprefix("spec.").split(".")
        place = changed
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = yaml.safe_load(change["value"])
        if place[last] is None:
            del place[last]
    return changed
