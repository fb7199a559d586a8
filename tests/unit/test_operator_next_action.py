"""What the operator decides about limits, deadlines, suspension, queues and finished jobs.

How it answers the ends of pods is in test_operator_terminations.py.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.plan.plan import ExecutionPlan
from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import Action, Decision, Limits
from grpo_operator.decide.first_seen import release_age
from grpo_operator.decide.observation import Silence
from grpo_operator.decide.restarts import pausing
from tests.unit.operator_world import (
    LIMITS,
    NOW,
    PLAN,
    SERVED_PLAN,
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
    of_type,
    running,
    said,
    terminated,
)

SUCCESS = said("Succeeded", step=12, message="done")


def pod_that(result: str, index: int = 0, code: int = 1, **more: Any) -> Any:
    return make_pod(index, state=terminated(code, said(result, rank=index)), **more)


def released(reason: str, times: int) -> dict[str, Any]:
    """The status of a job whose gangs were released so many times in a row, the last ten seconds
    ago."""
    ends = [
        {"attempt": 1 + number, "reason": reason, "endTime": at(-10)} for number in range(times)
    ]
    conditions = [condition("Admitted", "False", reason, since=-10)]
    return {"attempt": times, "conditions": conditions, "ends": ends}


def test_the_restart_limit_fails_the_job_with_the_last_end() -> None:
    seen = running(pod_that("OutOfMemory"), make_pod(1), attempt=4, restarts=3)
    seen = make_seen(
        make_job(status=active_status(attempt=4, restarts=3)),
        make_child(4),
        make_pod(0, 4, terminated(40, said("OutOfMemory", message="CUDA out of memory"))),
        make_pod(1, 4),
    )
    decision = judged(seen)
    assert (decision.action, decision.reason) == (Action.FAIL, "RestartLimit")
    assert decision.message.startswith(
        "OutOfMemory after 3 of 3 restarts: CUDA out of memory. The job ran out of"
    )


def test_disruptions_restart_beyond_the_limit() -> None:
    seen = make_seen(
        make_job(status=active_status(attempt=9, restarts=3)),
        make_child(9),
        make_pod(0, 9, deleted=True),
        make_pod(1, 9),
    )
    assert judged(seen).action is Action.ADMIT


def test_the_deadline_counts_earlier_attempts_and_not_the_time_between() -> None:
    spec = {"activeDeadlineSeconds": 100}
    status = active_status(activeSeconds=30)
    early = make_seen(make_job(spec, status), make_child(), make_pod(0), make_pod(1))
    assert judged(early).requeue_after == pytest.approx(10.0)
    late = make_seen(
        make_job(spec, active_status(activeSeconds=41)), make_child(), make_pod(0), make_pod(1)
    )
    decision = judged(late)
    assert (decision.action, decision.reason) == (Action.FAIL, "DeadlineExceeded")
    assert decision.message == "ran for 101 s; spec.activeDeadlineSeconds allows 100 s"


def test_success_at_the_deadline_is_success() -> None:
    job = make_job({"activeDeadlineSeconds": 1}, active_status())
    assert (
        judged(make_seen(job, make_child(), make_pod(0, state=terminated(0, SUCCESS)))).action
        is Action.SUCCEED
    )


def test_a_suspended_job_is_suspended_whether_it_runs_or_waits() -> None:
    for status in ({}, active_status()):
        decision = judged(make_seen(make_job({"suspend": True}, status), make_child(), make_pod(0)))
        assert (decision.action, decision.reason) == (Action.SUSPEND, "Suspended")


def test_an_invalid_spec_is_refused_with_every_problem() -> None:
    job = make_job({"rewards": [], "training": {"beta": -1}})
    decision = judged(make_seen(job))
    assert (decision.action, decision.reason) == (Action.REJECT, "InvalidSpec")
    assert "spec.rewards" in decision.message
    assert "spec.training.beta" in decision.message


def test_a_spec_that_became_invalid_leaves_a_running_attempt_alone() -> None:
    job = make_job({"rewards": []}, active_status())
    assert judged(make_seen(job, make_child(), make_pod(0), make_pod(1))).action is Action.WAIT


@pytest.mark.parametrize(
    "end", [terminated(1), terminated(41, said("BadInput", attempt=1)), terminated(137)]
)
def test_how_an_attempt_of_an_unreadable_spec_goes_on_is_left_to_who_can_read_it(
    end: dict[str, Any],
) -> None:
    """Between the new definition's coming and the new operator's, the old one sees fields that it
    doesn't know."""
    job = make_job({"later": {"engine": "Newer"}}, active_status(restarts=2))
    seen = make_seen(job, make_child(), make_pod(0, state=end), make_pod(1), now=NOW + 3600)
    decision = judged(seen)
    assert (decision.action, decision.reason) == (Action.WAIT, "InvalidSpec")
    assert "spec.later: unknown field" in decision.message
    status = after(seen, decision)
    assert (status.attempt, status.restarts, of_type(status, "Degraded")[:2]) == (
        1,
        2,
        ("True", "InvalidSpec"),
    )
    done = make_seen(job, make_child(), make_pod(0, state=terminated(0, SUCCESS)), make_pod(1))
    assert judged(done).action is Action.SUCCEED


