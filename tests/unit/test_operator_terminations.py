"""What the operator answers to each end of a gang: one sentence per case.

The precedence of ends is in grpo_operator.records.terminations, the order of the checks in
grpo_operator.decide.next_action; docs/explanation/faults.md is their prose.
"""

from typing import Any

import pytest

from grpo_kube.objects.json_reader import JsonObject
from grpo_operator.decide.decisions import Action
from grpo_operator.decide.observation import Observation
from grpo_operator.records.records import PodRecord
from grpo_operator.records.terminations import pod_termination
from tests.unit.operator_world import (
    SERVED_PLAN,
    active_status,
    judged,
    make_child,
    make_engine,
    make_engines,
    make_job,
    make_pod,
    make_seen,
    make_story,
    running,
    said,
    terminated,
)

SUCCESS = said("Succeeded", step=12, message="done")
UNREADY_SIDECAR = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
TARGET = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}


def pod_that(result: str, index: int = 0, code: int = 1, **more: Any) -> Any:
    return make_pod(index, state=terminated(code, said(result, rank=index)), **more)


def at_first(*before: PodRecord, then: tuple[PodRecord, ...]) -> Observation:
    """A job of two pods that was looked at eight and five seconds ago."""
    return make_story(
        make_job(status=active_status()), (8, (make_child(), *before)), (5, (make_child(), *then))
    )


