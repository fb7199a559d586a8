"""guard.onDivergence: Rollback on a real API server: what the trainer said is in the status, and in
later plans.

Nothing trains here; that a plan's skipped generations are left out is shown in
tests/trainer/test_rollback.py.
"""

import json

from grpo_api.text.contract import PLAN_ANNOTATION
from tests.integration.operator_bench import JOBS, Bench, Object, outcome
from tests.integration.operator_thread import OperatorThread

ROLLBACK: Object = {"guard": {"onDivergence": "Rollback"}}


def diverge(bench: Bench, attempt: int, first: int, last: int) -> None:
    """Both ranks of a running attempt say that they diverged."""
    pods = bench.wait_running(attempt=attempt)
    on = {"first": first, "last": last}
    told = outcome("Diverged", attempt=attempt, message="the loss is nan", divergedOn=on)
    with bench.kubelets_standing_still():
        for pod in pods:
            bench.end(pod, 47, told)


def skipped(bench: Bench, attempt: int) -> list[Object]:
    """What the attempt's pods are told to leave out."""
    template = bench.get(JOBS, f"run-{attempt}")["spec"]["template"]
    found: list[Object] = json.loads(template["metadata"]["annotations"][PLAN_ANNOTATION])[
        "skipped"
    ]
    return found


def test_a_run_goes_back_twice_and_fails_the_third_time(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit(**ROLLBACK)
    diverge(bench, 1, 7, 7)
    bench.wait_running(attempt=2)
    assert skipped(bench, 2) == [{"first": 7, "last": 7}]
    diverge(bench, 2, 9, 10)
    bench.wait_running(attempt=3)
    assert skipped(bench, 3) == [{"first": 7, "last": 7}, {"first": 9, "last": 10}]
    diverge(bench, 3, 12, 12)
    status = bench.wait_phase("Failed", hurry=True)
    assert bench.condition("Failed")[1:] == (
        "Diverged",
        "diverged again after 2 of 2 rollbacks: the loss is nan",
    )
    assert [(one["attempt"], one["skipped"]["first"]) for one in status["rollbacks"]] == [
        (1, 7),
        (2, 9),
    ]
    assert status.get("restarts", 0) == 0


def test_an_operator_that_was_away_finds_what_to_leave_out(bench: Bench) -> None:
    with bench.operating():
        bench.submit(**ROLLBACK)
        pods = bench.wait_running()
    on = {"first": 3, "last": 3}
    bench.end(
        pods[1], 47, outcome("DivergedKL", attempt=1, rank=1, message="far away", divergedOn=on)
    )
    with bench.operating():
        pods = bench.wait_running(attempt=2)
    assert skipped(bench, 2) == [on]
    bench.end(pods[0], 139)
    with bench.operating():
        bench.wait_running(attempt=3)
    assert skipped(bench, 3) == [on]
    assert [(one["attempt"], one["reason"]) for one in bench.status()["rollbacks"]] == [
        (1, "DivergedKL")
    ]
