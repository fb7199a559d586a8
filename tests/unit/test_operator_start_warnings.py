"""Old events are not news: pod states × events × ages, against the sentence that a user reads."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.status.status import ConditionType
from grpo_operator.decide.observation import Observation
from grpo_operator.decide.start_checks import asks_about, current_warning, start_event
from grpo_operator.records.parsing import pod_record
from grpo_operator.report.status import build_status, to_json
from tests.generated import cases
from tests.unit.operator_world import (
    LIMITS,
    active_status,
    at,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    of_type,
    pod_object,
)

POD = "run-1-1-abcde"
BOUND = {"type": "PodScheduled", "status": "True"}
SANDBOX = {"type": "PodReadyToStartContainers", "status": "True"}
CREATING = {"waiting": {"reason": "ContainerCreating"}}
INITIALIZING = {"waiting": {"reason": "PodInitializing"}}
BACK_OFF = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
NO_SECRET = {"waiting": {"reason": "CreateContainerConfigError", "message": "no secret hub"}}
RUNS = {"running": {"startedAt": at(-3000)}}


def pod(state: Any, *conditions: Any, init: Any = None, sidecar: bool = False) -> dict[str, Any]:
    """The second pod of the gang, Pending on its node."""
    made = pod_object(1, state=state, phase="Pending", conditions=[BOUND, *conditions])
    if init:
        policy = {"restartPolicy": "Always"} if sidecar else {}
        made["spec"]["initContainers"] = [{"name": "fetch", **policy}]
        made["status"]["initContainerStatuses"] = [{"name": "fetch", "state": init}]
    return made


STATES: dict[str, dict[str, Any]] = {
    "the kubelet has not looked": pod({}),
    "volumes are mounted": pod(CREATING),
    "the image is pulled": pod(CREATING, SANDBOX),
    "the image is not there": pod(BACK_OFF, SANDBOX),
    "its secret is not there": pod(NO_SECRET, SANDBOX),
    "an init container's secret is not there": pod(INITIALIZING, SANDBOX, init=NO_SECRET),
    "an init container runs": pod(INITIALIZING, SANDBOX, init=RUNS),
    "an init container's image is not there": pod(INITIALIZING, SANDBOX, init=BACK_OFF),
    "a sidecar runs": pod(INITIALIZING, SANDBOX, init=RUNS, sidecar=True),
}
STAGES = {
    "volumes are mounted": "Mounting",
    "the image is pulled": "PullingImage",
    "the image is not there": "PullingImage",
    "an init container's image is not there": "PullingImage",
    "a sidecar runs": "PullingImage",
}
EVENTS = {
    "unbound": ("default-scheduler", "Warning", "FailedScheduling", "volume binding"),
    "no room": ("karpenter", "Warning", "FailedScheduling", "no instance type"),
    "no machine": ("cluster-autoscaler", "Warning", "FailedScaleUp", "quota of the cloud"),
    "audited": ("kyverno-scan", "Warning", "PolicyViolation", "it has no label team"),
    "node lost": ("node-controller", "Warning", "NodeNotReady", "Node is not ready"),
    "bound": ("default-scheduler", "Normal", "Scheduled", "assigned"),
    "mount": ("kubelet", "Warning", "FailedMount", 'configmap "prompts" not found'),
    "pulling": ("kubelet", "Normal", "Pulling", "pulling image"),
    "attach": ("attachdetach-controller", "Warning", "FailedAttachVolume", "Multi-Attach error"),
    "attached": ("attachdetach-controller", "Normal", "SuccessfulAttachVolume", "attached"),
}
FOLLOWED_BY = {"mount": "pulling", "attach": "attached"}
"""What its writer says when the trouble of a warning is over."""


def event_object(name: str, version: int) -> dict[str, Any]:
    """An event as the API server has it; its times are wrong, as of clocks that are off."""
    component, kind, reason, message = EVENTS[name]
    return {
        "metadata": {"resourceVersion": str(version)},
        "source": {"component": component},
        "type": kind,
        "reason": reason,
        "message": message,
        "lastTimestamp": at(-60 * version),
    }


def warning_of(names: Sequence[str]) -> str:
    """What counts of events that came in this order."""
    events = [start_event(event_object(name, 100 + place)) for place, name in enumerate(names)]
    return current_warning([event for event in events if event])


def expected_warning(names: Sequence[str]) -> str:
    """The same, said in another way: the last warning of a kubelet or of who attaches volumes that
    was not followed by the event that ends it."""
    for place in reversed(range(len(names))):
        over = FOLLOWED_BY.get(names[place])
        if over and over not in names[place:]:
            _, _, reason, message = EVENTS[names[place]]
            return f"{reason}: {message}"
    return ""


ORDERS = [
    order for size in range(4) for order in permutations(EVENTS, size) if len(set(order)) == size
]


def test_a_warning_counts_until_its_writer_says_something_else() -> None:
    for names in ORDERS:
        assert warning_of(names) == expected_warning(names), names


def starting(state: str, names: Sequence[str], ago: float) -> Observation:
    """A gang of which one pod runs and the other is in that state, so many seconds after its
    start."""
    status = active_status(running=False, attemptStartTime=at(-ago))
    running = {**condition("Running", "False", "Starting"), "message": "attempt 1 starts"}
    status["conditions"] = [
        condition("Admitted", reason="Admitted"),
        condition("Scheduled", since=-ago),
        running,
    ]
    seen = make_seen(
        make_job(status=status), make_child(), make_pod(0), pod_record(STATES[state]), ago=ago
    )
    return replace(seen, start_warning=warning_of(names) if asks_about(seen, LIMITS) else "")


def expected_trouble(state: str, names: Sequence[str], ago: float) -> str:
    """What Degraded has to say; empty for nothing."""
    if "is not there" in state:
        why = "ImagePullBackOff: no such image"
        if "secret" in state:
            why = "CreateContainerConfigError: no secret hub"
        subject = "init container fetch: " if "init" in state else ""
        return f"pod {POD} waits: {subject}{why}"
    warning = expected_warning(names)
    if state == "an init container runs" or ago < LIMITS.start_warning_seconds or not warning:
        return ""
    return f"pod {POD} waits on node node-1: {warning}"


@settings(max_examples=cases(300))
@given(
    st.sampled_from(sorted(STATES)),
    st.sampled_from(ORDERS),
    st.sampled_from([1.0, 59.0, 60.0, 240.0, 1700.0]),
)
def test_what_a_user_reads_of_a_pod_that_starts(
    state: str, names: tuple[str, ...], ago: float
) -> None:
    seen = starting(state, names, ago)
    status = build_status(seen, judged(seen))
    trouble = expected_trouble(state, names, ago)
    degraded = status.condition(ConditionType.DEGRADED)
    if trouble:
        assert of_type(status, "Degraded") == ("True", "PodWaiting", trouble)
    else:
        assert degraded is None or degraded.status == "False"
    running = of_type(status, "Running")[2]
    init = f"attempt 1 starts: init container fetch of pod {POD} has run since {at(-ago)}"
    assert running == (init if state == "an init container runs" else "attempt 1 starts")
    stage = status.progress.stage if status.progress else None
    assert stage == STAGES.get(state)


@settings(max_examples=cases(200))
@given(
    st.sampled_from(sorted(STATES)),
    st.sampled_from(sorted(STATES)),
    st.sampled_from(["PodWaiting", "NameTaken"]),
)
def test_a_trouble_that_is_over_is_taken_back(before: str, state: str, reason: str) -> None:
    seen = starting(before, ("mount",), 60.0)
    status = build_status(seen, judged(seen))
    known = to_json(status)
    for one in known["conditions"]:
        if one["type"] == "Degraded" and one["status"] == "True":
            one["reason"] = reason
    seen = starting(state, ("mount", "pulling"), 60.0)
    later = replace(seen, job=make_job(status=known))
    degraded = build_status(later, judged(later)).condition(ConditionType.DEGRADED)
    is_told = degraded is not None and degraded.status == "True"
    assert is_told == bool(expected_trouble(state, ("mount", "pulling"), 60.0))


def test_how_the_last_attempt_ended_is_told_until_the_gang_runs() -> None:
    seen = starting("the image is pulled", (), 60.0)
    known = to_json(build_status(seen, judged(seen)))
    known["conditions"].append({**condition("Degraded", reason="Error"), "message": "it crashed"})
    seen = replace(seen, job=make_job(status=known))
    assert of_type(build_status(seen, judged(seen)), "Degraded") == ("True", "Error", "it crashed")


def test_an_init_container_that_runs_for_too_long_is_named_with_its_duration() -> None:
    decision = judged(starting("an init container runs", (), 1801.0))
    assert decision.reason == "StartTimeout"
    assert decision.message == (
        "not all of 2 pods ran within 1800 s (spec.restarts.startTimeoutSeconds): init container "
        f"fetch of pod {POD} has run for 1801 s"
    )


@pytest.mark.parametrize("item", [1, [], {"metadata": {"resourceVersion": "x"}}, {"source": []}])
def test_an_event_that_can_not_be_read_is_none(item: Any) -> None:
    assert start_event(item) is None