CASES: dict[str, tuple[Observation, Action, str, bool]] = {
    "a new job asks for admission": (make_seen(make_job()), Action.ADMIT, "", False),
    "an admitted attempt without a Job is started": (
        make_seen(make_job(status=active_status(jobUid=None))),
        Action.START,
        "",
        False,
    ),
    "a running gang goes on": (running(), Action.WAIT, "", False),
    "rank 0's outcome is success although its peer still runs": (
        running(make_pod(0, state=terminated(0, SUCCESS)), make_pod(1)),
        Action.SUCCEED,
        "Succeeded",
        False,
    ),
    "rank 0's outcome is success although the process aborted afterwards": (
        running(make_pod(0, state=terminated(134, SUCCESS)), make_pod(1)),
        Action.SUCCEED,
        "Succeeded",
        False,
    ),
    "another rank's outcome alone is no success": (
        running(make_pod(0), make_pod(1, state=terminated(0, SUCCESS))),
        Action.WAIT,
        "",
        False,
    ),
    "all ranks' outcomes together are success": (
        running(
            make_pod(0, state=terminated(0, SUCCESS)), make_pod(1, state=terminated(0, SUCCESS))
        ),
        Action.SUCCEED,
        "Succeeded",
        False,
    ),
    "exit code 0 without an outcome is a counted failure": (
        running(make_pod(0, state=terminated(0)), make_pod(1, state=terminated(0))),
        Action.ADMIT,
        "Error",
        True,
    ),
    "a container that a rebooted node has lost is no failure, whatever its peers lost by it": (
        running(make_pod(0, state=terminated(255, reason="Unknown")), pod_that("Error", 1)),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "nor is one that the kubelet no longer finds": (
        running(
            pod_that("Error"), make_pod(1, state=terminated(137, reason="ContainerStatusUnknown"))
        ),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "bad input is not tried again": (
        running(pod_that("BadInput"), make_pod(1)),
        Action.FAIL,
        "BadInput",
        False,
    ),
    "a diverged KL is not tried again": (
        running(pod_that("DivergedKL"), make_pod(1)),
        Action.FAIL,
        "DivergedKL",
        False,
    ),
    "differing weights are not tried again": (
        running(pod_that("WeightsDiffer"), make_pod(1)),
        Action.FAIL,
        "WeightsDiffer",
        False,
    ),
    "an exit code that only looks like bad input is tried again": (
        running(make_pod(0, state=terminated(43)), make_pod(1)),
        Action.ADMIT,
        "BadInput",
        True,
    ),
    "running out of memory counts": (
        running(pod_that("OutOfMemory"), make_pod(1)),
        Action.ADMIT,
        "OutOfMemory",
        True,
    ),
    "the kernel's OOM kill counts, without an outcome": (
        running(make_pod(0, state=terminated(137, reason="OOMKilled")), make_pod(1)),
        Action.ADMIT,
        "OutOfMemory",
        True,
    ),
    "a hang that the trainer saw counts": (
        running(pod_that("Hang"), pod_that("Hang", 1)),
        Action.ADMIT,
        "Hang",
        True,
    ),
    "a crash without an outcome is answered at once and counts": (
        running(make_pod(0, state=terminated(139)), make_pod(1), ago=0),
        Action.ADMIT,
        "Error",
        True,
    ),
    "an error that may be a symptom waits for its cause": (
        running(pod_that("Error"), make_pod(1), ago=1),
        Action.WAIT,
        "",
        False,
    ),
    "an error whose cause does not show up is answered": (
        running(pod_that("Error"), make_pod(1), ago=3),
        Action.ADMIT,
        "Error",
        True,
    ),
    "a peer's lost connection is not blamed when another rank ran out of memory": (
        running(pod_that("Error"), pod_that("OutOfMemory", 1)),
        Action.ADMIT,
        "OutOfMemory",
        True,
    ),
    "a preempted pod does not count, whatever its peers said": (
        running(pod_that("Error"), pod_that("Preempted", 1, code=143, conditions=[TARGET])),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a preempted pod ends as that, whatever it said itself": (
        running(pod_that("Error"), pod_that("Hang", 1, conditions=[TARGET])),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a preempted pod that said nothing ends as that": (
        running(make_pod(0), make_pod(1, state=terminated(137), conditions=[TARGET])),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "an evicted pod that never ran does not count": (
        running(make_pod(0), make_pod(1, state={}, phase="Failed", reason="Evicted")),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a pod that somebody deleted does not count": (
        running(make_pod(0), make_pod(1, deleted=True), ago=0),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a pod that was deleted before its peer failed is the cause": (
        at_first(
            make_pod(0),
            make_pod(1, deleted=True),
            then=(pod_that("Error"), make_pod(1, deleted=True)),
        ),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a survivor that the Job controller deleted is not the cause": (
        at_first(
            pod_that("Error"), make_pod(1), then=(pod_that("Error"), make_pod(1, deleted=True))
        ),
        Action.ADMIT,
        "Error",
        True,
    ),
    "a deletion and a failure that were seen together are a failure": (
        running(pod_that("Error"), make_pod(1, deleted=True)),
        Action.ADMIT,
        "Error",
        True,
    ),
    "a pod that died without a report while it was deleted was ended by that": (
        running(make_pod(0, state=terminated(137), deleted=True), make_pod(1)),
        Action.ADMIT,
        "Error",
        False,
    ),
    "a pod that said why it failed did so by itself, deleted or not": (
        running(pod_that("Error", deleted=True), make_pod(1)),
        Action.ADMIT,
        "Error",
        True,
    ),
    "a lost node explains its peer's error": (
        running(pod_that("Error"), make_pod(1, conditions=[{"type": "Ready", "status": "False"}])),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a pod whose kubelet says why it is not ready is not lost": (
        running(pod_that("Error"), make_pod(1, conditions=[UNREADY_SIDECAR])),
        Action.ADMIT,
        "Error",
        True,
    ),
    "a node that is away for a moment is no end": (
        running(make_pod(0), make_pod(1, conditions=[{"type": "Ready", "status": "False"}])),
        Action.WAIT,
        "",
        False,
    ),
    "a trainer told to end by its node does not count": (
        running(pod_that("Preempted", code=143), make_pod(1)),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a deleted Job gets a new attempt that does not count": (
        make_seen(make_job(status=active_status()), make_pod(0), make_pod(1)),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a Job that is being deleted is as good as deleted": (
        running(make_child(deleting=True), make_pod(0), make_pod(1)),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "another Job under the attempt's name is not this attempt": (
        running(make_child(uid="another"), make_pod(0)),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "pods without their Job mean that it was deleted, known uid or not": (
        make_seen(make_job(status=active_status(jobUid=None)), make_pod(0)),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "orphans mean that their Job was deleted, known uid or not": (
        make_seen(
            make_job(status=active_status(jobUid=None)),
            pod_that("DivergedKL", by=""),
            make_pod(1, by=""),
        ),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a Job that is being deleted was there, known uid or not": (
        make_seen(make_job(status=active_status(jobUid=None)), make_child(deleting=True)),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "engines without their gang mean that its Job was deleted, known uid or not": (
        make_seen(
            make_job(status=active_status(plan=SERVED_PLAN, jobUid=None)),
            make_engines(),
            make_engine(),
        ),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a pod that somebody made by hand does not mean that a Job was deleted": (
        make_seen(make_job(status=active_status(jobUid=None)), make_pod(0, by=None)),
        Action.START,
        "",
        False,
    ),
    "a Job that was seen and is gone was deleted, before its uid was written": (
        make_story(make_job(status=active_status(jobUid=None)), (2, [make_child()]), (0, [])),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "a failed Job without pods to ask gets a new attempt that does not count": (
        running(make_child(ended="Failed", reason="BackoffLimitExceeded")),
        Action.ADMIT,
        "Preempted",
        False,
    ),
    "pods of an earlier attempt say nothing about this one": (
        running(
            make_pod(0, 2),
            make_pod(1, 2),
            make_child(2),
            pod_that("BadInput", attempt=1),
            attempt=2,
        ),
        Action.WAIT,
        "",
        False,
    ),
    "children of an earlier GRPOJob of the same name are not its own": (
        make_seen(
            make_job(status=active_status(jobUid=None)),
            make_child(owner="old"),
            make_pod(0, state=terminated(0, SUCCESS), owner="old"),
        ),
        Action.START,
        "",
        False,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_answer_to(case: tuple[Observation, Action, str, bool]) -> None:
    seen, action, reason, counted = case
    decision = judged(seen)
    assert (decision.action, decision.reason, decision.counted) == (action, reason, counted)


@pytest.mark.parametrize(
    ("reason", "result", "disrupted"),
    [(None, "Error", False), ("Evicted", "Preempted", True)],
    ids=["own", "evicted"],
)
def test_an_init_container_that_fails_is_the_jobs_own_failure(
    reason: str | None, result: str, disrupted: bool
) -> None:
    broken = {"name": "fetch", "state": {"terminated": {"exitCode": 3}}}
    status: dict[str, Any] = {
        "phase": "Failed",
        "initContainerStatuses": [{"name": "ok", "state": {}}, broken],
    }
    status["containerStatuses"] = [
        {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    ]
    end = pod_termination(JsonObject(status | ({"reason": reason} if reason else {})))
    assert end is not None
    assert (end.outcome.result, end.disrupted) == (result, disrupted)
    assert ("init container fetch ended with exit code 3" in end.outcome.message) is not disrupted


def test_init_containers_that_a_node_has_lost_are_no_failure_of_the_job() -> None:
    lost = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
    status = {"phase": "Failed", "initContainerStatuses": [{"name": "fetch", "state": lost}]}
    end = pod_termination(JsonObject(status))
    assert end is not None
    assert (end.outcome.result, end.disrupted) == ("Preempted", True)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"exitCode": 3, "reason": "Error"}, "exit code 3; see its log"),
        ({"exitCode": 3, "reason": "Error", "message": "no bucket"}, "exit code 3: no bucket"),
        ({"exitCode": 128, "reason": "StartError", "message": 'exec: "gti"'}, ': exec: "gti"'),
        (
            {"exitCode": 137, "reason": "OOMKilled"},
            "(OOMKilled); raise its resources.limits.memory",
        ),
        ({"exitCode": 1, "message": "x" * 9000}, "x…"),
    ],
)
def test_an_init_container_that_fails_says_how(state: dict[str, Any], says: str) -> None:
    """One that did not start has no log."""
    broken = {"name": "fetch", "state": {"terminated": state}}
    end = pod_termination(JsonObject({"phase": "Failed", "initContainerStatuses": [broken]}))
    assert end is not None
    assert end.outcome.message.endswith(says)
