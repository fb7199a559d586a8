"""What Kueue writes and what the operator answers: a row of the contract each, on the real
definition of Workloads.

A stand-in writes, whose every step test_kueue_manager.py holds to the real manager.
"""

from collections.abc import Iterator

import pytest

from harness.cluster import Cluster
from tests.generated import gated
from tests.integration.kueue_bench import PRIORITY_LABEL, QUEUE_LABEL, KueueBench, admission
from tests.integration.kueue_queues import QUEUE
from tests.integration.kueue_writes import (
    answer_check,
    evict,
    is_true,
    keep_waiting,
    message,
    preempt,
    requeued,
    said,
    time_out,
)
from tests.integration.operator_bench import GRPOJOBS, JOBS, PODS, SPEC, outcome
from tests.integration.operator_thread import OperatorThread, quiet_for

PLACEMENT = SPEC["placement"]
CRASH = outcome("Error", message="connection closed by peer")


@pytest.fixture
def bench(kueue_bench: KueueBench) -> KueueBench:
    return kueue_bench


@pytest.fixture
def operator(kueue_cluster: Cluster, bench: KueueBench) -> Iterator[OperatorThread]:
    with bench.operating() as one:
        yield one


def test_one_workload_stands_for_the_gang_and_nothing_starts_before_it_is_admitted(
    bench: KueueBench, operator: OperatorThread
) -> None:
    job = bench.submit()
    workload = bench.workload()
    (reference,) = workload["metadata"]["ownerReferences"]
    assert (reference["uid"], reference["controller"]) == (job["metadata"]["uid"], True)
    assert workload["spec"]["queueName"] == QUEUE
    assert [(one["name"], one["count"]) for one in workload["spec"]["podSets"]] == [("trainer", 2)]
    assert "minCount" not in workload["spec"]["podSets"][0]
    bench.kueue.tell("run", lambda one: keep_waiting(one, "no quota for it: all GPUs are taken"))
    bench.wait("Kueue's words", lambda: "all GPUs are taken" in bench.condition("Admitted")[2])
    assert bench.condition("Admitted")[:2] == ("False", "WaitingForKueue")
    assert (bench.status()["phase"], bench.children()) == ("Queued", [])
    bench.kueue.tell("run", bench.kueue.reserve)
    quiet_for(operator, 1)
    assert bench.children() == []


def test_two_queues_that_differ_are_refused(bench: KueueBench, operator: OperatorThread) -> None:
    bench.submit(placement={**PLACEMENT, "queueName": "other"})
    bench.wait("the refusal", lambda: "'other'" in bench.condition("Admitted")[2])
    assert QUEUE_LABEL in bench.condition("Admitted")[2]
    assert bench.kueue.all() == []


def test_the_priority_is_that_of_the_labels_class(
    bench: KueueBench, operator: OperatorThread
) -> None:
    name = bench.priority("high", 1000)
    bench.submit(labels={QUEUE_LABEL: QUEUE, PRIORITY_LABEL: name})
    spec = bench.workload()["spec"]
    assert spec["priority"] == 1000
    assert spec["priorityClassRef"] == {
        "group": "kueue.x-k8s.io",
        "kind": "WorkloadPriorityClass",
        "name": name,
    }


def test_an_admitted_gang_runs_where_kueue_says(
    bench: KueueBench, operator: OperatorThread
) -> None:
    toleration = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}
    bench.give_flavor(nodeLabels={"kubernetes.io/os": "linux"}, tolerations=[toleration])
    bench.submit()
    bench.workload()
    more = {"key": "soon", "operator": "Exists"}
    update = {
        "name": "trainer",
        "labels": {"a": "b"},
        "annotations": {"c": "d"},
        "tolerations": [more],
    }
    bench.kueue.tell("run", lambda one: answer_check(one, "Ready", update))
    pods = bench.admit()
    job = bench.get(JOBS, "run-1")
    assert job["spec"].get("suspend", False) is False
    assert QUEUE_LABEL not in job["metadata"]["labels"]
    for pod in pods:
        assert pod["spec"]["nodeSelector"]["kubernetes.io/os"] == "linux"
        assert [
            one["key"] for one in pod["spec"]["tolerations"] if one["key"] in ("spot", "soon")
        ] == ["spot", "soon"]
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "trainer"
        assert pod["metadata"]["labels"]["a"] == "b"
        assert pod["metadata"]["annotations"]["c"] == "d"
        assert QUEUE_LABEL not in pod["metadata"]["labels"]
    bench.wait("PodsReady", lambda: is_true(bench.workload(), "PodsReady"))


def test_a_restart_keeps_quota_and_place(bench: KueueBench, operator: OperatorThread) -> None:
    bench.submit()
    pods = bench.admit()
    bench.wait("PodsReady", lambda: is_true(bench.workload(), "PodsReady"))
    before = bench.workload()
    bench.end(pods[1], 1, CRASH)
    bench.wait_running(attempt=2)
    after = bench.workload()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == before["spec"]
    for status in (before["status"], after["status"]):
        status["conditions"] = [one for one in status["conditions"] if one["type"] != "PodsReady"]
    assert after["status"] == before["status"]
    bench.wait("PodsReady", lambda: is_true(bench.workload(), "PodsReady"))
    assert bench.status()["restarts"] == 1


REASONS = (
    "Preempted",
    "NodeFailures",
    "PodsReadyTimeout",
    "AdmissionCheck",
    "ClusterQueueStopped",
    "LocalQueueStopped",
    "DeactivatedDueToRequeuingLimitExceeded",
    "OfALaterVersion",
)


