"""Workloads as nobody meant them, no Kueue at all, both sides of MultiKueue, operators that die
between two writes."""

import asyncio
import random
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from grpo_kube import client
from grpo_kube.objects import resources
from grpo_operator.records import names
from harness.client import ApiStatusError
from harness.cluster import Cluster
from tests.generated import cases
from tests.integration.kueue_bench import QUEUE_LABEL, KueueBench, admission
from tests.integration.kueue_stand_in import MERGE, WORKLOADS
from tests.integration.kueue_writes import Workload, admit, evict, is_true, preempt, said, say
from tests.integration.operator_bench import GRPOJOBS, JOBS, PODS, SPEC, Bench, outcome
from tests.integration.operator_thread import OperatorThread, quiet_for


@pytest.fixture
def bench(kueue_bench: KueueBench) -> KueueBench:
    return kueue_bench


@pytest.fixture
def operator(kueue_cluster: Cluster, bench: KueueBench) -> Iterator[OperatorThread]:
    with bench.operating() as one:
        yield one


def test_without_kueue_a_job_with_a_queue_says_so_and_others_run(grpo_cluster: Cluster) -> None:
    bench = Bench(grpo_cluster, grpo_cluster.control_plane.client())
    with bench.operating():
        bench.submit("queued", placement={**SPEC["placement"], "queueName": "team"})
        bench.submit("other")
        bench.wait_running("other")
        bench.wait("the reason", lambda: bench.condition("Admitted", "queued")[1] == "NoKueue")
        assert "install it" in bench.condition("Admitted", "queued")[2]
        assert bench.children("queued") == []


def test_a_strangers_workload_of_the_name_is_never_touched(bench: KueueBench) -> None:
    with bench.operating():
        bench.submit()
        name = bench.workload()["metadata"]["name"]
        spec = bench.workload()["spec"]
    path = WORKLOADS.format(bench.namespace)
    bench.client.request("DELETE", f"{path}/{name}")
    bench.wait("it to be gone", lambda: not bench.kueue.all())
    stranger = bench.kueue.create(name, **spec)
    with bench.operating() as operator:
        bench.wait("the reason", lambda: bench.condition("Admitted")[1] == "NameTaken")
        bench.kueue.change(
            stranger, bench.kueue.reserve, lambda one: say(one, "Admitted", "True", "Admitted", "")
        )
        quiet_for(operator, 0.5)
        (found,) = bench.kueue.all()
        assert (found["metadata"]["uid"], found["spec"]) == (
            stranger["metadata"]["uid"],
            stranger["spec"],
        )
        assert bench.children() == []


KINDS = (
    "QuotaReserved",
    "Admitted",
    "Evicted",
    "Finished",
    "PodsReady",
    "Requeued",
    "Preempted",
    "Else.1",
    "a.io/B",
)
REASONS = ("Preempted", "Deactivated", "DeactivatedDueTo", "Finished", "a", "A:b,c_d", "R" * 1024)
WORDS = (
    "",
    "x",
    "\u0000",
    "\ud7ff\u202e",
    "-1",
    "kubernetes.io/os",
    "grpo.dev/job-name",
    "no/such/key",
    "w" * 300,
)
TIMES = ("1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-01-01T00:00:00+23:59")


def any_status(chance: random.Random) -> dict[str, Any]:
    """A status that means nothing, most of which the definition takes."""
    conditions = [
        {
            "type": kind,
            "status": chance.choice(["True", "False", "Unknown"]),
            "reason": chance.choice(REASONS),
            "message": chance.choice(WORDS) * chance.choice([1, 1, 100]),
            "lastTransitionTime": chance.choice(TIMES),
        }
        for kind in chance.sample(KINDS, chance.randrange(len(KINDS)))
    ]
    status: dict[str, Any] = {"conditions": conditions}
    if chance.random() < 0.5:
        flavors = {"cpu": chance.choice(["no-such-flavor", "x"])}
        assignments = [{"name": chance.choice(["trainer", "other"]), "flavors": flavors}]
        status["admission"] = {"clusterQueue": "team", "podSetAssignments": assignments}
    if chance.random() < 0.5:
        state = {
            "state": chance.choice(["Ready", "Retry", "Rejected", "Pending"]),
            "lastTransitionTime": TIMES[0],
        }
        updates = [{"name": "trainer", **any_update(chance)} for _ in range(chance.randrange(3))]
        status["admissionChecks"] = [
            {"name": "check", "message": "", "podSetUpdates": updates, **state}
        ]
    if chance.random() < 0.3:
        status["requeueState"] = {
            "count": chance.choice([0, 2**31 - 1]),
            "requeueAt": chance.choice(TIMES),
        }
    return status


def any_update(chance: random.Random) -> dict[str, Any]:
    fields = ("labels", "annotations", "nodeSelector")
    found: dict[str, Any] = {
        one: {chance.choice(WORDS): chance.choice(WORDS)} for one in chance.sample(fields, 2)
    }
    return found | {"tolerations": [{"key": chance.choice(WORDS), "operator": "Exists"}]}


@pytest.mark.seeded
def test_whatever_a_workload_says_its_job_runs_once_it_says_that_it_is_admitted(
    bench: KueueBench, operator: OperatorThread, chance: random.Random
) -> None:
    taken = 0
    for number in range(cases(8)):
        name = f"j{number}"
        bench.submit(name)
        for _ in range(chance.randrange(1, 5)):
            bench.wait("a Workload", partial(bench.kueue.owned, name))
            taken += spoil(bench, name, any_status(chance))
        bench.wait(f"{name} to run", partial(runs_when_admitted, bench, name))
        bench.delete(GRPOJOBS, name)
    assert taken > cases(8)


