"""The admission queue on a real API server: who can't start holds nobody up, and waiting costs
nothing."""

import re

import pytest

from tests.integration.gpu_bench import GpuBench
from tests.integration.operator_bench import PODS, outcome
from tests.integration.operator_thread import OperatorThread, quiet_for

QUOTAS = "/api/v1/namespaces/{}/resourcequotas"
ACCOUNTS = "/api/v1/namespaces/{}/serviceaccounts"
GPU = "requests.nvidia.com/gpu"
PLACES = ("1st", "2nd", "3rd", "4th", "5th", "6th")


@pytest.fixture
def bench(gpu_bench: GpuBench) -> GpuBench:
    return gpu_bench


def places(bench: GpuBench, jobs: int) -> set[str]:
    """`2nd of 6` and the like: what the waiting jobs read of their places."""
    said = (bench.condition("Scheduled", f"waits-{number}")[2] for number in range(jobs))
    return {
        found.group(1) for text in said if (found := re.search(r"(\w+ of \d+) in the queue", text))
    }


def test_jobs_that_can_never_run_hold_nobody_up(bench: GpuBench, operator: OperatorThread) -> None:
    for number in range(40):
        bench.want(f"never-{number}", 1, placement={"gpuProduct": "NVIDIA-Nothing"})
    bench.want("can", 1)
    bench.wait_running("can")
    bench.wait("the reason", lambda: bench.condition("Admitted", "never-39")[1] == "NoGPUs")


def test_a_gang_that_a_quota_forbids_takes_no_place_and_starts_when_it_allows(
    bench: GpuBench,
) -> None:
    quota = {"metadata": {"name": "gpus"}, "spec": {"hard": {GPU: "4"}}}
    bench.post(QUOTAS, quota)
    bench.wait("the quota", lambda: bench.get(QUOTAS, "gpus").get("status", {}).get("hard"))
    with bench.operating():  # it lists the quota before it admits anybody
        bench.want("eight", 8, nodes=2)
        bench.wait_phase("Queued", "eight")
        reason, message = bench.condition("Admitted", "eight")[1:]
        assert reason == "WaitingForQuota"
        assert message == (
            f"ResourceQuota gpus of namespace {bench.namespace} allows 4 {GPU}; 0 are used, and "
            "the gang needs 8"
        )
        bench.want("four", 4)
        pods = bench.wait_running("four")
        assert bench.children("eight") == []
        bench.end(pods[0], message=outcome("Succeeded"))
        bench.patch(QUOTAS, "gpus", {"spec": {"hard": {GPU: "8"}}})
        bench.wait_running("eight")


def test_a_service_account_that_comes_late_is_waited_for(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("run", 1, podTemplate={"spec": {"serviceAccountName": "trainer"}})
    bench.wait_phase("Queued", "run")
    assert bench.condition("Admitted", "run")[1] == "ServiceAccountNotFound"
    assert bench.children() == []
    bench.post(ACCOUNTS, {"metadata": {"name": "trainer"}})
    bench.wait_running("run")


def test_a_priority_class_that_does_not_exist_is_waited_for(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("run", 1, placement={"priorityClassName": f"late-{bench.namespace}"})
    bench.wait_phase("Queued", "run")
    assert bench.condition("Admitted", "run")[1] == "PriorityClassNotFound"
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    bench.client.request(
        "POST", path, {"metadata": {"name": f"late-{bench.namespace}"}, "value": 7}
    )
    bench.wait_running("run")


def test_while_jobs_wait_and_nothing_changes_there_is_no_request(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("runs", 8, nodes=2)
    bench.wait_running("runs")
    for number in range(6):
        bench.want(f"waits-{number}", 4)
        bench.wait_phase("Queued", f"waits-{number}")
    bench.wait("all sentences", lambda: places(bench, 6) == {f"{place} of 6" for place in PLACES})
    bench.wait("no more to tell", lambda: not quiet_for(operator, 2))
    assert quiet_for(operator, 10) == {}


def test_when_gpus_are_freed_the_next_starts_and_others_read_their_new_place(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("runs", 8, nodes=2)
    pods = bench.wait_running("runs")
    for number in range(4):
        bench.want(f"waits-{number}", 8, nodes=2)
        bench.wait_phase("Queued", f"waits-{number}")
    for pod in pods:
        bench.end(pod, message=outcome("Succeeded"))
    # those of one second have no age between them
    names = [f"waits-{number}" for number in range(4)]
    bench.wait(
        "the next to start",
        lambda: any(bench.status(name).get("phase") == "Running" for name in names),
    )
    (first,) = [name for name in names if bench.children(name)]
    bench.wait("the new places", lambda: places(bench, 4) == {"1st of 3", "2nd of 3", "3rd of 3"})
    other = next(name for name in names if name != first)
    assert f"held by {bench.namespace}/{first}" in bench.condition("Scheduled", other)[2]


def test_a_foreign_pod_that_goes_makes_room(bench: GpuBench) -> None:
    bench.foreign_pod("notebook", 4)
    with bench.operating():  # it lists the foreign pod before it admits anybody
        bench.want("eight", 8, nodes=2)
        bench.wait_phase("Queued", "eight")
        assert f"4 held by {bench.namespace}/notebook" in bench.condition("Admitted", "eight")[2]
        bench.delete(PODS, "notebook")
        bench.wait_running("eight")