@pytest.mark.parametrize("reason", gated(REASONS))
def test_an_evicted_gang_ends_before_its_quota_is_given_back_in_one_write(
    bench: KueueBench, operator: OperatorThread, reason: str
) -> None:
    bench.submit()
    held = bench.admit()[0]["metadata"]["name"]
    bench.wait("PodsReady", lambda: is_true(bench.workload(), "PodsReady"))
    bench.patch(PODS, held, {"metadata": {"finalizers": ["example.com/holds"]}})
    quiet_for(operator, 0.5)  # the answer to the write of PodsReady may come after the write
    before = writes(operator)
    bench.kueue.tell("run", lambda one: evict(one, reason, "why"))
    bench.wait("the end", lambda: "deletionTimestamp" in bench.get(PODS, held)["metadata"])
    quiet_for(operator, 0.5)
    assert admission(bench.workload())
    assert writes(operator) == before
    bench.patch(PODS, held, {"metadata": {"finalizers": None}})
    now = bench.given_back()
    assert said(now, "Requeued") == requeued(reason)
    for kind in ("QuotaReserved", "Admitted", "PodsReady"):
        assert said(now, kind)[0] == "False", kind
    assert bench.pods() == []
    bench.wait_phase("Queued")
    # The operator counts a write when it has its answer, and others see the write before that.
    bench.wait("the write to be counted", lambda: writes(operator) > before)
    quiet_for(operator, 0.5)
    assert writes(operator) == before + 1
    assert reason in str(bench.status()["conditions"])
    assert bench.status()["restarts"] == 0


def writes(operator: OperatorThread) -> int:
    """What it has written on Workloads."""
    return sum(
        count
        for (verb, kind), count in operator.requests().items()
        if kind == "workloads" and verb != "GET"
    )


def test_one_that_comes_back_goes_on_in_the_next_attempt(
    bench: KueueBench, operator: OperatorThread
) -> None:
    bench.submit()
    bench.admit()
    bench.kueue.tell("run", preempt)
    bench.given_back()
    uid = bench.workload()["metadata"]["uid"]
    bench.end(bench.admit(attempt=2)[0], message=outcome("Succeeded"))
    bench.wait_phase("Succeeded")
    assert bench.workload()["metadata"]["uid"] == uid
    assert bench.status()["restarts"] == 0


@pytest.mark.parametrize("moment", gated(["with", "before", "after"]))
def test_an_eviction_in_mid_restart_ends_in_a_queued_job_without_a_pod(
    bench: KueueBench, operator: OperatorThread, moment: str
) -> None:
    bench.submit()
    pods = bench.admit()
    with bench.kubelets_standing_still():  # an evicted pod may be gone before it crashes
        if moment == "before":
            bench.kueue.tell("run", preempt)
        bench.end(pods[1], 1, CRASH)
    if moment == "after":
        bench.wait("the next attempt", lambda: bench.status()["attempt"] == 2)
    if moment != "before":
        bench.kueue.tell("run", preempt)
    bench.given_back()
    bench.wait_phase("Queued")
    quiet_for(operator, 1)
    living = [
        pod
        for pod in bench.get(PODS)["items"]
        if pod["status"]["phase"] not in ("Failed", "Succeeded")
    ]
    assert living == []
    assert bench.status()["phase"] == "Queued"
    attempt = bench.status()["attempt"] + 1
    bench.admit(attempt=attempt)


def test_one_that_is_deactivated_comes_back_when_it_is_active(
    bench: KueueBench, operator: OperatorThread
) -> None:
    bench.submit()
    bench.admit()
    with bench.kueue.managing():
        bench.kueue.set_active(bench.workload(), active=False)
        bench.given_back()
        assert said(bench.workload(), "Requeued") == ("False", "Deactivated")
        bench.wait("the words", lambda: "spec.active" in bench.condition("Admitted")[2])
        bench.kueue.set_active(bench.workload(), active=True)
        bench.wait_running(attempt=2)


def test_pods_that_are_late_come_back_after_the_backoff(
    bench: KueueBench, operator: OperatorThread
) -> None:
    bench.submit()
    bench.admit()
    with bench.kueue.managing():
        bench.kueue.tell("run", lambda one: time_out(one, 1))
        bench.wait_running(attempt=2)
    assert bench.workload()["status"]["requeueState"] == {"count": 1}


@pytest.mark.parametrize(("result", "reason"), [("Succeeded", "Succeeded"), ("BadInput", "Failed")])
def test_one_that_ends_for_good_is_finished(
    bench: KueueBench, operator: OperatorThread, result: str, reason: str
) -> None:
    bench.submit()
    pods = bench.admit()
    code = 0 if result == "Succeeded" else 43
    with bench.kubelets_standing_still():
        for pod in pods:
            bench.end(pod, code, message=outcome(result, message="that is all"))
    bench.wait("the end", lambda: is_true(bench.workload(), "Finished"))
    assert said(bench.workload(), "Finished") == ("True", reason)
    assert "that is all" in message(bench.workload(), "Finished")


def test_deleting_the_job_takes_its_workload_along(
    bench: KueueBench, operator: OperatorThread
) -> None:
    bench.submit()
    bench.admit()
    bench.delete(GRPOJOBS, "run")
    bench.wait("no Workload and no pod", lambda: not bench.kueue.all() and not bench.pods())


def test_a_suspended_job_gives_its_quota_back_and_takes_it_again(
    bench: KueueBench, operator: OperatorThread
) -> None:
    with bench.kueue.managing():
        bench.submit()
        bench.wait_running()
        bench.patch(GRPOJOBS, "run", {"spec": {"suspend": True}})
        bench.wait_phase("Suspended")
        bench.given_back()
        assert bench.pods() == []
        bench.patch(GRPOJOBS, "run", {"spec": {"suspend": False}})
        bench.wait_running(attempt=2)
