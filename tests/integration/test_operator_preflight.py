"""The preflight of GPU jobs on the real API server: what it holds back, what it reports, and what
is left of it.

The API server, the Job controller, quotas and evictions are real; the pods only pretend to run, and
a test says what they report.
"""

import json
from typing import Any

import pytest

from grpo_operator.decide.preflight import BLOCKED_SECONDS
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.records.names import COMPONENT_PREFLIGHT, LABEL_COMPONENT, LABEL_JOB
from tests.generated import gated
from tests.integration.gpu_bench import GpuBench
from tests.integration.operator_bench import GRPOJOBS, JOBS, PODS

ON = {"pods": PodDefaults(image="example/trainer:1", preflight=True)}
QUOTAS = "/api/v1/namespaces/{}/resourcequotas"
ACCOUNTS = "/api/v1/namespaces/{}/serviceaccounts"
WRONG = {"path": "spec.dataset.columns", "message": "no column `promt`; there is `prompt`"}
SILENT = {"path": "spec.model.name", "message": "huggingface.co: no answer", "transient": True}
LENGTHS = {"rows": 2000, "mean": 120.5, "p95": 300, "dropped": 7}
Object = dict[str, Any]


def checking(bench: GpuBench, name: str = "run", *, hurry: bool = False) -> Object:
    """The running pod of a preflight."""
    query = f"{PODS}?labelSelector={LABEL_JOB}={name},{LABEL_COMPONENT}={COMPONENT_PREFLIGHT}"

    def running() -> Any:
        pods = [pod for pod in bench.get(query)["items"] if pod["status"]["phase"] == "Running"]
        live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return live[0] if live else None

    found: Object = bench.wait(f"the preflight of {name}", running, hurry=hurry)
    return found


def report(bench: GpuBench, pod: Object, **found: Any) -> None:
    bench.end(pod, message=json.dumps(found))


def wait_checked(bench: GpuBench, reason: str) -> str:
    """Waits for a reason of Checked; its message."""
    bench.wait(reason, lambda: bench.condition("Checked")[1] == reason, hurry=True)
    return bench.condition("Checked")[2]


def held_gpu_seconds(bench: GpuBench) -> float:
    usage = bench.status().get("usage", {})
    return sum(float(one["heldSeconds"]) for one in usage.get("attempts", []))


def test_a_job_is_admitted_after_its_preflight_which_leaves_only_its_report(
    gpu_bench: GpuBench,
) -> None:
    with gpu_bench.operating(**ON):
        gpu_bench.want("run", 4)
        pod = checking(gpu_bench)
        gpu_bench.wait("the queue", lambda: gpu_bench.condition("Admitted")[1] == "Checking")
        assert gpu_bench.condition("Admitted")[2].endswith("; 1st of 1 in the queue")
        assert gpu_bench.condition("Checked")[:2] == ("False", "Checking")
        assert gpu_bench.condition("Planned")[0] == "True"
        assert (gpu_bench.status()["phase"], gpu_bench.status().get("attempt", 0)) == ("Queued", 0)
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert "nvidia.com/gpu" not in limits
        report(gpu_bench, pod, prompts=LENGTHS)
        gpu_bench.wait_running()
        assert gpu_bench.condition("Checked")[:2] == ("True", "Passed")
        status = gpu_bench.status()
        assert (status["attempt"], status["preflight"]["tries"]) == (1, 1)
        assert status["preflight"]["report"]["prompts"] == LENGTHS
        gpu_bench.wait("its Job to go", lambda: gpu_bench.children() == ["run-1"])
        gpu_bench.patch(GRPOJOBS, "run", {"spec": {"suspend": True}})
        gpu_bench.wait_phase("Suspended")
        gpu_bench.patch(GRPOJOBS, "run", {"spec": {"suspend": False}})
        gpu_bench.wait_running(attempt=2)
    assert gpu_bench.status()["preflight"] == status["preflight"], "it is not repeated"