@pytest.mark.parametrize(
    ("workload", "bound", "age", "action"),
    [
        ("", False, 899, Action.WAIT),
        ("", False, 901, Action.RELEASE),
        ("", True, 9000, Action.WAIT),
        ("of-kueue", False, 9000, Action.WAIT),
    ],
)
@pytest.mark.parametrize("plan", [PLAN, SERVED_PLAN], ids=["gang", "gang and engines"])
def test_a_gang_whose_spec_became_unreadable_before_it_was_bound_has_a_deadline(
    workload: str, bound: bool, age: int, action: Action, plan: ExecutionPlan
) -> None:
    """The default of placement.provisioningTimeoutSeconds: nobody knows the spec's own."""
    status = active_status(plan=plan, running=bound, attemptStartTime=at(-age))
    pods = [make_pod(0), make_pod(1, node="node-1" if bound else "", phase="Pending", state={})]
    job = make_job({"later": {"engine": "Newer"}}, status)
    decision = judged(make_seen(job, make_child(workload=workload), *pods))
    assert decision.action is action
    if age < 900:
        assert decision.requeue_after == pytest.approx(900 - age)


@pytest.mark.parametrize("workload", ["", "of-kueue"])
@pytest.mark.parametrize(("age", "action"), [(1799, Action.WAIT), (1801, Action.RELEASE)])
def test_a_gang_whose_spec_became_unreadable_before_it_ran_has_the_default_deadline(
    workload: str, age: int, action: Action
) -> None:
    """It is released and does not fail: how often it may start again stands in the spec."""
    conditions = [condition("Admitted"), condition("Scheduled", since=-age)]
    status = active_status(conditions=conditions, attemptStartTime=at(-9000))
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    pods = [make_pod(0), make_pod(1, phase="Pending", state=waiting)]
    job = make_job({"later": {"engine": "Newer"}}, status)
    decision = judged(make_seen(job, make_child(workload=workload), *pods))
    assert (decision.action, "ImagePullBackOff" in decision.message) == (action, True)
    assert (decision.requeue_after is not None) == (action is Action.WAIT)


def test_a_gang_that_is_not_bound_in_time_is_released() -> None:
    status = active_status(running=False, attemptStartTime=at(-301))
    unbound = [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]
    pods = (make_pod(0), make_pod(1, state={}, phase="Pending", node="", conditions=unbound))
    decision = judged(make_seen(make_job(status=status), make_child(), *pods, ago=301))
    assert (decision.action, decision.reason) == (Action.RELEASE, "SchedulingTimeout")
    assert decision.message == "1 of 2 pods were bound within 300 s: 0/2 nodes are available"


def test_a_released_gang_pauses_before_it_asks_again() -> None:
    status = released("SchedulingTimeout", times=1)
    decision = judged(make_seen(make_job(status=status)))
    assert decision.action is Action.WAIT
    assert decision.requeue_after == pytest.approx(20.0)
    later = make_seen(make_job(status=status), now=NOW + 21)
    assert judged(later).action is Action.ADMIT


@pytest.mark.parametrize(("times", "pause"), [(1, 30), (2, 60), (3, 120), (6, 600), (10, 600)])
def test_the_pause_grows_with_every_release_in_a_row(times: int, pause: float) -> None:
    job = make_job(status=released("PodsNotCreated", times))
    assert pausing(job, release_age(job, NOW), LIMITS) == pytest.approx(pause - 10)


@given(back=st.floats(0, 1e9))
def test_a_clock_that_was_set_back_makes_no_pause_longer(back: float) -> None:
    job = make_job(status=released("PodsNotCreated", 2))
    assert pausing(job, release_age(job, NOW - 10 - back), LIMITS) <= 60


