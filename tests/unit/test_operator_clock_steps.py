"""The operator's wall clock is stepped back or forth by up to ten minutes in any phase of a job."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.status.status import GRPOJobStatus
from grpo_kube.objects.times import Observed, seconds
from grpo_operator.decide.cleanup import clean_up
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.observation import Observation, observe
from grpo_operator.decide.preflight import BLOCKED_SECONDS
from grpo_operator.decide.restarts import pausing
from grpo_operator.loop.caches import Caches
from grpo_operator.loop.preflights import Preflights
from grpo_operator.report.status import to_json
from tests.generated import cases
from tests.unit.operator_world import (
    GPU_PLAN,
    LIMITS,
    NOW,
    active_status,
    after,
    at,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    said,
    terminated,
)
from tests.unit.test_operator_preflight import ON, SILENT, gpu_job, known_status

GPUS = {"placement": {"accelerator": "GPU", "nodes": 2}, "activeDeadlineSeconds": 3600}
RELEASED = {"attempt": 1, "reason": "SchedulingTimeout", "endTime": at(-10)}
UNBOUND: dict[str, Any] = {"node": "", "phase": "Pending", "state": {}}
PHASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "new": ({}, []),
    "unbound": (active_status(plan=GPU_PLAN, running=False), [make_pod(0), make_pod(1, **UNBOUND)]),
    "running": (active_status(plan=GPU_PLAN), [make_pod(0, arrived=-50), make_pod(1, arrived=-49)]),
    "crashed": (active_status(plan=GPU_PLAN), [make_pod(0, state=terminated(139)), make_pod(1)]),
    "succeeding": (
        active_status(plan=GPU_PLAN),
        [make_pod(0, state=terminated(0, said("Succeeded"))), make_pod(1)],
    ),
    "released": (
        {
            "attempt": 1,
            "conditions": [condition("Admitted", "False", "SchedulingTimeout", since=-10)],
            "ends": [RELEASED],
        },
        [],
    ),
    "ended": (
        {
            "attempt": 1,
            "completionTime": at(-10),
            "conditions": [condition("Succeeded", since=-10)],
        },
        [make_pod(0)],
    ),
}


def times_of(value: Any) -> list[float]:
    """All timestamps in a status."""
    if isinstance(value, dict):
        return [time for part in value.values() for time in times_of(part)]
    if isinstance(value, list):
        return [time for part in value for time in times_of(part)]
    is_time = isinstance(value, str) and value.startswith("2026-") and value.endswith("Z")
    return [seconds(value) or 0.0] if is_time else []


@settings(max_examples=cases(400))
@given(
    phase=st.sampled_from(sorted(PHASES)),
    suspend=st.booleans(),
    steps=st.lists(st.integers(-600, 600), min_size=1, max_size=4),
)
def test_no_step_of_the_clock_makes_a_negative_age_or_a_time_in_the_future(
    phase: str, suspend: bool, steps: list[int]
) -> None:
    status, pods = PHASES[phase]
    job = make_job({**GPUS, "suspend": suspend, "ttlSecondsAfterFinished": 100}, status)
    for step in steps:
        children = [make_child(job.status.attempt)] if pods else []
        pull = make_pull(step=3, stage="Training") if phase == "running" else None
        now = NOW + step
        seen = make_seen(job, *children, *pods, now=now, pull=pull)
        decision = judged(seen)
        assert decision.requeue_after is None or decision.requeue_after >= 0
        if decision.action is Action.DELETE:
            return
        if decision.action is Action.ADMIT:
            decision = replace(decision, action=Action.COMMIT, plan=GPU_PLAN)
        written = to_json(after(seen, decision))
        GRPOJobStatus.model_validate(written)
        history = {"ends": None, "usage": None, "progress": None}
        assert max(times_of({**written, **history}), default=now) <= now
        job = make_job({**GPUS, "suspend": suspend, "ttlSecondsAfterFinished": 100}, written)


@settings(max_examples=cases(100))
@given(step=st.integers(-600, 600), passed=st.integers(0, 299), unbound=st.booleans())
def test_a_step_of_the_clock_fires_no_deadline_and_loses_no_active_second(
    step: int, passed: int, unbound: bool
) -> None:
    tracker = FirstSeenTracker()
    begin = active_status(running=not unbound, attemptStartTime=at(0), activeSeconds=7)
    job = make_job({"activeDeadlineSeconds": 600}, begin)
    pods = [make_pod(0), make_pod(1, **UNBOUND) if unbound else make_pod(1)]

    def look(now: float, passed: float) -> Observation:
        moment = Observed(passed)
        return observe(job, [make_child()], pods, now=now, at=moment, first_seen_tracker=tracker)

    look(NOW, 0)
    stepped = look(NOW + passed + step, passed)
    assert judged(stepped).action is Action.WAIT
    ended = after(stepped, Decision(Action.SUSPEND, "Suspended"))
    assert ended.active_seconds == 7 + passed


PULLING = make_pod(1, phase="Pending", state={"waiting": {"reason": "ContainerCreating"}})
SCHEDULED = [condition("Admitted"), condition("Scheduled", since=0)]


def looked_twice(
    status: dict[str, Any],
    pods: list[Any],
    first: float,
    passed: float,
    step: float,
    *,
    spec: dict[str, Any] | None = None,
) -> Observation:
    """The second look, that many seconds after a first one at `first`; the clock was set between
    them."""
    job, tracker = make_job(spec, status), FirstSeenTracker()
    for now, at_second in ((first, 0.0), (first + passed + step, passed)):
        seen = observe(
            job, [make_child()], pods, now=now, at=Observed(at_second), first_seen_tracker=tracker
        )
    return seen


@settings(max_examples=cases(100))
@given(step=st.integers(-86400, 86400), passed=st.integers(0, 3600), begun=st.integers(-600, 600))
def test_a_step_of_the_clock_changes_no_time_since_a_condition(
    step: int, passed: int, begun: int
) -> None:
    """The operator saw it first `begun` seconds later: a time in the future counts from there."""
    age = max(0, begun) + passed
    status = active_status(conditions=[condition("Admitted"), condition("Running", since=0)])
    running = looked_twice(status, [make_pod(0), make_pod(1)], NOW + begun, passed, step)
    assert running.running_seconds == age
    status = active_status(conditions=SCHEDULED)
    starting = looked_twice(status, [make_pod(0), PULLING], NOW + begun, passed, step)
    is_late = age >= starting.job.start_timeout
    assert judged(starting).action is (Action.RELEASE if is_late else Action.WAIT)


@settings(max_examples=cases(40))
@given(step=st.integers(-86400, 86400), passed=st.integers(0, 60))
def test_a_step_of_the_clock_changes_no_grace_of_survivors(step: int, passed: int) -> None:
    status, pods = PHASES["ended"]
    seen = looked_twice({**status, "jobUid": "job-1"}, pods, NOW, passed, step)
    left = LIMITS.survivor_grace_seconds - 10 - passed
    assert clean_up(seen, LIMITS).stop_attempts == (() if left > 0 else (1,))
    assert judged(seen).requeue_after == (left if left > 0 else None)


@settings(max_examples=cases(40))
@given(step=st.integers(-86400, 86400), passed=st.integers(0, 200), with_pods=st.booleans())
def test_a_step_of_the_clock_changes_no_time_to_live(
    step: int, passed: int, with_pods: bool
) -> None:
    """The job ended ten seconds before the first look."""
    status, pods = PHASES["ended"]
    life = {"ttlSecondsAfterFinished": 100}
    seen = looked_twice(status, pods * with_pods, NOW, passed, step, spec=life)
    is_over = 10 + passed >= 100
    assert (judged(seen).action is Action.DELETE) == is_over


@settings(max_examples=cases(40))
@given(step=st.integers(-86400, 86400), passed=st.integers(0, 400))
def test_a_step_of_the_clock_starts_no_job_unchecked_before_its_time(
    step: int, passed: int
) -> None:
    """Its preflight could not run for a minute at the first look."""
    caches, unused = Caches(), Any
    preflights = Preflights(unused, caches, unused, ON)  # type: ignore[arg-type]
    known = {"cause": "no room", "blockedSince": at(-60)}
    job = gpu_job(known_status(gpu_job(), known))
    preflights.look(job, NOW, Observed(0))
    found = preflights.look(job, NOW + passed + step, Observed(passed))
    assert found
    assert found.check.status.given_up is (60 + passed >= BLOCKED_SECONDS)


@settings(max_examples=cases(40))
@given(step=st.integers(-86400, 86400), passed=st.integers(0, 100))
def test_a_step_of_the_clock_changes_no_pause_between_preflights(step: int, passed: int) -> None:
    """The second one ended twenty seconds before the first look, without an answer of the hub."""
    caches, unused = Caches(), Any
    preflights = Preflights(unused, caches, unused, ON)  # type: ignore[arg-type]
    known = {"tries": 2, "time": at(-20), "report": {"problems": [SILENT]}}
    job = gpu_job(known_status(gpu_job(), known))
    preflights.look(job, NOW, Observed(0))
    found = preflights.look(job, NOW + passed + step, Observed(passed))
    assert found
    assert found.check.should_start is (20 + passed >= 60)


@settings(max_examples=cases(40))
@given(step=st.integers(-86400, 86400), passed=st.integers(0, 60))
def test_a_step_of_the_clock_changes_no_pause_after_a_release(step: int, passed: int) -> None:
    """The gang was released ten seconds before the first look."""
    status, _ = PHASES["released"]
    job, tracker, now = make_job(GPUS, status), FirstSeenTracker(), NOW + passed + step
    for wall, at_second in ((NOW, 0), (now, passed)):
        seen = observe(job, [], [], now=wall, at=Observed(at_second), first_seen_tracker=tracker)
    decision = judged(seen)
    left = LIMITS.release_pause_seconds - 10 - passed
    assert decision.action is (Action.WAIT if left > 0 else Action.ADMIT)
    released_for = tracker.times(job.key).released_for(job, now, seen.at)
    assert (decision.requeue_after or 0.0) == pausing(job, released_for, LIMITS) == max(0.0, left)
