"""Kueue's manager on hand-made Workloads: the same stories by the stand-in, step for step, and by the real one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.client import ApiStatusError
from harness.cluster import Cluster
from harness.fixtures import api_level, serve_grpojobs
from harness.kueue import kueue_managing
from tests.integration.kueue_bench import KueueBench
from tests.integration.kueue_queues import QUEUE, RealQueues
from tests.integration.kueue_stand_in import MERGE, WORKLOADS, KueueStandIn
from tests.integration.kueue_writes import (
    GPU,
    Workload,
    answer_check,
    checks,
    evict,
    finish,
    give_back,
    is_true,
    said,
    time_out,
)
from tests.integration.operator_bench import Bench


@pytest.fixture(scope="module")
def managed_cluster() -> Iterator[Cluster]:
    """A cluster with Kueue's real manager at work."""
    with api_level("kueue-managed") as cluster:
        assert isinstance(cluster, Cluster)
        serve_grpojobs(cluster)
        with kueue_managing(cluster):
            yield cluster


@pytest.fixture(params=["stand-in", "manager"])
def kueue(request: pytest.FixtureRequest) -> Iterator[KueueStandIn]:
    if request.param == "stand-in":
        bench: KueueBench = request.getfixturevalue("kueue_bench")
        yield bench.kueue
        return
    cluster: Cluster = request.getfixturevalue("managed_cluster")
    client = cluster.control_plane.client()
    queues = RealQueues(client, Bench(cluster, client).namespace)
    yield queues
    queues.end()


