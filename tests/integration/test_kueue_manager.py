"""Kueue's manager on hand-made Workloads and on GRPOJobs: the same stories by the stand-in and by
the real one."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from harness.client import ApiStatusError
from harness.cluster import Cluster
from harness.fixtures import api_level, serve_grpojobs
from harness.kueue import kueue_managing
from tests.integration.gpu_bench import NODES
from tests.integration.kueue_bench import PRIORITY_LABEL, QUEUE_LABEL, KueueBench, admission
from tests.integration.kueue_queues import (
    ADMITTED,
    OTHER_QUEUE,
    QUEUE,
    RELEASED,
    WAITS,
    RealQueues,
    make_workload,
    named,
    wait_said,
)
from tests.integration.kueue_stand_in import MERGE, WORKLOADS, KueueStandIn
from tests.integration.kueue_writes import (
    GPU,
    Workload,
    answer_check,
    checks,
    finish,
    give_back,
    is_true,
    said,
    time_out,
)
from tests.integration.operator_bench import GRPOJOBS, PODS, Bench, outcome
from tests.integration.operator_thread import operating

pytestmark = pytest.mark.slow


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


def test_quota_is_given_to_the_first_and_one_that_finishes_makes_room(kueue: KueueStandIn) -> None:
    first = make_workload(kueue, "a", gpus=4, pods=2)
    (assignment,) = wait_said(kueue, "a", **ADMITTED)["status"]["admission"]["podSetAssignments"]
    assert assignment == {
        "name": "trainer",
        "count": 2,
        "flavors": {GPU: kueue.flavor, "cpu": kueue.flavor},
        "resourceUsage": {GPU: "4", "cpu": "2"},
    }
    make_workload(kueue, "b", gpus=1)
    wait_said(kueue, "b", **WAITS, Admitted=("", ""))
    kueue.change(first, finish)
    wait_said(kueue, "b", **ADMITTED)
    assert is_true(named(kueue, "a"), "Admitted")


def test_a_higher_priority_preempts_and_the_preempted_one_comes_back(kueue: KueueStandIn) -> None:
    low = make_workload(kueue, "low", priority=1)
    wait_said(kueue, "low", **ADMITTED)
    high = make_workload(kueue, "high", priority=1000)
    wait_said(
        kueue,
        "low",
        Evicted=("True", "Preempted"),
        Preempted=("True", "InClusterQueue"),
        **ADMITTED,
    )
    kueue.change(low, give_back)
    wait_said(kueue, "high", **ADMITTED)
    wait_said(kueue, "low", Requeued=("True", "Preempted"), **WAITS)
    kueue.change(high, finish)
    wait_said(
        kueue,
        "low",
        Evicted=("False", "QuotaReserved"),
        Preempted=("False", "QuotaReserved"),
        **ADMITTED,
    )


def test_one_that_is_deactivated_stays_admitted_until_it_is_cleared_and_comes_back_when_active(
    kueue: KueueStandIn,
) -> None:
    made = make_workload(kueue, "one")
    wait_said(kueue, "one", **ADMITTED)
    kueue.set_active(made, active=False)
    wait_said(kueue, "one", Evicted=("True", "Deactivated"), **ADMITTED)
    kueue.change(made, give_back)
    make_workload(kueue, "other")
    wait_said(kueue, "other", **ADMITTED)
    assert said(named(kueue, "one"), "Requeued") == ("False", "Deactivated")
    kueue.set_active(made, active=True)
    wait_said(kueue, "one", Requeued=("True", "Reactivated"), **WAITS)
    kueue.change(named(kueue, "other"), finish)
    wait_said(kueue, "one", Evicted=("False", "QuotaReserved"), **ADMITTED)


def passing_check(kueue: KueueStandIn) -> Callable[..., Callable[[Workload], None]]:
    """Makes an admission check necessary, and returns how its controller answers."""
    if isinstance(kueue, RealQueues):
        kueue.require_check()
    else:
        kueue.check = "check"
    return lambda state, *updates: lambda one: answer_check(one, state, *updates, name=kueue.check)


def test_an_admission_check_holds_admission_back_and_is_tried_again(kueue: KueueStandIn) -> None:
    says, made = passing_check(kueue), make_workload(kueue, "one")
    wait_said(kueue, "one", QuotaReserved=("True", "QuotaReserved"))
    assert not is_true(named(kueue, "one"), "Admitted")
    kueue.until("the check", lambda: checks(named(kueue, "one")) == {"Pending"})
    update = {"name": "trainer", "labels": {"a": "b"}}
    kueue.change(made, says("Ready", update))
    wait_said(kueue, "one", **ADMITTED)
    assert named(kueue, "one")["status"]["admissionChecks"][0]["podSetUpdates"] == [update]
    kueue.change(made, says("Retry"))
    wait_said(kueue, "one", Evicted=("True", "AdmissionCheck"))
    assert checks(named(kueue, "one")) == {"Pending"}
    kueue.change(made, give_back)
    wait_said(
        kueue, "one", Requeued=("True", "BackoffFinished"), QuotaReserved=("True", "QuotaReserved")
    )


def test_a_rejected_admission_check_deactivates_until_it_is_active_again(
    kueue: KueueStandIn,
) -> None:
    says, made = passing_check(kueue), make_workload(kueue, "one")
    kueue.until("the check", lambda: checks(named(kueue, "one")) == {"Pending"})
    wait_said(kueue, "one", QuotaReserved=("True", "QuotaReserved"))
    kueue.change(made, says("Rejected"))
    one = wait_said(
        kueue,
        "one",
        Evicted=("True", "DeactivatedDueToAdmissionCheck"),
        DeactivationTarget=("", ""),
    )
    assert one["spec"]["active"] is False
    kueue.change(made, give_back)
    kueue.set_active(made, active=True)
    wait_said(
        kueue, "one", Requeued=("True", "Reactivated"), QuotaReserved=("True", "QuotaReserved")
    )


def test_the_definition_refuses_another_queue_while_quota_is_reserved(kueue: KueueStandIn) -> None:
    made = make_workload(kueue, "one")
    wait_said(kueue, "one", **ADMITTED)
    path = f"{WORKLOADS.format(made['metadata']['namespace'])}/one"
    with pytest.raises(
        ApiStatusError, match="queueName is immutable while workload quota reserved"
    ):
        kueue.client.request("PATCH", path, {"spec": {"queueName": "other"}}, MERGE)
    kueue.set_active(made, active=False)
    wait_said(kueue, "one", Evicted=("True", "Deactivated"))
    kueue.change(made, give_back)
    kueue.client.request("PATCH", path, {"spec": {"queueName": "other"}}, MERGE)


def test_one_whose_pods_were_late_comes_back_after_its_backoff(kueue_bench: KueueBench) -> None:
    kueue = kueue_bench.kueue
    made = make_workload(kueue, "one")
    wait_said(kueue, "one", **ADMITTED)
    kueue.change(made, lambda one: time_out(one, 3600), give_back)
    wait_said(kueue, "one", Requeued=("False", "PodsReadyTimeout"), **RELEASED)
    kueue.change(
        made, lambda one: one["status"]["requeueState"].update(requeueAt="2026-01-01T00:00:00Z")
    )
    one = wait_said(kueue, "one", Requeued=("True", "BackoffFinished"), **ADMITTED)
    assert one["status"]["requeueState"] == {"count": 1}


def test_the_stand_in_at_work_keeps_the_quota_whatever_comes(kueue_bench: KueueBench) -> None:
    kueue = kueue_bench.kueue

    def running() -> list[Workload]:
        return [
            one for one in kueue.all() if is_true(one, "Admitted") and not is_true(one, "Finished")
        ]

    with kueue.managing():
        for number in range(6):
            make_workload(kueue, f"w{number}", gpus=(1, 2, 4)[number % 3])
        for _ in range(6):
            kueue.change(kueue_bench.wait("an admitted one", running)[0], finish)
    assert kueue.most_used == 4


@pytest.fixture(params=["stand-in", "manager"])
def team(request: pytest.FixtureRequest) -> Iterator[KueueBench]:
    """GRPOJobs in a namespace with a quota of four GPUs on as many nodes' eight, the operator and
    Kueue's manager."""
    real = request.param == "manager"
    cluster: Cluster = request.getfixturevalue("managed_cluster" if real else "kueue_cluster")
    bench = KueueBench(cluster, cluster.control_plane.client(), real=real)
    nodes = [bench.add_node(number) for number in range(2)]
    at_work = contextlib.nullcontext() if real else bench.kueue.managing()
    with at_work, operating(cluster, namespaces=(bench.namespace,)):
        yield bench
    bench.end_all()
    for name in nodes:
        bench.client.request("DELETE", f"{NODES}/{name}")


