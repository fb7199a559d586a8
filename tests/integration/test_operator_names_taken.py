"""Names that an attempt needs and another object has: claims that are dying or another job's,
Services of strangers.

Deletion, ownership and what a Service's spec lets one change are the API server's own.
"""

from typing import Any

import pytest

from grpo_operator.decide.decisions import Limits
from grpo_operator.pods.namespace_objects import rendezvous_service
from grpo_operator.records.names import RENDEZVOUS_SERVICE
from harness.client import ApiStatusError
from tests.generated import gated
from tests.integration.operator_bench import GRPOJOBS, JOBS, Bench
from tests.integration.operator_thread import OperatorThread

SERVICES = "/api/v1/namespaces/{}/services"
CLAIMS = "/api/v1/namespaces/{}/persistentvolumeclaims"
CLAIM = "run-checkpoints"
STRANGER: dict[str, Any] = {
    "metadata": {"name": RENDEZVOUS_SERVICE},
    "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]},
}
CLAIM_SPEC = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}


def template(retain: bool) -> dict[str, Any]:
    return {"volumeClaimTemplate": {"size": "1Gi", "retain": retain}}


def taken(bench: Bench, kind: str = "Scheduled") -> str:
    """The sentence, once the condition says that a name is taken."""
    bench.wait("the reason", lambda: bench.condition(kind)[1] == "NameTaken", hurry=True)
    return bench.condition(kind)[2]


def started(bench: Bench) -> None:
    """Waits until the attempt's Job is there; nothing here binds claims, so that its pods stay
    Pending."""

    def own() -> bool:
        job = bench.get(JOBS, "run-1")["metadata"] if bench.exists(JOBS, "run-1") else {}
        return [one["uid"] for one in job.get("ownerReferences", [])] == [
            bench.job()["metadata"]["uid"]
        ]

    bench.wait("the attempt's Job", own, hurry=True)


def held(bench: Bench, name: str) -> None:
    """Keeps a claim from going away, as a pod that uses it does."""
    bench.patch(CLAIMS, name, {"metadata": {"finalizers": ["example.com/held"]}})


def let_go(bench: Bench, name: str) -> None:
    bench.patch(CLAIMS, name, {"metadata": {"finalizers": []}})


@pytest.mark.parametrize("retain", gated([True, False]))
def test_a_job_made_again_waits_for_the_old_ones_dying_claim(
    bench: Bench, operator: OperatorThread, retain: bool
) -> None:
    bench.submit(checkpoint=template(retain))
    started(bench)
    held(bench, CLAIM)
    old = bench.get(CLAIMS, CLAIM)["metadata"]["uid"]
    bench.delete(GRPOJOBS, "run")
    if retain:
        bench.delete(CLAIMS, CLAIM)
    uid = bench.submit(checkpoint=template(retain))["metadata"]["uid"]
    assert CLAIM in taken(bench)
    assert bench.children() in ([], ["run-1"])  # the old one's may still be on its way out
    let_go(bench, CLAIM)
    started(bench)
    claim = bench.get(CLAIMS, CLAIM)["metadata"]
    assert claim["uid"] != old
    assert claim["labels"]["grpo.dev/job-uid"] == uid
    assert "deletionTimestamp" not in claim