def test_a_mistake_costs_no_gpu_and_a_retry_of_the_right_spec_is_checked_and_runs(
    gpu_bench: GpuBench,
) -> None:
    with gpu_bench.operating(**ON):
        gpu_bench.want("run", 4)
        report(gpu_bench, checking(gpu_bench), problems=[WRONG, SILENT])
        status = gpu_bench.wait_phase("Failed")
        assert gpu_bench.condition("Checked")[:2] == ("False", "PreflightFailed")
        for problem in (WRONG, SILENT):
            assert f"{problem['path']}: {problem['message']}" in gpu_bench.condition("Checked")[2]
        assert gpu_bench.condition("Failed")[1] == status["outcome"]["result"] == "BadInput"
        assert (status.get("attempt", 0), status.get("ends", [])) == (0, [])
        assert held_gpu_seconds(gpu_bench) == 0
        gpu_bench.wait("its Job to go", lambda: gpu_bench.children() == [])
        right = {"dataset": {"columns": {"prompt": "question"}}, "retry": 1}
        gpu_bench.patch(GRPOJOBS, "run", {"spec": right})
        report(gpu_bench, checking(gpu_bench))
        gpu_bench.wait_running()
    assert gpu_bench.status()["attempt"] == 1


def test_a_hub_that_does_not_answer_is_asked_again_while_the_job_waits(
    gpu_bench: GpuBench,
) -> None:
    with gpu_bench.operating(**ON):
        gpu_bench.want("run", 4)
        report(gpu_bench, checking(gpu_bench), problems=[SILENT])
        assert "huggingface.co: no answer" in wait_checked(gpu_bench, "WaitingForHub")
        gpu_bench.wait("the queue", lambda: gpu_bench.condition("Admitted")[1] == "WaitingForHub")
        assert gpu_bench.status()["phase"] == "Queued"
        gpu_bench.wait("its Job to go", lambda: gpu_bench.children() == [])
        report(gpu_bench, checking(gpu_bench, hurry=True))
        gpu_bench.wait_running()
    assert (gpu_bench.status()["attempt"], gpu_bench.status()["preflight"]["tries"]) == (1, 2)


