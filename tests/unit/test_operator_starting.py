"""Attempts that don't get going: pods that are not created, gangs that don't start, and what is
told of them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.status.status import MAX_ENDS
from grpo_operator.decide.decisions import Action, Decision, Limits
from grpo_operator.decide.next_action import decide
from grpo_operator.decide.observation import Observation
from grpo_operator.decide.start_checks import asks_about
from grpo_operator.report.conditions import conditions
from grpo_operator.report.status import build_status, to_json
from tests.generated import cases
from tests.unit.kueue_world import admitted, make_workload
from tests.unit.operator_world import (
    LIMITS,
    NOW,
    SERVED_PLAN,
    active_status,
    at,
    condition,
    judged,
    make_child,
    make_engines,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    of_type,
    running,
    said,
    terminated,
)

REFUSED = 'FailedCreate: Error creating: pods "run-1-0-" is forbidden: exceeded quota: gpus'
MOUNT = 'FailedMount: configmap "prompts" not found'


def starting(
    *things: Any, ago: float, words: str = "", spec: Any = None, **status: Any
) -> Observation:
    """An attempt whose Job was first seen so many seconds ago, and which has not run yet."""
    full = active_status(running=False, attemptStartTime=at(-ago)) | status
    seen = make_seen(make_job(spec, full), make_child(), *things, ago=ago)
    return replace(seen, start_warning=words)


def creating(index: int) -> Any:
    return make_pod(index, state={"waiting": {"reason": "ContainerCreating"}}, phase="Pending")


def test_a_job_whose_pods_are_refused_gives_its_place_back_in_the_words_of_the_refusal() -> None:
    seen = starting(make_pod(0), ago=6, words=REFUSED)
    decision = judged(seen)
    assert (decision.action, decision.reason) == (Action.RELEASE, "PodsNotCreated")
    assert decision.message == f"1 of 2 pods were created: {REFUSED}"
    status = build_status(seen, decision)
    assert (status.phase, status.ends[-1].reason) == ("Queued", "PodsNotCreated")


def test_without_words_pods_may_just_be_late() -> None:
    for ago, requeue_after in ((1, 4), (6, 6), (100, 100)):
        decision = judged(starting(ago=ago))
        assert decision.action is Action.WAIT
        assert decision.requeue_after == pytest.approx(requeue_after)
    assert judged(starting(ago=301)).reason == "SchedulingTimeout"


@pytest.mark.parametrize(
    ("named", "scheduler"), [("volcano", "volcano"), (None, "default-scheduler")]
)
def test_a_gang_that_no_scheduler_reports_on_names_it(named: str | None, scheduler: str) -> None:
    spec = {"podTemplate": {"spec": {"schedulerName": named}}} if named else {}
    pods = [make_pod(index, state={}, phase="Pending", node="") for index in range(2)]
    decision = judged(starting(*pods, ago=301, spec=spec))
    assert decision.message == (
        f"0 of 2 pods were bound within 300 s: scheduler {scheduler} has not reported on pod "
        "run-1-0-abcde: check that it runs"
    )


def test_what_the_attempt_before_still_takes_of_a_quota_is_no_refusal() -> None:
    status = active_status(2, running=False, attemptStartTime=at(-6))
    old = make_pod(0, 1, deleted=True)
    seen = replace(
        make_seen(make_job(status=status), make_child(2), old, ago=6), start_warning=REFUSED
    )
    assert judged(seen).action is Action.WAIT


@pytest.mark.parametrize("queued", [False, True])
def test_a_refusal_is_told_although_a_lost_node_keeps_a_pod_of_the_attempt_before(
    queued: bool,
) -> None:
    ago = LIMITS.scheduling_timeout_seconds
    status = active_status(2, running=False, attemptStartTime=at(-ago))
    meta = {"labels": {"kueue.x-k8s.io/queue-name": "team"}} if queued else {}
    job = make_job({}, status, **meta)
    lost = make_pod(0, 1, deleted=True)
    seen = make_seen(job, make_child(2), lost, ago=ago)
    workload = make_workload(admitted())
    decision = judged(replace(seen, start_warning=REFUSED, workload=workload))
    assert (decision.action, decision.reason) == (Action.RELEASE, "PodsNotCreated")
    assert REFUSED in decision.message


@pytest.mark.parametrize("name", ["run-1", "run-1-engine"])
def test_a_job_that_somebody_else_suspends_gives_its_place_back(name: str) -> None:
    """Kueue does so where it manages Jobs without a queue name."""
    status = active_status(running=False, plan=SERVED_PLAN, attemptStartTime=at(-6))
    gang = make_child(suspended=name == "run-1")
    engines = make_engines(suspended=name == "run-1-engine")
    pods = (make_pod(0), make_pod(1)) if engines.suspended else ()
    seen = make_seen(make_job(status=status), gang, engines, *pods, ago=6)
    decision = judged(seen)
    assert (decision.action, decision.reason) == (Action.RELEASE, "PodsNotCreated")
    assert f"Job {name} is suspended" in decision.message
    early = make_seen(make_job(status=status), gang, engines, *pods, ago=4)
    assert judged(early).requeue_after == pytest.approx(1)


@pytest.mark.parametrize(
    ("things", "ago", "about"),
    [
        ((), 4, ""),
        ((), 5, "job-1"),
        ((creating(0), creating(1)), 59, ""),
        ((make_pod(0), creating(1)), 60, "pod-1-1"),
        ((make_pod(0), make_pod(1)), 60, ""),
    ],
)
def test_whom_events_are_asked_about_and_when(
    things: tuple[Any, ...], ago: float, about: str
) -> None:
    assert asks_about(starting(*things, ago=ago), LIMITS) == about


def test_the_kubelets_words_are_on_the_job_and_the_phase_stays_starting() -> None:
    seen = starting(make_pod(0), creating(1), ago=60, words=MOUNT)
    decision = judged(seen)
    status = build_status(seen, decision)
    assert of_type(status, "Degraded") == (
        "True",
        "PodWaiting",
        f"pod run-1-1-abcde waits on node node-1: {MOUNT}",
    )
    assert status.phase == "Starting"


def bound_for(seconds: float, **more: Any) -> dict[str, Any]:
    admitted = [condition("Admitted", reason="Admitted"), condition("Scheduled", since=-seconds)]
    return {"conditions": [*admitted, condition("Running", "False", "Starting")], **more}


def test_a_gang_that_does_not_start_in_time_is_released_and_in_the_end_fails() -> None:
    spec = {"restarts": {"startTimeoutSeconds": 100, "limit": 1}}
    pods = (make_pod(0), creating(1))
    assert judged(
        starting(*pods, ago=99, spec=spec, **bound_for(99))
    ).requeue_after == pytest.approx(1.0)
    late = starting(*pods, ago=100, words=MOUNT, spec=spec, **bound_for(100))
    decision = judged(late)
    assert (decision.action, decision.reason) == (Action.RELEASE, "StartTimeout")
    assert "spec.restarts.startTimeoutSeconds" in decision.message
    assert MOUNT in decision.message
    ends = [{"attempt": 1, "reason": "StartTimeout", "endTime": at(-200)}]
    again = judged(starting(*pods, ago=100, words=MOUNT, spec=spec, **bound_for(100, ends=ends)))
    assert (again.action, again.reason) == (Action.FAIL, "StartTimeout")


@pytest.mark.parametrize("limit", [0, 9, 11, 1000])
def test_a_gang_that_never_starts_fails_whatever_the_limit(limit: int) -> None:
    """The status keeps the last ends only."""
    spec = {"restarts": {"startTimeoutSeconds": 100, "limit": limit}}
    ends: list[Any] = []
    for _ in range(MAX_ENDS + 1):
        seen = starting(make_pod(0), creating(1), ago=100, spec=spec, **bound_for(100, ends=ends))
        decision = judged(seen)
        if decision.action is Action.FAIL:
            break
        ends = to_json(build_status(seen, decision))["ends"]
    assert decision.action is Action.FAIL
    assert len(ends) == min(limit, MAX_ENDS)


def test_a_gang_that_runs_has_started_whatever_its_pods_do_then() -> None:
    status = active_status(attemptStartTime=at(-9000))
    seen = make_seen(make_job(status=status), make_child(), make_pod(0), creating(1), ago=9000)
    assert judged(seen).action is Action.WAIT


STATES: st.SearchStrategy[dict[str, Any]] = st.sampled_from([
    {"running": {}},
    {"waiting": {"reason": "ImagePullBackOff"}},
    terminated(1, said("Error"), clock=600),
    terminated(0, said("Succeeded"), clock=-600),
    terminated(137, reason="OOMKilled"),
    {},
])  # fmt: skip


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    """Any mixture of pods, spec, times and counters of an attempt that was admitted."""
    pods = [
        make_pod(
            index,
            state=draw(STATES),
            node=draw(st.sampled_from(["", "n"])),
            deleted=draw(st.booleans()),
        )
        for index in range(draw(st.integers(0, 2)))
    ]
    offset = st.integers(-10_000, 10_000)
    spec = {
        "activeDeadlineSeconds": draw(st.none() | st.integers(1, 9000)),
        "ttlSecondsAfterFinished": draw(st.none() | st.integers(0, 9000)),
        "placement": {
            "accelerator": "CPU",
            "nodes": 2,
            "queueName": draw(st.none() | st.just("team")),
        },
        "suspend": draw(st.booleans()),
    }
    status = active_status(
        running=draw(st.booleans()),
        attemptStartTime=draw(st.none() | offset.map(at)),
        completionTime=draw(st.none() | offset.map(at)),
        ends=[
            {
                "attempt": 1,
                "reason": draw(st.sampled_from(["Error", "StartTimeout"])),
                "endTime": at(draw(offset)),
            }
        ],
    )
    extra = draw(st.sampled_from(["Succeeded", "Failed", "Scheduled", "Readable"]))
    status["conditions"].append(condition(extra, since=draw(offset)))
    child = () if draw(st.booleans()) else (make_child(),)
    ago = draw(st.floats(0, 10_000))
    pull = draw(st.none() | st.just(make_pull(still=draw(st.floats(0, 9000)))))
    seen = make_seen(
        make_job(spec, status), *child, *pods, pull=pull, ago=ago, now=NOW + draw(offset)
    )
    return replace(seen, start_warning=draw(st.sampled_from(["", MOUNT])))


@settings(max_examples=cases(500))
@given(observations())
def test_no_deadline_that_is_over_is_waited_for_again(seen: Observation) -> None:
    decision = decide(seen, Limits())
    assert decision.requeue_after is None or decision.requeue_after > 0
    build_status(seen, decision)


def test_the_least_of_all_deadlines_is_waited_for() -> None:
    seen = starting(
        creating(0), creating(1), ago=61, words=MOUNT, spec={"activeDeadlineSeconds": 70}
    )
    decision = judged(seen)
    assert decision.reason == "PodWaiting"
    assert decision.requeue_after == pytest.approx(9)


def test_a_gang_of_kueue_waits_for_its_nodes_without_a_timer() -> None:
    pods = [make_pod(index, state={}, phase="Pending", node="") for index in range(2)]
    seen = starting(*pods, ago=9000, spec={"placement": {"queueName": "team"}})
    decision = judged(replace(seen, workload=make_workload(admitted())))
    assert (decision.action, decision.requeue_after) == (Action.WAIT, None)


def uncreated(ago: float, reason: str) -> Decision:
    """What becomes of an attempt that was admitted so long ago and has no Job, for what its
    condition says."""
    scheduled = {**condition("Scheduled", "False", reason), "message": "Job run-1 exists"}
    conditions = [condition("Admitted", reason="Admitted"), scheduled]
    return judged(
        make_seen(
            make_job(
                status=active_status(attemptStartTime=at(-ago), jobUid="", conditions=conditions)
            )
        )
    )


@pytest.mark.parametrize("reason", ["NameTaken", "PodsPending", "FailedCreate"])
def test_what_keeps_an_attempt_from_being_created_is_waited_for_no_longer_than_nodes(
    reason: str,
) -> None:
    waits, gives_back = (
        uncreated(LIMITS.scheduling_timeout_seconds - 1, reason),
        uncreated(LIMITS.scheduling_timeout_seconds + 1, reason),
    )
    assert waits.action is Action.START
    if (
        reason == "FailedCreate"
    ):  # it holds nothing that others wait for, and may be created at any time
        assert gives_back.action is Action.START
        return
    assert (gives_back.action, gives_back.reason) == (Action.RELEASE, "SchedulingTimeout")
    why = "Job run-1 exists" if reason == "NameTaken" else "its Job could not be created"
    assert gives_back.message == f"not started in 300 s: {why}"


def test_no_decision_states_a_condition_twice() -> None:
    """Stated twice, its transition time would move with every look."""
    seen = running(make_child(), make_pod(0), make_pod(1))
    for reason in ("NameTaken", "PodWaiting", "ProgressUnknown", "RestartBackoff", ""):
        kinds = [one.type for one in conditions(seen, Decision(Action.WAIT, reason, "why"))]
        assert len(kinds) == len(set(kinds)), reason
