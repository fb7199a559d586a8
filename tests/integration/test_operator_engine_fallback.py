"""An attempt whose engine fails, on a real API server: the next attempt has the next rung, and the
job says so.

Nothing trains here; what an engine that fails makes a trainer say is shown in
tests/trainer/test_engine_start.py.
"""

import json
from typing import Any

import pytest

from grpo_api.text.contract import PLAN_ANNOTATION
from tests.integration.gpu_bench import GpuBench
from tests.integration.operator_bench import JOBS, Object, outcome
from tests.integration.operator_thread import OperatorThread

SHORT = {"maxCompletionLength": 32}
"""So short that Transformers costs less than twice as much as vLLM, and more than it."""
EVENTS = "/api/v1/namespaces/{}/events"


@pytest.fixture
def bench(gpu_bench: GpuBench) -> GpuBench:
    return gpu_bench


def engine(bench: GpuBench, attempt: int) -> Object | None:
    """The engine that the attempt's pods are told of."""
    template = bench.get(JOBS, f"run-{attempt}")["spec"]["template"]
    plan: Object = json.loads(template["metadata"]["annotations"][PLAN_ANNOTATION])
    found: Object | None = plan["execution"].get("engine")
    return found


def fail(bench: GpuBench, attempt: int, result: str, code: int, **more: Any) -> None:
    """A rank of the running attempt says that its engine failed."""
    pod = bench.wait_running(attempt=attempt)[0]
    bench.end(pod, code, outcome(result, attempt=attempt, message="no kernel", **more))


def event_reasons(bench: GpuBench) -> set[str]:
    """Reasons of the events about GRPOJobs."""
    events = bench.get(EVENTS + "?fieldSelector=involvedObject.kind=GRPOJob")["items"]
    return {event["reason"] for event in events}


def test_each_engine_that_fails_is_followed_by_the_next_rung(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("run", 4, restarts={"limit": 0}, training=SHORT)
    fail(bench, 1, "EngineFailed", 52, engineCause="NotStarted")
    bench.wait_running(attempt=2)
    first, second = engine(bench, 1), engine(bench, 2)
    assert first is not None
    assert second is not None
    assert (second["modelRunner"], second.get("sleep", False)) == ("V1", False)
    assert bench.condition("EngineFallback")[:2] == ("True", "ModelRunnerV1")
    fail(bench, 2, "EngineMismatch", 50)
    bench.wait_running(attempt=3)
    assert engine(bench, 3) is None
    held, reason, message = bench.condition("EngineFallback")
    assert (held, reason) == ("True", "Transformers")
    assert "the engine of attempt 2 ended with EngineMismatch: no kernel" in message
    status = bench.status()
    assert status.get("restarts", 0) == 0
    assert [one["rung"] for one in status["learned"]["engineFailures"]] == [
        "ModelRunnerV1",
        "Transformers",
    ]
    # Events follow the status write.
    bench.wait("the events", lambda: {"ModelRunnerV1", "Transformers"} <= event_reasons(bench))


def test_a_job_for_which_transformers_is_too_slow_fails_with_the_cause(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("run", 4)
    fail(bench, 1, "EngineFailed", 52, engineCause="Unprovable")
    bench.wait_phase("Failed")
    reason, message = bench.condition("Failed")[1:]
    assert reason == "EngineFailed"
    assert "no kernel" in message
    assert "more than 2 times" in message
