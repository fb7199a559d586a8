"""Gangs that don't get going, clocks that are off and ranks that fall silent: what is waited for,
how long, and told.

The API server, the Job controller and its quotas are real; kubelets only pretend, so that their
clocks and words can be what a test wants.
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from grpo_operator.decide.decisions import Limits
from tests.generated import gated
from tests.integration.operator_bench import PODS, Bench, outcome
from tests.integration.operator_thread import quiet_for

QUOTAS = "/api/v1/namespaces/{}/resourcequotas"
EVENTS = "/api/v1/namespaces/{}/events"
LIMITS = Limits(
    pods_missing_seconds=30.0,
    start_warning_seconds=20.0,
    release_pause_seconds=5.0,
    rank0_silence_seconds=30.0,
)
CREATING = {"metadata": {"annotations": {"kwok.test/creating": "true"}}}


def test_a_gang_whose_pods_a_quota_refuses_gives_its_place_back_until_they_are_allowed(
    bench: Bench,
) -> None:
    bench.post(QUOTAS, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}})
    bench.wait("the quota", lambda: "used" in bench.get(QUOTAS, "few").get("status", {}))
    # What the release says stands there until the pause is over.
    with bench.operating(limits=replace(LIMITS, release_pause_seconds=20.0)):
        bench.submit()
        bench.wait(
            "the release", lambda: bench.condition("Admitted")[1] == "PodsNotCreated", hurry=True
        )
        assert "exceeded quota: few" in bench.condition("Admitted")[2]
        assert bench.status()["phase"] == "Queued"
        bench.wait("another try", lambda: bench.status()["attempt"] >= 2, hurry=True)
        bench.delete(QUOTAS, "few")
        refused = bench.status()["attempt"]

        def tries_again() -> bool:
            status = bench.status()
            return bool(status["attempt"] > refused or status["phase"] == "Running")

        bench.wait("a try without the quota", tries_again, hurry=True)
        bench.wait_phase("Running")
        status = bench.status()
    assert {end["reason"] for end in status["ends"]} == {"PodsNotCreated"}
    assert (status.get("restarts", 0), status.get("uncountedRestarts", 0)) == (0, 0)


def say(bench: Bench, pod: Any, reason: str, message: str) -> None:
    """A warning of the kubelet about a pod."""
    about = {
        "kind": "Pod",
        "namespace": bench.namespace,
        **{key: pod["metadata"][key] for key in ("name", "uid")},
    }
    metadata = {"generateName": "kubelet-", "namespace": bench.namespace}
    bench.post(
        EVENTS,
        {
            "metadata": metadata,
            "involvedObject": about,
            "source": {"component": "kubelet"},
            "type": "Warning",
            "reason": reason,
            "message": message,
        },
    )


def test_a_gang_that_does_not_start_tells_the_kubelets_words_and_fails_in_the_end(
    bench: Bench,
) -> None:
    with bench.operating(limits=LIMITS):
        bench.submit(podTemplate=CREATING, restarts={"limit": 0, "startTimeoutSeconds": 60})
        pods = bench.wait(
            "the pods", lambda: [pod for pod in bench.pods() if pod["spec"].get("nodeName")]
        )
        say(bench, pods[0], "FailedMount", 'configmap "prompts" not found')
        bench.wait("the words", lambda: "FailedMount" in bench.condition("Degraded")[2], hurry=True)
        assert bench.condition("Degraded")[:2] == ("True", "PodWaiting")
        assert bench.status()["phase"] == "Starting"
        status = bench.wait_phase("Failed", hurry=True)
        assert bench.condition("Failed")[1] == "StartTimeout"
        assert 'configmap "prompts" not found' in bench.condition("Failed")[2]
        bench.wait("the pods to end", lambda: not bench.pods())
    assert status["attempt"] == 1


def fails(bench: Bench, pod: Any, clock: float) -> None:
    """A pod ends with Error, says a kubelet whose clock is off by so many seconds."""
    then = (datetime.now(UTC) + timedelta(seconds=clock)).strftime("%Y-%m-%dT%H:%M:%SZ")
    ended = {
        "exitCode": 1,
        "reason": "Error",
        "message": outcome("Error", message="the cause"),
        "finishedAt": then,
    }
    container = {"name": "trainer", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    status = {
        "phase": "Failed",
        "containerStatuses": [{**container, "state": {"terminated": ended}}],
    }
    bench.patch(PODS, f"{pod['metadata']['name']}/status", {"status": status})


@pytest.mark.parametrize("clock", gated([600, -600, 5]))
def test_a_kubelets_clock_changes_neither_the_cause_nor_the_count(
    bench: Bench, clock: float
) -> None:
    with bench.operating(limits=LIMITS):
        bench.submit(restarts={"limit": 1})
        fails(bench, bench.wait_running()[0], clock)
        fails(bench, bench.wait_running(attempt=2)[0], -clock)
        status = bench.wait_phase("Failed", hurry=True)
    assert (status["attempt"], status["restarts"]) == (2, 1)
    assert bench.condition("Failed")[1:] == (
        "RestartLimit",
        "Error after 1 of 1 restarts: the cause",
    )


def test_a_silent_rank_0_is_told_and_nothing_is_done(bench: Bench) -> None:
    # nobody listens at the addresses of kwok's pods
    with bench.operating(limits=LIMITS) as operator:
        bench.submit(restarts={"startTimeoutSeconds": 60})
        bench.wait_running()
        bench.wait(
            "the silence", lambda: bench.condition("Degraded")[1] == "ProgressUnknown", hurry=True
        )
        bench.wait(
            "its event",
            lambda: any(one["reason"] == "ProgressUnknown" for one in bench.get(EVENTS)["items"]),
        )
        assert bench.status()["phase"] == "Running"
        assert quiet_for(operator, 3.0) == {}
    assert bench.status()["attempt"] == 1
