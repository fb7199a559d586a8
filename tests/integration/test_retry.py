"""A failed job is mended and tried again, on the real API server: spec.retry with whatever else is
changed with it."""

import json
from typing import Any

import pytest

from harness.client import ApiStatusError
from tests.integration.operator_bench import GRPOJOBS, JOBS, Bench, outcome
from tests.integration.operator_thread import OperatorThread

EVENTS = "/api/v1/namespaces/{}/events"


def change(bench: Bench, **spec: Any) -> None:
    bench.patch(GRPOJOBS, "run", {"spec": spec})


def fail(bench: Bench, attempt: int = 1) -> None:
    """Ends the running attempt for good."""
    bench.end(
        bench.wait_running(attempt=attempt)[0],
        43,
        outcome("BadInput", message="no such reward function"),
    )
    bench.wait_phase("Failed")


def test_a_job_that_failed_is_mended_and_retried(bench: Bench, operator: OperatorThread) -> None:
    bench.submit(ttlSecondsAfterFinished=3600)
    fail(bench)
    change(bench, retry=1, image="example/trainer:mended", env=[{"name": "A", "value": "b"}])
    pods = bench.wait_running(attempt=2)
    assert {pod["spec"]["containers"][0]["image"] for pod in pods} == {"example/trainer:mended"}
    status = bench.status()
    assert (status["retry"], status["restarts"], status["uncountedRestarts"]) == (1, 0, 0)
    assert "completionTime" not in status
    assert bench.condition("Failed")[:2] == ("False", "Retrying")

    def told() -> bool:
        found = bench.get(EVENTS + "?fieldSelector=involvedObject.kind=GRPOJob")["items"]
        return any(
            one["reason"] == "Retrying" and "spec.retry was raised to 1" in one["message"]
            for one in found
        )

    bench.wait("the event", told)
    fail(bench, attempt=2)
    assert bench.children() == ["run-1", "run-2"]
    change(bench, retry=2)
    bench.end(bench.wait_running(attempt=3)[0], message=outcome("Succeeded"))
    bench.wait_phase("Succeeded")
    assert bench.children() == ["run-2", "run-3"]


def test_a_raise_while_it_runs_is_taken_note_of_and_does_not_fire_later(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit()
    bench.wait_running()
    change(bench, retry=4)
    bench.wait("the note", lambda: bench.status().get("retry") == 4)
    fail(bench)
    change(bench, restarts={"limit": 7})
    bench.wait(
        "the look at it",
        lambda: bench.status()["observedGeneration"] == bench.job()["metadata"]["generation"],
    )
    assert (bench.status()["phase"], bench.status()["attempt"]) == ("Failed", 1)
    change(bench, retry=5)
    bench.wait_running(attempt=2)
    with pytest.raises(ApiStatusError, match="can't be lowered"):
        change(bench, retry=4)


def test_a_retry_survives_the_operators_end(bench: Bench) -> None:
    with bench.operating():
        bench.submit()
        fail(bench)
    change(bench, retry=1)
    with bench.operating():
        bench.wait_running(attempt=2)


def test_a_run_that_goes_on_keeps_its_split_and_says_what_to_change_back(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit()
    bench.end(
        bench.wait_running()[0], 43, outcome("BadInput", step=5, message="no such reward function")
    )
    bench.wait_phase("Failed")
    change(bench, retry=1, placement={"nodes": 3, "nodeSelector": {"kubernetes.io/os": "linux"}})
    bench.wait("the reason", lambda: bench.condition("Admitted")[1] == "PlanExcluded")
    assert "set spec.placement.nodes, which is 3, to 2" in bench.condition("Admitted")[2]
    change(bench, suspend=True)
    bench.wait_phase("Suspended")
    change(bench, placement={"nodes": 2, "nodeSelector": None}, suspend=False)
    assert len(bench.wait_running(attempt=2)) == 2


def test_later_attempts_get_the_commits_that_the_first_one_found(
    bench: Bench, operator: OperatorThread
) -> None:
    commits = {"model": "a" * 40, "dataset": "b" * 40}
    bench.submit()
    told = outcome("Error", message="the hub gave nothing", revisions=commits)
    bench.end(bench.wait_running()[0], 1, told)
    bench.wait_running(attempt=2)
    assert bench.status()["revisions"] == commits
    template = bench.get(JOBS, "run-2")["spec"]["template"]
    assert json.loads(template["metadata"]["annotations"]["grpo.dev/plan"])["revisions"] == commits