def test_a_job_keeps_its_quota_over_a_restart_until_a_higher_class_takes_it_and_comes_back(
    team: KueueBench,
) -> None:
    team.want("low", 4)
    pods = team.wait_running("low")
    team.wait("PodsReady", lambda: is_true(team.workload("low"), "PodsReady"))
    before = team.workload("low")
    team.end(pods[0], 1, outcome("Error", message="connection closed by peer"))
    team.wait_running("low", attempt=2)
    assert admission(team.workload("low")) == admission(before)
    assert team.workload("low")["metadata"]["uid"] == before["metadata"]["uid"]
    team.want("high", 4, labels={QUEUE_LABEL: QUEUE, PRIORITY_LABEL: team.priority("high", 1000)})
    team.wait_running("high")
    assert said(team.workload("low"), "Requeued") == ("True", "Preempted")
    assert (team.pods("low", 2), team.status("low")["phase"]) == ([], "Queued")
    team.succeed("high")
    team.succeed("low", attempt=3)
    assert team.status("low")["restarts"] == 1
    team.wait("Finished", lambda: said(team.workload("low"), "Finished") == ("True", "Succeeded"))


@pytest.mark.parametrize("target", ["Workload", "GRPOJob"])
def test_a_job_that_is_switched_off_gives_its_quota_to_the_next_and_comes_back(
    team: KueueBench, target: str
) -> None:
    def switch(on: bool) -> None:
        if target == "Workload":
            team.kueue.set_active(team.workload("one"), on)
        else:
            team.patch(GRPOJOBS, "one", {"spec": {"suspend": not on}})

    team.want("one", 4)
    team.wait_running("one")
    team.want("two", 2)
    switch(False)
    team.wait_running("two")
    assert admission(team.workload("one")) is None
    switch(True)
    team.succeed("two")
    team.wait_running("one", attempt=2)
    assert team.status("one")["restarts"] == 0


