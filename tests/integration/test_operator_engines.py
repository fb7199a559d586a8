"""Engines in pods of their own on a real API server and Job controller: lost and made again, and
ended with their gang.

kwok plays the kubelet: what an engine would do is the end that a test gives it.
"""

from typing import Any

import pytest

from grpo_operator.records.names import ENGINE_SERVICE, LABEL_COMPONENT
from harness.client import ApiStatusError
from tests.integration.operator_bench import GRPOJOBS, JOBS, PODS, Bench, outcome
from tests.integration.operator_thread import OperatorThread

SERVICES = "/api/v1/namespaces/{}/services"
EVENTS = "/api/v1/namespaces/{}/events"
SERVED: dict[str, Any] = {"generation": {"engine": "Servers", "servers": {"replicas": 2}}}
ENDED = ("Succeeded", "Failed")


class Roles:
    """A job with two training pods and two engines, whose restarts follow at once."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        bench.submit(**SERVED)

    def running(self, attempt: int = 1) -> tuple[list[Any], list[Any]]:
        """The attempt's training pods and its engines' pods that live, once all run."""
        self.bench.wait_running(attempt=attempt)
        pods = [
            pod for pod in self.bench.pods(attempt=attempt) if pod["status"]["phase"] not in ENDED
        ]
        roles = ("trainer", "engine")
        trains, serves = (
            [p for p in pods if p["metadata"]["labels"][LABEL_COMPONENT] == role] for role in roles
        )
        return trains, serves

    def message(self) -> str:
        return self.bench.condition("Running")[2]

    def wait_engines(self, up: int) -> None:
        wanted = f"attempt 1 runs with 2 pods and {up} of 2 engines"
        self.bench.wait(f"{up} engines", lambda: self.message() == wanted)

    def gone(self, name: str) -> None:
        self.bench.wait(f"{name} to go", lambda: name not in self.bench.children())


@pytest.fixture
def roles(bench: Bench, operator: OperatorThread) -> Roles:
    return Roles(bench)


def test_both_roles_start_and_engines_go_when_training_is_done(roles: Roles, bench: Bench) -> None:
    trains, serves = roles.running()
    assert bench.children() == ["run-1", "run-1-engine"]
    assert (len(trains), len(serves)) == (2, 2)
    assert roles.message() == "attempt 1 runs with 2 pods and 2 of 2 engines"
    assert bench.exists(SERVICES, ENGINE_SERVICE)
    assert {pod["spec"]["subdomain"] for pod in serves} == {ENGINE_SERVICE}
    assert sorted(pod["spec"]["hostname"] for pod in serves) == ["run-1-engine-0", "run-1-engine-1"]
    for pod in trains:
        bench.end(pod, message=outcome("Succeeded"))
    bench.wait_phase("Succeeded")
    roles.gone("run-1-engine")
    bench.wait("no engine's pod", lambda: len(bench.pods()) == 2)


def test_a_failed_engine_is_made_again_while_the_attempt_goes_on(
    roles: Roles, bench: Bench
) -> None:
    _, serves = roles.running()
    bench.end(serves[0], 137, reason="OOMKilled")
    roles.wait_engines(1)
    held, reason, message = bench.condition("Degraded")
    assert (held, reason) == ("True", "EnginesLost")
    assert "engine 0 ended with OOMKilled" in message
    roles.wait_engines(2)
    assert bench.condition("Degraded")[:2] == ("False", "AsExpected")
    status = bench.status()
    assert (status["phase"], status["attempt"], status.get("restarts", 0)) == ("Running", 1, 0)

    def told() -> bool:
        events = bench.get(EVENTS + "?fieldSelector=involvedObject.kind=GRPOJob")["items"]
        return "EnginesLost" in [event["reason"] for event in events]

    bench.wait("the event, which follows the status", told)


@pytest.mark.parametrize("policy", ["Background", "Orphan"])
def test_a_job_of_engines_that_somebody_deleted_is_made_again_and_its_pods_end(
    roles: Roles, bench: Bench, policy: str
) -> None:
    trains, serves = roles.running()
    before = bench.get(JOBS, "run-1-engine")["metadata"]["uid"]
    bench.delete(JOBS, "run-1-engine", propagationPolicy=policy)

    def again() -> bool:
        try:
            return bool(bench.get(JOBS, "run-1-engine")["metadata"]["uid"] != before)
        except ApiStatusError:
            return False

    bench.wait("a new Job of engines", again)
    ended = {pod["metadata"]["uid"] for pod in serves}
    bench.wait("the old engines to end", lambda: not ended & live_uids(bench))
    roles.wait_engines(2)
    assert {pod["metadata"]["uid"] for pod in trains} <= live_uids(bench)
    assert bench.status()["attempt"] == 1


def live_uids(bench: Bench) -> set[str]:
    return {p["metadata"]["uid"] for p in bench.pods() if p["status"]["phase"] not in ENDED}


def test_the_failure_of_a_training_pod_starts_both_roles_anew(roles: Roles, bench: Bench) -> None:
    trains, _ = roles.running()
    bench.end(trains[1], 137, reason="OOMKilled")
    _, serves = roles.running(attempt=2)
    assert {pod["metadata"]["labels"]["job-name"] for pod in serves} == {"run-2-engine"}
    roles.gone("run-1-engine")
    assert bench.children() == ["run-1", "run-2", "run-2-engine"], (
        "the failed gang is kept for its logs"
    )


def test_suspending_ends_both_roles_and_resuming_starts_them(roles: Roles, bench: Bench) -> None:
    roles.running()
    bench.patch(GRPOJOBS, "run", {"spec": {"suspend": True}})
    bench.wait_phase("Suspended")
    bench.wait("no Job", lambda: not bench.children())
    bench.wait("no pod", lambda: not bench.get(PODS)["items"])
    bench.patch(GRPOJOBS, "run", {"spec": {"suspend": False}})
    roles.running(attempt=2)


def test_nothing_is_left_of_a_deleted_job(roles: Roles, bench: Bench) -> None:
    roles.running()
    bench.delete(GRPOJOBS, "run")
    bench.wait("no Job", lambda: not bench.children())
    bench.wait("no pod", lambda: not bench.get(PODS)["items"])


def test_a_new_operator_finds_both_roles_as_they_are(bench: Bench) -> None:
    with bench.operating():
        roles = Roles(bench)
        trains, serves = roles.running()
    bench.end(serves[1], 1, message=outcome("EngineLost"))
    bench.delete(JOBS, "run-1-engine")
    with bench.operating() as operator:
        roles.wait_engines(2)
        assert bench.status()["attempt"] == 1
        bench.end(trains[0], 1, message=outcome("Error", message="x"))
        roles.running(attempt=2)
        roles.gone("run-1-engine")
        assert operator.error is None
