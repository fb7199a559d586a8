"""An attempt that runs out of memory, on a real API server: the status says what it learned, the
next plan heeds it.

Nothing trains here; that a run may go on with another split is shown in
tests/trainer/test_resume_replanned.py.
"""

import json
from functools import partial

import pytest

from grpo_api.plan.learned import MAX_REPLANS
from grpo_api.text.contract import PLAN_ANNOTATION
from tests.integration.gpu_bench import GpuBench
from tests.integration.operator_bench import JOBS, Object, outcome
from tests.integration.operator_thread import OperatorThread

GIB = 2**30
OFTEN: Object = {"restarts": {"limit": 9}}


@pytest.fixture
def bench(gpu_bench: GpuBench) -> GpuBench:
    return gpu_bench


def run_out(
    bench: GpuBench, attempt: int, phase: str = "backward", allocated: int = 80 * GIB
) -> None:
    """A rank of the running attempt says that it ran out of memory in a phase."""
    shortage = {"phase": phase, "allocatedBytes": allocated, "requestedBytes": GIB}
    pod = bench.wait_running(attempt=attempt)[0]
    told = outcome(
        "OutOfMemory",
        attempt=attempt,
        message="CUDA out of memory",
        shortage=shortage,
        checkpointStep=4,
    )
    bench.end(pod, 40, told)


def split(bench: GpuBench, attempt: int) -> Object:
    """What the attempt's pods are told of how they run."""
    template = bench.get(JOBS, f"run-{attempt}")["spec"]["template"]
    found: Object = json.loads(template["metadata"]["annotations"][PLAN_ANNOTATION])["execution"]
    return found


def test_the_next_attempt_runs_another_plan_of_the_same_batch(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("run", 4, **OFTEN)
    run_out(bench, 1)
    bench.wait_running(attempt=2)
    first, second = split(bench, 1), split(bench, 2)
    assert not first["gradientCheckpointing"]
    assert second["gradientCheckpointing"]
    assert (
        second["microBatch"] * second["gradientAccumulation"]
        == first["microBatch"] * first["gradientAccumulation"]
    )
    status = bench.status()
    assert status["learned"]["memory"]["backward"]["neededBytes"] == 81 * GIB
    assert "after OutOfMemory at backward in attempt 1" in status["plan"]["changes"][0]
    bench.end(bench.pods(attempt=2)[0], 139)
    bench.wait_running(attempt=3)
    assert {key: value for key, value in split(bench, 3).items() if key != "changes"} == {
        key: value for key, value in second.items() if key != "changes"
    }


def test_one_that_can_never_fit_fails_after_three_new_plans_at_most(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("run", 4, **OFTEN)
    phases = ["backward", "generate", "backward", "generate"]
    for attempt, phase in enumerate(phases, 1):
        run_out(bench, attempt, phase, 300 * GIB)
        bench.wait("its answer", partial(answered, bench, attempt), hurry=True)
        if bench.status()["phase"] == "Failed":
            break
    status = bench.wait_phase("Failed")
    assert 2 <= status["attempt"] <= MAX_REPLANS + 1
    reason, message = bench.condition("Failed")[1:]
    assert reason == "OutOfMemory"
    assert "would do" in message
    shortfalls = status["learned"]["shortfalls"]
    assert [one["neededBytes"] for one in shortfalls] == [301 * GIB] * status["attempt"]
    assert "micro-batch 1, with checkpointing" in shortfalls[-1]["tried"]


def answered(bench: GpuBench, attempt: int) -> bool:
    """Whether the operator has answered the end of an attempt."""
    status = bench.status()
    return bool(status["attempt"] > attempt or status["phase"] == "Failed")


def test_an_operator_that_was_away_finds_what_was_learned(bench: GpuBench) -> None:
    with bench.operating():
        bench.want("run", 4, **OFTEN)
        bench.wait_running()
    shortage = {"phase": "generate", "allocatedBytes": 80 * GIB}
    bench.end(
        bench.pods()[0], 40, outcome("OutOfMemory", attempt=1, shortage=shortage, checkpointStep=4)
    )
    with bench.operating():
        bench.wait_running(attempt=2)
    assert split(bench, 2)["generationSubBatch"] > 0
    with bench.operating():
        bench.end(bench.pods(attempt=2)[0], 139)
        bench.wait_running(attempt=3)
    assert split(bench, 3)["generationSubBatch"] == split(bench, 2)["generationSubBatch"]


def test_a_container_that_the_kernel_killed_gets_a_higher_request(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("run", 4)
    pods = bench.wait_running()
    bench.end(pods[0], 137, reason="OOMKilled")
    after = bench.wait_running(attempt=2)
    first, second = (
        int(one[0]["spec"]["containers"][0]["resources"]["requests"]["memory"])
        for one in (pods, after)
    )
    assert second >= 1.49 * first
    assert split(bench, 2)["microBatch"] == split(bench, 1)["microBatch"]