def test_a_quota_keeps_a_job_for_five_minutes_which_then_goes_on_unchecked(
    gpu_bench: GpuBench,
) -> None:
    gpu_bench.post(QUOTAS, {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    gpu_bench.wait("the quota", lambda: "used" in gpu_bench.get(QUOTAS, "none").get("status", {}))
    with gpu_bench.operating(**ON):
        gpu_bench.want("run", 4)
        assert "exceeded quota: none" in wait_checked(gpu_bench, "PreflightBlocked")
        gpu_bench.clock.advance(BLOCKED_SECONDS)
        assert "exceeded quota: none" in wait_checked(gpu_bench, "NotChecked")
        gpu_bench.wait("its Job to go", lambda: gpu_bench.children() == [])
        assert gpu_bench.status().get("attempt", 0) == 0
        gpu_bench.delete(QUOTAS, "none")
        gpu_bench.wait_running()


def test_what_would_keep_the_gang_too_keeps_the_job_with_its_cause(gpu_bench: GpuBench) -> None:
    with gpu_bench.operating(**ON):
        gpu_bench.want("run", 4, podTemplate={"spec": {"serviceAccountName": "nobody"}})
        message = wait_checked(gpu_bench, "PreflightBlocked")
        assert "nobody" in message
        assert "the job's own pods would wait for the same" in message
        gpu_bench.post(ACCOUNTS, {"metadata": {"name": "nobody"}})
        report(gpu_bench, checking(gpu_bench))
        gpu_bench.wait_running()
    assert gpu_bench.condition("Checked")[1] == "Passed"


def test_a_deleted_job_gives_its_preflight_s_core_back_although_a_finalizer_keeps_it(
    gpu_bench: GpuBench,
) -> None:
    with gpu_bench.operating(**ON):
        gpu_bench.want("run", 4)
        checking(gpu_bench)
        gpu_bench.patch(GRPOJOBS, "run", {"metadata": {"finalizers": ["example.com/archive"]}})
        gpu_bench.delete(GRPOJOBS, "run")
        gpu_bench.wait("its Job to go", lambda: gpu_bench.children() == [])
        assert gpu_bench.job("run")["metadata"]["deletionTimestamp"]
        gpu_bench.patch(GRPOJOBS, "run", {"metadata": {"finalizers": None}})
        gpu_bench.wait("it to be gone", lambda: not gpu_bench.exists(GRPOJOBS, "run"))


def test_an_operator_s_end_loses_no_report(gpu_bench: GpuBench) -> None:
    with gpu_bench.operating(**ON):
        gpu_bench.want("run", 4)
        checking(gpu_bench)
        uid = gpu_bench.get(JOBS, "run-preflight")["metadata"]["uid"]
    report(gpu_bench, checking(gpu_bench))
    with gpu_bench.operating(**ON):
        gpu_bench.wait_running()
    status = gpu_bench.status()
    assert (status["preflight"]["jobUid"], status["preflight"]["tries"]) == (uid, 1)


@pytest.mark.slow
def test_an_evicted_pod_is_made_again_by_the_same_job(gpu_bench: GpuBench) -> None:
    # the Job controller takes ten seconds for it
    with gpu_bench.operating(**ON):
        gpu_bench.want("run", 4)
        first = checking(gpu_bench)
        evicted = first["metadata"]["uid"]
        key = {"name": first["metadata"]["name"], "namespace": gpu_bench.namespace}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": key}
        with gpu_bench.kubelets_standing_still():
            gpu_bench.post(f"{PODS}/{key['name']}/eviction", eviction)
            # as the kubelet does: the Job controller makes another once this one has ended
            gpu_bench.patch(PODS, f"{key['name']}/status", {"status": {"phase": "Failed"}})
        gpu_bench.wait("another pod", lambda: checking(gpu_bench)["metadata"]["uid"] != evicted)
        report(gpu_bench, checking(gpu_bench))
        gpu_bench.wait_running()
    assert gpu_bench.status()["preflight"]["tries"] == 1


@pytest.mark.parametrize("words", gated(["\x00\x1b[31m" + "ü" * 2000, '{"problems": 7}', ""]))
def test_a_pod_that_reports_nothing_readable_lets_the_job_go_on(
    gpu_bench: GpuBench, words: str
) -> None:
    with gpu_bench.operating(**ON):
        gpu_bench.want("run", 4)
        gpu_bench.end(checking(gpu_bench), message=words)
        gpu_bench.wait_running()
    status, reason, message = gpu_bench.condition("Checked")
    assert (status, reason) == ("True", "NotChecked")
    assert len(message) <= 512


@pytest.mark.parametrize("jobs", gated([10, 200]))
def test_many_jobs_at_once_are_checked_while_they_wait_for_gpus(
    gpu_bench: GpuBench, jobs: int
) -> None:
    notes = {
        "kwok.test/after": "1s",
        "kwok.test/exit-code": "0",
        "kwok.test/message": json.dumps({"prompts": LENGTHS}),
    }
    for number in range(2):
        gpu_bench.foreign_pod(f"other-{number}", 4)
    with gpu_bench.operating(**ON) as operator:
        for number in range(jobs):
            template = {"metadata": {"annotations": notes}}
            gpu_bench.want(f"run-{number}", 4, podTemplate=template)

        def checked() -> bool:
            found = [one.get("status", {}) for one in gpu_bench.get(GRPOJOBS)["items"]]
            passed = [
                status
                for status in found
                for condition in status.get("conditions", [])
                if condition["type"] == "Checked" and condition["reason"] == "Passed"
            ]
            assert not any(status.get("attempt") for status in found)
            return len(passed) == jobs

        gpu_bench.wait("all checks", checked, seconds=300)
        gpu_bench.wait("all Jobs to go", lambda: not gpu_bench.get(JOBS)["items"])
        # A request whose answer is late is sent again, and finds what it has created.
        assert operator.requests("201")[("POST", "jobs")] <= jobs