def test_a_job_that_was_suspended_after_its_release_does_not_pause() -> None:
    status = released("StartTimeout", times=3) | {
        "conditions": [condition("Admitted", "False", "Suspended")]
    }
    assert judged(make_seen(make_job(status=status))).action is Action.ADMIT


@pytest.mark.parametrize(
    ("pull", "action"),
    [
        (make_pull(still=4000, stage="Training"), Action.ADMIT),
        (make_pull(still=3000, stage="Training"), Action.WAIT),
        (make_pull(still=4000, stage="Starting"), Action.WAIT),
        (make_pull(still=4000, stage="Training", attempt=7), Action.WAIT),
        (None, Action.WAIT),
    ],
    ids=[
        "no step for twice the trainer's own limit and the grace is a hang",
        "up to there the trainer's own watchdog comes first",
        "the wait for late peers has an end of its own",
        "another attempt's answer proves nothing",
        "no answer proves nothing",
    ],
)
def test_the_second_line_against_hangs(pull: Any, action: Action) -> None:
    seen = make_seen(
        make_job(status=active_status()), make_child(), make_pod(0), make_pod(1), pull=pull
    )
    decision = judged(seen)
    assert decision.action is action
    assert decision.counted is (action is Action.ADMIT)


def test_a_limit_that_passed_since_the_last_answer_sets_no_timer() -> None:
    """The next answer wakes the job, or says that it hangs."""
    pull = make_pull(ago=1000, still=4000, stage="Training")
    decision = judged(
        make_seen(
            make_job(status=active_status()), make_child(), make_pod(0), make_pod(1), pull=pull
        )
    )
    assert (decision.action, decision.requeue_after) == (Action.WAIT, None)


def test_a_rank_0_whose_answers_have_stopped_does_not_hang_and_is_told_after_minutes() -> None:
    def told(since: float) -> Decision:
        silence = Silence(Observed(NOW - since), "TimeoutError()")
        things = (make_child(), make_pod(0), make_pod(1))
        pull = make_pull(ago=since, still=9000)
        return judged(
            make_seen(make_job(status=active_status()), *things, pull=pull, silence=silence)
        )

    assert told(30).requeue_after == pytest.approx(90.0)
    decision = told(121)
    assert (decision.action, decision.reason, decision.requeue_after) == (
        Action.WAIT,
        "ProgressUnknown",
        None,
    )
    assert "TimeoutError()" in decision.message


def active_but_done() -> dict[str, Any]:
    """Of a job that succeeded ten seconds ago."""
    return {"jobUid": "job-1", "conditions": [condition("Succeeded", since=-10)]}


def test_a_finished_job_stays_until_its_time_to_live_is_over() -> None:
    done = {"attempt": 1, "completionTime": at(-100), "conditions": [condition("Succeeded")]}
    assert judged(make_seen(make_job(status=done))).action is Action.WAIT
    kept = make_seen(make_job({"ttlSecondsAfterFinished": 130}, done))
    assert judged(kept).requeue_after == pytest.approx(30.0)
    survivor = make_seen(
        make_job({"ttlSecondsAfterFinished": 130}, done | active_but_done()), make_pod(1)
    )
    assert judged(survivor).requeue_after == pytest.approx(20.0)
    assert (
        judged(make_seen(make_job({"ttlSecondsAfterFinished": 99}, done))).action is Action.DELETE
    )


def test_limits_are_settings() -> None:
    seen = running(pod_that("Error"), make_pod(1), ago=3)
    assert judged(seen, LIMITS).action is Action.ADMIT
    assert judged(seen, Limits(settle_seconds=5)).action is Action.WAIT


def test_a_job_that_has_ended_waits_for_pods_that_are_seen_late() -> None:
    """As after an outage, when the watch of Jobs is back before that of pods."""
    ended, job = (
        make_child(ended="Failed", reason="BackoffLimitExceeded"),
        make_job(status=active_status()),
    )
    late = make_seen(job, ended, make_pod(0), make_pod(1), ago=20)
    assert (judged(late).action, judged(late).requeue_after) == (Action.WAIT, 40.0)
    told = make_seen(job, ended, pod_that("OutOfMemory", code=40), make_pod(1), ago=20)
    assert (judged(told).action, judged(told).reason, judged(told).counted) == (
        Action.ADMIT,
        "OutOfMemory",
        True,
    )
    assert judged(make_seen(job, ended, ago=0)).action is Action.ADMIT
    assert judged(make_seen(job, ended, make_pod(0), make_pod(1), ago=61)).reason == "Preempted"