def runs_when_admitted(bench: KueueBench, name: str) -> bool:
    """Admits whatever Workload the GRPOJob has by now, and tells whether it runs."""
    for one in bench.kueue.owned(name):
        clean: Workload = {"metadata": one["metadata"], "spec": one["spec"]}
        bench.kueue.reserve(clean)
        admit(clean)
        if not (is_true(one, "Admitted") and admission(one) == clean["status"]["admission"]):
            spoil(bench, name, clean["status"])
    return bool(bench.status(name).get("phase") == "Running")


def spoil(bench: KueueBench, name: str, status: dict[str, Any]) -> bool:
    """Puts a status in place of all that there is; returns whether the definition took it."""
    for one in bench.kueue.owned(name):
        path = f"{WORKLOADS.format(bench.namespace)}/{one['metadata']['name']}/status"
        whole = {**dict.fromkeys(one.get("status", {})), **status}
        try:
            bench.client.request("PATCH", path, {"status": whole}, MERGE)
        except ApiStatusError as error:
            if error.status not in (400, 404, 409, 422):
                raise
            return False
    return True


def test_an_eviction_among_as_many_conditions_as_fit_is_answered(
    bench: KueueBench, operator: OperatorThread
) -> None:
    bench.submit()
    bench.admit()
    bench.wait("PodsReady", lambda: is_true(bench.workload(), "PodsReady"))

    def crowd(one: Workload) -> None:
        while len(one["status"]["conditions"]) < 15:
            say(one, f"example.com/Says{len(one['status']['conditions'])}", "True", "Because", "")
        evict(one, "Preempted", "why")

    bench.kueue.tell("run", crowd)
    bench.given_back()
    assert said(bench.workload(), "Requeued") == ("True", "Preempted")


WRITES = ("POST", "PATCH", "DELETE")


class Mortal:
    """Operators that die as soon as a write has been answered, and never hear of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.died = threading.Event()
        self.last_words: set[tuple[str, str]] = set()
        """Method and kind of each write that was somebody's last."""
        call = client.Client._call

        async def once(
            cluster: client.Client,
            method: str,
            resource: resources.Resource,
            *args: Any,
            **more: Any,
        ) -> Any:
            answer = await call(cluster, method, resource, *args, **more)
            if method in WRITES and resource in (resources.JOBS, names.GRPOJOBS, names.WORKLOADS):
                self.last_words.add((method, resource.plural))
                self.died.set()
                await asyncio.Event().wait()
            return answer

        monkeypatch.setattr(client.Client, "_call", once)


@pytest.mark.slow
def test_an_operator_that_dies_after_each_of_its_writes_ends_where_one_would(
    bench: KueueBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal = Mortal(monkeypatch)
    stop = threading.Event()

    def live() -> None:
        while not stop.is_set():
            mortal.died.clear()
            with bench.operating():
                while not stop.is_set() and not mortal.died.wait(0.05):
                    pass

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        bench.submit()
        uid = bench.workload()["metadata"]["uid"]
        pods = bench.admit()
        bench.end(pods[1], 1, outcome("Error", message="connection closed by peer"))
        bench.wait_running(attempt=2)
        bench.kueue.tell("run", preempt)
        bench.given_back()
        bench.admit(attempt=3)
        bench.succeed(attempt=3)
        bench.wait("Finished", lambda: is_true(bench.workload(), "Finished"))
    finally:
        stop.set()
        thread.join()
    assert bench.workload()["metadata"]["uid"] == uid
    assert bench.status()["restarts"] == 1
    assert mortal.last_words == {
        ("POST", "workloads"), ("POST", "jobs"), ("PATCH", "grpojobs"), ("PATCH", "workloads"),
        ("DELETE", "jobs"),
    }  # fmt: skip


def test_on_a_worker_of_multikueue_the_workload_that_is_there_is_adopted(bench: KueueBench) -> None:
    with bench.operating():
        bench.submit("original")
        spec = bench.workload("original")["spec"]
        bench.delete(GRPOJOBS, "original")
        bench.wait("it to be gone", lambda: not bench.kueue.all())
        made = bench.kueue.create("remote", **spec)
        body = {"metadata": {"name": "run", "labels": {QUEUE_LABEL: "team"}}, "spec": SPEC}
        body["metadata"]["annotations"] = {"kueue.x-k8s.io/prebuilt-workload-name": "remote"}
        bench.post(GRPOJOBS, {"apiVersion": "grpo.dev/v1alpha1", "kind": "GRPOJob", **body})
        bench.admit()
        assert [one["metadata"]["uid"] for one in bench.kueue.all()] == [made["metadata"]["uid"]]
        bench.succeed()
        bench.wait("Finished", lambda: is_true(bench.workload(), "Finished"))


def test_on_the_manager_of_multikueue_only_the_workload_is_made_and_no_status_written(
    bench: KueueBench, operator: OperatorThread
) -> None:
    bench.submit(managedBy="kueue.x-k8s.io/multikueue")
    bench.workload()
    remote = {"attempt": 3, "phase": "Running", "conditions": []}
    bench.client.request(
        "PATCH", f"{GRPOJOBS.format(bench.namespace)}/run/status", {"status": remote}, MERGE
    )
    bench.kueue.admit("run")
    quiet_for(operator, 0.5)
    assert bench.children() == []
    assert bench.status() == remote | {"observedGeneration": 0}  # the CRD's default
    bench.client.request(
        "PATCH", f"{GRPOJOBS.format(bench.namespace)}/run/status", {"status": {"attempt": 1}}, MERGE
    )
    assert admission(bench.workload())
    assert bench.get(PODS)["items"] == []
    assert bench.get(JOBS)["items"] == []
