"""Gangs that don't get going, clocks that are off and ranks that fall silent: what is waited for, how long, and told.

The API server, the Job controller and its quotas are real; kubelets only pretend, so that their clocks and words can be
what a test wants.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from grpo_operator.decisions import Limits
from harness.cluster import Cluster
from tests.integration.operator_bench import GRPOJOBS, PODS, Bench, OperatorThread, operating, outcome, quiet_for

QUOTAS = "/api/v1/namespaces/{}/resourcequotas"
EVENTS = "/api/v1/namespaces/{}/events"
SOON = Limits(pods=0.5, words=0.5, release_pause=1, silence=1, restart_pause=1)
CREATING = {"metadata": {"annotations": {"kwok.test/creating": "true"}}}


def test_a_gang_whose_pods_a_quota_refuses_gives_its_place_back_until_they_are_allowed(
    bench: Bench, grpo_cluster: Cluster
) -> None:
    bench.post(QUOTAS, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}})
    bench.wait("the quota", lambda: "used" in bench.get(QUOTAS, "few").get("status", {}))
    with operating(grpo_cluster, namespaces=(bench.namespace,), limits=SOON, status_interval=0.5):
        bench.submit()
        bench.wait("the release", lambda: bench.condition("Admitted")[1] == "PodsNotCreated")
        assert "exceeded quota: few" in bench.condition("Admitted")[2]
        assert bench.status()["phase"] == "Queued"
        bench.wait("another try", lambda: bench.status()["attempt"] >= 2)
        bench.delete(QUOTAS, "few")
        bench.wait_phase("Running")
        status = bench.status()
    assert {end["reason"] for end in status["ends"]} == {"PodsNotCreated"}
    assert (status.get("restarts", 0), status.get("uncountedRestarts", 0)) == (0, 0)


def say(bench: Bench, pod: Any, reason: str, message: str) -> None:
    """A warning of the kubelet about a pod."""
    about = {"kind": "Pod", "namespace": bench.namespace, **{key: pod["metadata"][key] for key in ("name", "uid")}}
    metadata = {"generateName": "kubelet-", "namespace": bench.namespace}
    bench.post(
        EVENTS,
        {"metadata": metadata, "involvedObject": about, "type": "Warning", "reason": reason, "message": message},
    )


def test_a_gang_that_does_not_start_tells_the_kubelets_words_and_fails_in_the_end(
    bench: Bench, grpo_cluster: Cluster
) -> None:
    with operating(grpo_cluster, namespaces=(bench.namespace,), limits=SOON, status_interval=0.5):
        bench.submit(podTemplate=CREATING, restarts={"limit": 0, "startTimeoutSeconds": 10})
        pods = bench.wait("the pods", lambda: [pod for pod in bench.pods() if pod["spec"].get("nodeName")])
        say(bench, pods[0], "FailedMount", 'configmap "prompts" not found')
        bench.wait("the words", lambda: "FailedMount" in bench.condition("Degraded")[2])
        assert bench.condition("Degraded")[:2] == ("True", "PodWaiting")
        assert bench.status()["phase"] == "Starting"
        status = bench.wait_phase("Failed")
        assert bench.condition("Failed")[1] == "StartTimeout"
        assert 'configmap "prompts" not found' in bench.condition("Failed")[2]
        bench.wait("the pods to end", lambda: not bench.pods())
    assert status["attempt"] == 1


def fails(bench: Bench, pod: Any, clock: float) -> None:
    """A pod ends with Error, says a kubelet whose clock is off by so many seconds."""
    then = (datetime.now(UTC) + timedelta(seconds=clock)).strftime("%Y-%m-%dT%H:%M:%SZ")
    ended = {"exitCode": 1, "reason": "Error", "message": outcome("Error", message="the cause"), "finishedAt": then}
    container = {"name": "trainer", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Failed", "containerStatuses": [{**container, "state": {"terminated": ended}}]}
    bench.patch(PODS, f"{pod['metadata']['name']}/status", {"status": status})


@pytest.mark.parametrize("clock", [600, -600, 5])
def test_a_kubelets_clock_changes_neither_the_cause_nor_the_count(
    bench: Bench, grpo_cluster: Cluster, clock: float
) -> None:
    with operating(grpo_cluster, namespaces=(bench.namespace,), limits=SOON, status_interval=0.5):
        bench.submit(restarts={"limit": 1})
        fails(bench, bench.wait_running()[0], clock)
        fails(bench, bench.wait_running(attempt=2)[0], -clock)
        status = bench.wait_phase("Failed")
    assert (status["attempt"], status["restarts"]) == (2, 1)
    assert bench.condition("Failed")[1:] == ("RestartLimit", "Error after 1 of 1 restarts: the cause")


def test_a_silent_rank_0_is_told_and_nothing_is_done(bench: Bench, grpo_cluster: Cluster) -> None:
    # nobody listens at the addresses of kwok's pods
    with operating(
        grpo_cluster, namespaces=(bench.namespace,), limits=SOON, status_interval=0.5, progress_interval=0.2
    ) as operator:
        bench.submit()
        bench.wait_running()
        bench.wait("the silence", lambda: bench.condition("Degraded")[1] == "ProgressUnknown")
        bench.wait("its event", lambda: any(one["reason"] == "ProgressUnknown" for one in bench.get(EVENTS)["items"]))
        assert bench.status()["phase"] == "Running"
        assert quiet_for(operator, 3.0) == {}
    assert bench.status()["attempt"] == 1


def reconciles(operator: OperatorThread) -> float:
    lines = operator.page("metrics")[1].splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("controller_runtime_reconcile_total{"))


def test_deadlines_that_are_over_are_not_waited_for_again(bench: Bench, grpo_cluster: Cluster) -> None:
    # an attempt's start is told in whole seconds, and its Job must be created within the limit on a busy machine, too
    limits = Limits(scheduling=10, silence=1)
    declared = {"gpuProduct": "NVIDIA-L4", "gpusPerNode": 1, "nodes": 1, "nodeSelector": {"no": "such-node"}}
    unschedulable = {"provisioning": "CreatePods", **declared}
    with operating(grpo_cluster, namespaces=(bench.namespace,), limits=limits, status_interval=0.5) as operator:
        names = [f"run-{number}" for number in range(10)]
        for name in names:
            bench.submit(name, placement=unschedulable)
            bench.wait("the Job", lambda: bench.children(name))  # noqa: B023
        for name in names:
            bench.wait("the scheduler", lambda: bench.condition("Scheduled", name)[1] == "Unschedulable")  # noqa: B023
        quiet_for(operator, limits.scheduling + 1)
        before = reconciles(operator)
        quiet_for(operator, 3.0)
        assert reconciles(operator) - before <= 10
        assert all(bench.get(GRPOJOBS, name)["status"]["attempt"] == 1 for name in names)