def test_a_plan_of_another_shape_waits_as_a_new_workload(team: KueueBench) -> None:
    team.want("first", 4)
    team.wait_running("first")
    team.want("one", 2)
    before = team.workload("one")["metadata"]["uid"]
    team.patch(GRPOJOBS, "one", {"spec": {"placement": {"gpus": {"min": 4, "max": 4}, "nodes": 2}}})
    team.wait(
        "the new one",
        lambda: [one["metadata"]["uid"] for one in team.kueue.owned("one")] not in ([], [before]),
    )
    assert team.workload("one")["spec"]["podSets"][0]["count"] == 2
    team.succeed("first")
    assert len(team.wait_running("one")) == 2


def test_six_jobs_of_two_teams_never_hold_more_than_the_quota(team: KueueBench) -> None:
    sizes = {f"j{number}": gpus for number, gpus in enumerate((4, 1, 2, 2, 1, 4))}
    for number, (name, gpus) in enumerate(sizes.items()):
        team.want(name, gpus, labels={QUEUE_LABEL: (QUEUE, OTHER_QUEUE)[number % 2]})
    left = set(sizes)

    def running() -> list[str]:
        return sorted(name for name in left if team.status(name).get("phase") == "Running")

    while left:
        name = team.wait("one to run", running)[0]
        assert live_gpus(team) <= team.kueue.quota
        team.succeed(name)
        left.remove(name)


def test_a_gang_that_wants_to_stand_together_is_let_go_where_the_real_ungater_says(
    managed_cluster: Cluster,
) -> None:
    block = "example.com/block"
    bench = KueueBench(
        managed_cluster,
        managed_cluster.control_plane.client(),
        real=True,
        levels=(block, "kubernetes.io/hostname"),
    )
    nodes = [bench.add_node(number, gpus=2) for number in range(4)]
    for number, name in enumerate(nodes):
        bench.client.request(
            "PATCH", f"{NODES}/{name}", {"metadata": {"labels": {block: f"b{number % 2}"}}}, MERGE
        )
    wish = {"metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": block}}}
    with operating(managed_cluster, namespaces=(bench.namespace,)):
        bench.want("run", 4, nodes=2, podTemplate=wish)
        pods = bench.wait_running()
        assert {nodes.index(pod["spec"]["nodeName"]) % 2 for pod in pods} in ({0}, {1})
        assert bench.workload()["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"]
        bench.end(pods[0], 1, outcome("Error", message="connection closed by peer"))
        bench.wait_running(attempt=2)
    bench.end_all()
    for name in nodes:
        bench.client.request("DELETE", f"{NODES}/{name}")


@pytest.mark.soak
def test_a_kueue_that_manages_all_jobs_leaves_those_of_attempts_alone() -> None:
    known = {"frameworks": ["batch/job"], "externalFrameworks": ["GRPOJob.v1alpha1.grpo.dev"]}
    with api_level("kueue-all") as cluster:
        assert isinstance(cluster, Cluster)
        serve_grpojobs(cluster)
        cluster.add_kwok_nodes(0, 4)
        with kueue_managing(cluster, manageJobsWithoutQueueName=True, integrations=known):
            bench = KueueBench(cluster, cluster.control_plane.client(), real=True)
            with operating(cluster, namespaces=(bench.namespace,)):
                bench.submit("queued")
                bench.submit("other", labels={})
                bench.wait_running("queued")
                bench.wait_running("other")


def live_gpus(bench: KueueBench) -> int:
    live = [
        one
        for one in bench.get(PODS)["items"]
        if one["status"].get("phase") not in ("Succeeded", "Failed")
    ]
    containers = [container for pod in live for container in pod["spec"]["containers"]]
    return sum(int(one["resources"].get("limits", {}).get(GPU, 0)) for one in containers)
