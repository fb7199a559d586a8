"""What became of a job's GPUs, by what a real API server has of its pods, over restarts of job and
operator."""

import time
from datetime import datetime

import pytest

from tests.integration.gpu_bench import PRODUCT, GpuBench
from tests.integration.operator_bench import Object, outcome

EVENTS = "/api/v1/namespaces/{}/events"
PRICES = {PRODUCT: 3600.0}
HELD = 3.0
"""Seconds for which pods are held at least, since the API server's times have whole seconds."""


@pytest.fixture
def bench(gpu_bench: GpuBench) -> GpuBench:
    return gpu_bench


def until_end(pod: Object, begin: str) -> float:
    """Seconds from then to the end of the pod's container, in whole ones as the API server keeps
    times."""
    (container,) = pod["status"]["containerStatuses"]
    end = datetime.fromisoformat(container["state"]["terminated"]["finishedAt"])
    return (end - datetime.fromisoformat(begin)).total_seconds()


def started(pod: Object) -> str:
    """When the pod's kubelet took it on."""
    return str(pod["status"]["startTime"])


def bound(pod: Object) -> str:
    """When the scheduler gave the pod its node, which is a moment before its kubelet knows."""
    (condition,) = (one for one in pod["status"]["conditions"] if one["type"] == "PodScheduled")
    return str(condition["lastTransitionTime"])


def holding(bench: GpuBench) -> list[str]:
    """Pods that hold GPUs as far as the status says."""
    attempts = bench.status()["usage"]["attempts"]
    return [pod["name"] for one in attempts for pod in one.get("pods", []) if "seconds" not in pod]


def ends_told(bench: GpuBench) -> list[str]:
    """What events say of the job's end."""
    return [one["message"] for one in bench.get(EVENTS)["items"] if one["reason"] == "Succeeded"]


def test_gpus_are_counted_from_bound_to_end_over_restarts_of_job_and_operator(
    bench: GpuBench,
) -> None:
    with bench.operating(gpu_hour_prices=PRICES):
        bench.want("run", 4, nodes=2)
        first = bench.wait_running()
        time.sleep(HELD)
    # half of what rank 0 trained is in a checkpoint, as its last word and the next attempt say
    sealed = {"loading": 0.5, "training": 1.0}
    account = {"clock": {"loading": 0.5, "training": 2.0}, "sealed": sealed}
    with bench.kubelets_standing_still():
        for pod in first:
            bench.end(pod, 1, outcome("Error", attempt=1, account=account))
    # the status of attempt 2 is compared with a later one, so both ends must be in it
    bench.wait("both ends", lambda: {pod["status"]["phase"] for pod in bench.pods()} == {"Failed"})
    with bench.operating(gpu_hour_prices=PRICES):
        second = bench.wait_running(attempt=2, hurry=False)
        first = bench.pods(attempt=1)
        before = bench.status()["usage"]
        assert [one["attempt"] for one in before["attempts"]] == [1, 2]
        assert before["gpuSeconds"]["training"] == 4 * 1.0
        time.sleep(HELD)
    with bench.operating(gpu_hour_prices=PRICES) as operator:
        bench.wait("the operator to look", lambda: operator.page("readyz")[0] == 200)
        assert bench.status()["usage"] == before, "a new operator has nothing to tell"
        last = {
            "clock": {"loading": 1.0, "training": 1.5},
            "beganAt": {"attempt": 1, "clock": sealed},
        }
        for pod in second:
            bench.end(pod, 0, outcome("Succeeded", attempt=2, account=last))
        bench.wait_phase("Succeeded")
        bench.wait("all pods to be counted", lambda: not holding(bench))
        usage = bench.status()["usage"]
        pods = [*first, *bench.pods(attempt=2)]
        least, most = (
            2 * sum(until_end(pod, begin(pod)) for pod in pods) for begin in (started, bound)
        )
        assert least <= usage["heldGpuSeconds"] <= most
        assert (usage["gpuSeconds"]["loading"], usage["gpuSeconds"]["training"]) == (
            4 * 1.5,
            4 * 2.5,
        )
        assert usage["gpuSeconds"]["lost"] >= 4 * 1.0
        assert usage["cost"] == usage["heldGpuSeconds"], "at a price of one a second"
        assert "waitingSince" not in usage
        (message,) = bench.wait("the event of the end", lambda: ends_told(bench))
        assert "GPU-hours, effective" in message
        page = operator.page("metrics")[1]
        assert (
            f'grpo_job_gpu_seconds{{namespace="{bench.namespace}",grpojob="run",state="lost"}}'
            in page
        )