def make(kueue: KueueStandIn, name: str, gpus: int = 4, pods: int = 1, **spec: Any) -> Workload:
    requests = {"cpu": "1", GPU: str(gpus // pods)}
    container = {"name": "c", "image": "x", "resources": {"limits": {GPU: requests[GPU]}, "requests": requests}}
    pod = {"restartPolicy": "Never", "containers": [container]}
    return kueue.create(
        name, queueName=QUEUE, podSets=[{"name": "trainer", "count": pods, "template": {"spec": pod}}], **spec
    )


def named(kueue: KueueStandIn, name: str) -> Workload:
    (found,) = [one for one in kueue.all() if one["metadata"]["name"] == name]
    return found


def wait(kueue: KueueStandIn, name: str, **conditions: tuple[str, str]) -> Workload:
    """Until the Workload says all these, each by status and reason."""

    def says() -> Workload | None:
        one = named(kueue, name)
        return one if all(said(one, kind) == wanted for kind, wanted in conditions.items()) else None

    found = kueue.until(f"{name}: {conditions}", says)
    assert found
    return found


ADMITTED = {"QuotaReserved": ("True", "QuotaReserved"), "Admitted": ("True", "Admitted")}
WAITS = {"QuotaReserved": ("False", "Pending")}
RELEASED = {"QuotaReserved": ("False", "Pending"), "Admitted": ("False", "NoReservation")}


def test_quota_is_given_to_the_first_and_one_that_finishes_makes_room(kueue: KueueStandIn) -> None:
    first = make(kueue, "a", gpus=4, pods=2)
    (assignment,) = wait(kueue, "a", **ADMITTED)["status"]["admission"]["podSetAssignments"]
    assert assignment == {
        "name": "trainer",
        "count": 2,
        "flavors": {GPU: kueue.flavor, "cpu": kueue.flavor},
        "resourceUsage": {GPU: "4", "cpu": "2"},
    }
    make(kueue, "b", gpus=1)
    wait(kueue, "b", **WAITS, Admitted=("", ""))
    kueue.change(first, finish)
    wait(kueue, "b", **ADMITTED)
    assert is_true(named(kueue, "a"), "Admitted")


def test_a_higher_priority_preempts_and_the_preempted_one_comes_back(kueue: KueueStandIn) -> None:
    low = make(kueue, "low", priority=1)
    wait(kueue, "low", **ADMITTED)
    high = make(kueue, "high", priority=1000)
    wait(kueue, "low", Evicted=("True", "Preempted"), Preempted=("True", "InClusterQueue"), **ADMITTED)
    kueue.change(low, give_back)
    wait(kueue, "high", **ADMITTED)
    wait(kueue, "low", Requeued=("True", "Preempted"), **WAITS)
    kueue.change(high, finish)
    wait(kueue, "low", Evicted=("False", "QuotaReserved"), Preempted=("False", "QuotaReserved"), **ADMITTED)


def test_one_that_is_deactivated_stays_admitted_until_it_is_cleared_and_comes_back_when_active(
    kueue: KueueStandIn,
) -> None:
    made = make(kueue, "one")
    wait(kueue, "one", **ADMITTED)
    kueue.set_active(made, active=False)
    wait(kueue, "one", Evicted=("True", "Deactivated"), **ADMITTED)
    kueue.change(made, give_back)
    make(kueue, "other")
    wait(kueue, "other", **ADMITTED)
    assert said(named(kueue, "one"), "Requeued") == ("False", "Deactivated")
    kueue.set_active(made, active=True)
    wait(kueue, "one", Requeued=("True", "Reactivated"), **WAITS)
    kueue.change(named(kueue, "other"), finish)
    wait(kueue, "one", Evicted=("False", "QuotaReserved"), **ADMITTED)


def passing_check(kueue: KueueStandIn) -> Callable[..., Callable[[Workload], None]]:
    """Makes an admission check necessary, and returns how its controller answers."""
    if isinstance(kueue, RealQueues):
        kueue.require_check()
    else:
        kueue.check = "check"
    return lambda state, *updates: lambda one: answer_check(one, state, *updates, name=kueue.check)


def test_an_admission_check_holds_admission_back_and_is_tried_again(kueue: KueueStandIn) -> None:
    says, made = passing_check(kueue), make(kueue, "one")
    wait(kueue, "one", QuotaReserved=("True", "QuotaReserved"))
    assert not is_true(named(kueue, "one"), "Admitted")
    kueue.until("the check", lambda: checks(named(kueue, "one")) == {"Pending"})
    update = {"name": "trainer", "labels": {"a": "b"}}
    kueue.change(made, says("Ready", update))
    wait(kueue, "one", **ADMITTED)
    assert named(kueue, "one")["status"]["admissionChecks"][0]["podSetUpdates"] == [update]
    kueue.change(made, says("Retry"))
    wait(kueue, "one", Evicted=("True", "AdmissionCheck"))
    assert checks(named(kueue, "one")) == {"Pending"}
    kueue.change(made, give_back)
    wait(kueue, "one", Requeued=("True", "BackoffFinished"), QuotaReserved=("True", "QuotaReserved"))


def test_a_rejected_admission_check_deactivates(kueue: KueueStandIn) -> None:
    says, made = passing_check(kueue), make(kueue, "one")
    kueue.until("the check", lambda: checks(named(kueue, "one")) == {"Pending"})
    wait(kueue, "one", QuotaReserved=("True", "QuotaReserved"))
    kueue.change(made, says("Rejected"))
    one = wait(kueue, "one", Evicted=("True", "DeactivatedDueToAdmissionCheck"), DeactivationTarget=("", ""))
    assert one["spec"]["active"] is False


def test_the_definition_refuses_another_queue_while_quota_is_reserved(kueue: KueueStandIn) -> None:
    made = make(kueue, "one")
    wait(kueue, "one", **ADMITTED)
    path = f"{WORKLOADS.format(made['metadata']['namespace'])}/one"
    with pytest.raises(ApiStatusError, match="queueName is immutable while workload quota reserved"):
        kueue.client.request("PATCH", path, {"spec": {"queueName": "other"}}, MERGE)
    kueue.change(made, lambda one: evict(one, "Deactivated", "why"), give_back)
    kueue.client.request("PATCH", path, {"spec": {"queueName": "other"}}, MERGE)


def test_one_whose_pods_were_late_comes_back_after_its_backoff(kueue_bench: KueueBench) -> None:
    kueue = kueue_bench.kueue
    made = make(kueue, "one")
    wait(kueue, "one", **ADMITTED)
    kueue.change(made, lambda one: time_out(one, 3600), give_back)
    wait(kueue, "one", Requeued=("False", "PodsReadyTimeout"), **RELEASED)
    kueue.change(made, lambda one: one["status"]["requeueState"].update(requeueAt="2026-01-01T00:00:00Z"))
    one = wait(kueue, "one", Requeued=("True", "BackoffFinished"), **ADMITTED)
    assert one["status"]["requeueState"] == {"count": 1}


def test_the_stand_in_at_work_keeps_the_quota_whatever_comes(kueue_bench: KueueBench) -> None:
    kueue = kueue_bench.kueue

    def running() -> list[Workload]:
        return [one for one in kueue.all() if is_true(one, "Admitted") and not is_true(one, "Finished")]

    with kueue.managing():
        for number in range(6):
            make(kueue, f"w{number}", gpus=(1, 2, 4)[number % 3])
        for _ in range(6):
            kueue.change(kueue_bench.wait("an admitted one", running)[0], finish)
    assert kueue.most_used == 4