def test_a_retained_claim_serves_the_next_job_of_the_name(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit(checkpoint=template(True))
    started(bench)
    old = bench.get(CLAIMS, CLAIM)["metadata"]["uid"]
    bench.delete(GRPOJOBS, "run")
    bench.wait("no pods", lambda: not bench.pods())
    bench.submit(checkpoint=template(False))
    started(bench)
    assert bench.get(CLAIMS, CLAIM)["metadata"]["uid"] == old


def test_a_strangers_claim_is_named_and_never_used(bench: Bench, operator: OperatorThread) -> None:
    bench.post(CLAIMS, {"metadata": {"name": CLAIM}, "spec": CLAIM_SPEC})
    bench.submit(checkpoint=template(True))
    assert "was not made for this GRPOJob" in taken(bench)
    assert bench.children() == []


def test_a_strangers_service_is_named_until_it_is_gone(
    bench: Bench, operator: OperatorThread
) -> None:
    stranger = bench.post(SERVICES, STRANGER)
    bench.submit()
    assert "is not the operator's" in taken(bench)
    assert bench.children() == []
    assert bench.get(SERVICES, RENDEZVOUS_SERVICE)["spec"] == stranger["spec"]
    bench.delete(SERVICES, RENDEZVOUS_SERVICE)
    bench.wait("the Job", bench.children, hurry=True)
    bench.wait_running()


def test_a_service_that_a_stranger_puts_in_our_place_is_named_on_running_jobs(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit()
    bench.wait_running()

    def replaced() -> bool:
        """The operator makes its own again as soon as it can; the stranger must be faster."""
        try:
            bench.delete(SERVICES, RENDEZVOUS_SERVICE)
            bench.post(SERVICES, STRANGER)
        except ApiStatusError:
            return False
        return True

    bench.wait("the stranger's Service", replaced)
    assert "is not the operator's" in taken(bench, "Degraded")
    assert bench.condition("Running")[0] == "True"
    bench.delete(SERVICES, RENDEZVOUS_SERVICE)
    bench.wait("ours", lambda: bench.condition("Degraded")[0] == "False", hurry=True)
    assert bench.get(SERVICES, RENDEZVOUS_SERVICE)["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize(
    "change",
    gated(
        [
            {
                "spec": {
                    "type": "ExternalName",
                    "externalName": "example.com",
                    "clusterIP": "",
                    "clusterIPs": [],
                }
            },
            {"spec": {"selector": {"app": "web"}}},
            {"spec": {"publishNotReadyAddresses": False}},
            {"metadata": {"labels": {"grpo.dev/component": None}}},
            {
                "metadata": {
                    "labels": {"grpo.dev/component": None, "app.kubernetes.io/managed-by": None}
                }
            },
        ]
    ),
    ids=["external", "selector", "not-ready", "label", "labels"],
)
def test_a_service_of_ours_that_was_changed_is_mended(
    bench: Bench, operator: OperatorThread, change: dict[str, Any]
) -> None:
    bench.submit()
    bench.wait_running()
    uid = bench.get(SERVICES, RENDEZVOUS_SERVICE)["metadata"]["uid"]
    wanted = rendezvous_service(bench.namespace)
    bench.patch(SERVICES, RENDEZVOUS_SERVICE, change)

    def sound() -> bool:
        found = bench.get(SERVICES, RENDEZVOUS_SERVICE)
        labelled: bool = (
            wanted["metadata"]["labels"].items() <= found["metadata"].get("labels", {}).items()
        )
        return (
            labelled and {key: found["spec"].get(key) for key in wanted["spec"]} == wanted["spec"]
        )

    bench.wait("the Service as it was", sound, hurry=True)
    assert bench.get(SERVICES, RENDEZVOUS_SERVICE)["metadata"]["uid"] == uid


def test_a_service_that_can_not_be_mended_is_named(bench: Bench) -> None:
    labels = rendezvous_service(bench.namespace)["metadata"]["labels"]
    bench.post(SERVICES, {**STRANGER, "metadata": {"name": RENDEZVOUS_SERVICE, "labels": labels}})
    with bench.operating():
        bench.submit()
        assert "can't be mended, so delete it" in taken(bench)
        bench.delete(SERVICES, RENDEZVOUS_SERVICE)
        bench.wait("the Job", bench.children, hurry=True)
        bench.wait_running()


def test_a_gang_whose_name_stays_taken_gives_its_place_back_and_starts_under_the_next_name(
    bench: Bench,
) -> None:
    """As a Job of a deleted job of this name that the garbage collector has lost track of."""
    container = {"name": "c", "image": "x"}
    body = {
        "metadata": {"name": "run-1"},
        "spec": {"template": {"spec": {"restartPolicy": "Never"}}, "suspend": True},
    }
    body["spec"]["template"]["spec"]["containers"] = [container]  # type: ignore[index]
    stranger = bench.post(JOBS, body)["metadata"]["uid"]
    limits = Limits(scheduling_timeout_seconds=60.0, release_pause_seconds=5.0)
    with bench.operating(limits=limits, status_interval=0.1):
        bench.submit()
        assert "Job run-1 exists and is not this GRPOJob's" in taken(bench)
        bench.wait_running(attempt=2)
    assert bench.get(JOBS, "run-1")["metadata"]["uid"] == stranger
    assert bench.status()["ends"][0]["reason"] == "SchedulingTimeout"
    assert bench.status()["restarts"] == 0
