"""A job that Kueue admits: what the state of its Workload means for it, and what is written to the
Workload then."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_operator.decide.cleanup import clean_up
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.kueue.pod_sets import planned_for
from grpo_operator.kueue.workload_steps import Write, gate_by_workload, next_step
from grpo_operator.records.records import JobRecord
from grpo_operator.report.status import to_json
from tests.generated import cases
from tests.unit.kueue_world import (
    ASSIGNED,
    QUEUED,
    admitted,
    evicted,
    make_queued,
    make_workload,
    workload_condition,
)
from tests.unit.operator_world import (
    LIMITS,
    PLAN,
    PODS,
    SERVED_PLAN,
    TRAINERS,
    active_status,
    after,
    at,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    terminated,
)

QUEUES = Decision(Action.QUEUE, "WaitingForKueue", plan=PLAN)
DONE = {"attempt": 1, "conditions": [condition("Succeeded")]}
OTHER_PLAN = PLAN.model_copy(update={"nodes": 3})


def written(seen: Observation, decision: Decision | None = None) -> Write | None:
    """The write that is due."""
    due = next_step(seen, decision or judged(seen), PODS)
    return due.write if due else None


def running(workload: dict[str, Any] | None, *more: Any, **spec: Any) -> Observation:
    found = None if workload is None else make_workload(workload)
    return make_queued(found, *TRAINERS, *more, status=active_status(), **spec)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (evicted(), "Evicted: Preempted: somebody else needs it"),
        (admitted(workload_condition("Finished")), "Finished: Because"),
        (admitted(workload_condition("Admitted", False)), "Admitted condition is not True"),
        (admitted(workload_condition("Admitted", "Unknown")), "Admitted condition is not True"),
        ({}, "Admitted condition is not True"),
        (None, "is gone"),
    ],
)
def test_a_gang_ends_with_its_admission_and_no_restart_is_counted(
    status: dict[str, Any] | None, words: str
) -> None:
    decision = judged(running(status))
    assert (decision.action, decision.reason, decision.counted) == (
        Action.RELEASE,
        "Evicted",
        False,
    )
    assert words in decision.message


@pytest.mark.parametrize(
    "status",
    [
        admitted(),
        admitted(workload_condition("Evicted", False)),
        admitted(workload_condition("Preempted")),
    ],
)
def test_a_gang_runs_on_while_it_is_admitted(status: dict[str, Any]) -> None:
    assert judged(running(status)).action is Action.WAIT


def test_a_gang_of_which_nobody_knows_whether_it_is_admitted_runs_on_and_none_is_started() -> None:
    away = replace(running(None), kueue_problem="the operator may not see")
    assert judged(away).action is Action.WAIT
    assert written(away) is None
    unstarted = replace(
        make_queued(None, status=active_status(jobUid=None)), kueue_problem="may not see"
    )
    assert (judged(unstarted).action, judged(unstarted).reason) == (Action.WAIT, "FailedCreate")


def test_orphans_do_not_live_on_while_nobody_knows_whether_their_job_is_admitted() -> None:
    orphaned = make_queued(None, make_pod(by=""), status=active_status(jobUid=None))
    decision = judged(replace(orphaned, kueue_problem="may not see"))
    assert (decision.action, decision.reason) == (Action.ADMIT, "Preempted")


def test_the_engines_of_a_gang_are_started_with_it_however_long_its_nodes_take() -> None:
    unbound = [make_pod(index, state={}, phase="Pending", node="") for index in range(2)]
    job = active_status(plan=SERVED_PLAN, running=False, attemptStartTime=at(-9000))
    seen = make_queued(
        make_workload(admitted(), plan=SERVED_PLAN), make_child(), *unbound, status=job
    )
    assert judged(seen).action is Action.START


OWN = make_child(workload="")
"""The Job of an attempt that the operator admitted itself."""


def test_a_gang_whose_job_gets_a_queue_later_runs_on_and_its_next_attempt_waits_in_it() -> None:
    seen = make_queued(None, OWN, make_pod(0), make_pod(1), status=active_status())
    assert (judged(seen).action, written(seen)) == (Action.WAIT, None)
    ended = make_queued(None, OWN, make_pod(0, state=terminated(1)), status=active_status())
    assert judged(ended).action is Action.ADMIT
    queued = gate_by_workload(ended, replace(judged(ended), action=Action.COMMIT, plan=PLAN), PODS)
    assert (queued.action, queued.reason) == (Action.QUEUE, "WaitingForKueue")
    waits = make_queued(None, status=to_json(after(ended, queued)))
    assert written(waits, QUEUES) is Write.CREATE


def test_a_gang_whose_job_gets_a_queue_later_keeps_the_operators_deadline() -> None:
    job = active_status(running=False, attemptStartTime=at(-301))
    unbound = [make_pod(index, state={}, phase="Pending", node="") for index in range(2)]
    seen = make_queued(None, OWN, *unbound, status=job)
    assert (judged(seen).action, judged(seen).reason) == (Action.RELEASE, "SchedulingTimeout")


def test_an_eviction_in_mid_restart_takes_the_place_of_the_pause_and_the_end_counts() -> None:
    failed = (make_child(), make_pod(0, state=terminated(1)), make_pod(1))
    seen = make_queued(make_workload(evicted()), *failed, status=active_status())
    assert (judged(seen).action, judged(seen).counted) == (Action.RELEASE, True)
    waits = make_queued(make_workload(evicted()), *failed, status={"attempt": 1, "conditions": []})
    assert clean_up(waits, LIMITS).delete_jobs == ("run-1",), "also what ended by itself"
    assert written(waits, QUEUES) is None
    gone = make_queued(make_workload(evicted()), status={"attempt": 1, "conditions": []})
    assert written(gone, QUEUES) is Write.CLEAR


WAITS: dict[str, Any] = {"attempt": 1, "conditions": [condition("Admitted", "False")]}
READY = workload_condition("PodsReady")
NO_QUEUE: dict[str, Any] = {"placement": {"accelerator": "CPU", "nodes": 2, "queueName": None}}


@pytest.mark.parametrize(
    ("workload", "job", "things", "due"),
    [
        # a job that waits
        (None, WAITS, (), Write.CREATE),
        (None, WAITS, TRAINERS, Write.CREATE),
        ({}, WAITS, (), None),
        (admitted(), WAITS, (), None),
        (evicted(), WAITS, (), Write.CLEAR),
        (evicted(), WAITS, (make_child(),), None),
        (evicted(), WAITS, (make_pod(0),), None),
        (evicted(), WAITS, (make_pod(0, deleted=True),), None),
        (evicted(), WAITS, (make_pod(0, state=terminated(1)),), Write.CLEAR),
        ({"conditions": [workload_condition("Evicted")]}, WAITS, (), None),
        (admitted(workload_condition("Finished")), WAITS, (), Write.DELETE),
        (admitted(workload_condition("Finished")), WAITS, (make_pod(0),), None),
        # one that runs
        (admitted(), active_status(), TRAINERS, Write.READY),
        (admitted(READY), active_status(), TRAINERS, None),
        (admitted(), active_status(), (make_child(),), None),
        # the next attempt: a gang that gets no node would keep its quota for ever
        (admitted(READY), active_status(2, running=False), (), Write.RECOVER),
        (admitted(READY), active_status(2, running=False), (make_child(2),), Write.RECOVER),
        (admitted(), active_status(2, running=False), (make_child(2),), None),
        (evicted(), active_status(), TRAINERS, None),
        (
            admitted(READY),
            active_status(),
            (make_child(), make_pod(0, state=terminated(1))),
            None,
        ),
        # one that has ended
        (admitted(), DONE, (), Write.FINISH),
        ({}, DONE, (), Write.FINISH),
        (admitted(), DONE, TRAINERS, None),
        (admitted(workload_condition("Finished")), DONE, (), None),
    ],
)
def test_each_state_has_one_write_or_none(
    workload: dict[str, Any] | None, job: dict[str, Any], things: tuple[Any, ...], due: Write | None
) -> None:
    found = None if workload is None else make_workload(workload)
    assert written(make_queued(found, *things, status=job), QUEUES) is due


def test_a_suspended_job_is_taken_out_of_its_queue_and_comes_back() -> None:
    paused = {"annotations": {"grpo.dev/paused": "true"}}
    suspended = make_queued(make_workload(admitted()), status=WAITS, suspend=True)
    assert written(suspended, Decision(Action.SUSPEND)) is Write.PAUSE
    inactive = make_workload(admitted(), spec={"active": False}, **paused)
    assert written(replace(suspended, workload=inactive), Decision(Action.SUSPEND)) is None
    assert written(make_queued(inactive, status=WAITS), QUEUES) is Write.RESUME
    by_others = make_workload({}, spec={"active": False})
    assert written(make_queued(by_others, status=WAITS), QUEUES) is None, (
        "somebody else's pause is theirs to end"
    )
    waits = gate_by_workload(
        make_queued(by_others, status=WAITS), Decision(Action.COMMIT, plan=PLAN), PODS
    )
    assert "spec.active is false" in waits.message


@pytest.mark.parametrize(
    ("reason", "release"),
    [("Checking", ""), ("WaitingForHub", ""), ("ServiceAccountNotFound", ""), ("", "StartTimeout")],
)
def test_a_job_that_could_not_start_holds_no_quota_and_keeps_its_place(
    reason: str, release: str
) -> None:
    status = {**WAITS, "conditions": [condition("Admitted", "False", release or "Queued")]}
    seen = make_queued(make_workload(admitted()), status=status)
    waits = Decision(Action.QUEUE, reason, plan=PLAN) if reason else Decision(Action.WAIT)
    assert written(seen, waits) is Write.PAUSE
    inactive = {"spec": {"active": False}, "annotations": {"grpo.dev/paused": "true"}}
    given_up = replace(seen, workload=make_workload(evicted("Deactivated"), **inactive))
    assert written(given_up, waits) is Write.CLEAR
    paused = replace(seen, workload=make_workload({}, **inactive))
    assert written(paused, waits) is None
    may_start = gate_by_workload(paused, Decision(Action.COMMIT, plan=PLAN), PODS)
    assert written(paused, may_start) is Write.RESUME


def test_a_job_without_its_queue_name_gives_its_workload_up() -> None:
    for status in (WAITS, active_status()):
        assert (
            written(make_queued(make_workload(admitted()), status=status, **NO_QUEUE), QUEUES)
            is Write.DELETE
        )
    ends = make_queued(make_workload(admitted()), *TRAINERS, status=WAITS, **NO_QUEUE)
    assert written(ends, QUEUES) is None


def test_a_gang_whose_spec_can_not_be_read_keeps_its_workload_while_it_runs() -> None:
    """The queue's name is in the spec, which an older operator can't read during an upgrade."""
    unreadable: dict[str, Any] = {"training": {"beta": "much"}}
    for workload, things, status, due in (
        (admitted(), TRAINERS, active_status(), Write.READY),
        (evicted(), TRAINERS, active_status(), None),
        (admitted(), TRAINERS, WAITS, None),
        (admitted(), (), WAITS, Write.DELETE),
    ):
        seen = make_queued(make_workload(workload), *things, status=status, **unreadable)
        assert written(seen) is due


@pytest.mark.parametrize(
    ("child", "status", "action"),
    [
        (make_child(), evicted(), Action.RELEASE),
        (make_child(), admitted(), Action.WAIT),
        (make_child(workload=""), evicted(), Action.WAIT),
        (make_child(ended="Failed"), evicted(), Action.WAIT),
    ],
    ids=["evicted", "admitted", "admitted by the operator", "ended before"],
)
def test_an_eviction_ends_a_gang_whose_spec_can_not_be_read(
    child: JobRecord, status: dict[str, Any], action: Action
) -> None:
    """Somebody waits for its quota. What follows an end of its own stands in the spec."""
    pods = (make_pod(0), make_pod(1))
    unreadable: dict[str, Any] = {"training": {"beta": "much"}}
    workload = make_workload(status)
    seen = make_queued(workload, child, *pods, status=active_status(), **unreadable)
    assert judged(seen).action is action


def test_a_deleted_job_gives_its_quota_back_once_its_pods_are_gone() -> None:
    for things, wanted in ((TRAINERS, None), ((), Write.DELETE)):
        seen = make_queued(make_workload(admitted()), *things, status=active_status())
        deleted = replace(seen, job=replace(seen.job, deleting=True))
        assert written(deleted, Decision(Action.WAIT)) is wanted
        assert written(replace(deleted, workload=None), QUEUES) is None


@pytest.mark.parametrize(
    "decision", [Decision(Action.REJECT, "InvalidSpec"), Decision(Action.QUEUE, "NoGPUs")]
)
def test_a_job_that_can_not_run_any_more_holds_no_quota(decision: Decision) -> None:
    assert written(make_queued(make_workload(admitted()), status=WAITS), decision) is Write.DELETE
    assert (
        written(make_queued(make_workload(admitted()), make_pod(0), status=WAITS), decision) is None
    )


def test_queue_and_priority_follow_the_job_until_quota_is_reserved() -> None:
    renamed = {"placement": {"queueName": "other"}}
    assert written(make_queued(make_workload({}), status=WAITS, **renamed), QUEUES) is Write.AMEND
    assert written(make_queued(make_workload(admitted()), status=WAITS, **renamed), QUEUES) is None
    job = make_job(QUEUED, WAITS, labels={"kueue.x-k8s.io/priority-class": "high"})
    seen = replace(make_queued(make_workload({})), job=job)
    assert written(seen, QUEUES) is Write.AMEND


def commits(workload: dict[str, Any] | None, plan: Any = PLAN, **more: Any) -> Decision:
    found = None if workload is None else make_workload(workload, **more)
    return gate_by_workload(
        make_queued(found, status=WAITS), Decision(Action.COMMIT, plan=plan), PODS
    )


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("active", [False, True])
def test_an_evicted_job_names_a_pod_for_which_its_quota_is_kept(attempt: int, active: bool) -> None:
    """It is on a lost node, and stays for hours. The operator itself pauses a suspended job's."""
    pods = (make_pod(0), make_pod(1, deleted=True))
    status = {**WAITS, "attempt": attempt}
    workload = make_workload(evicted(), spec={"active": active})
    seen = make_queued(workload, make_child(), *pods, status=status)
    decision = gate_by_workload(seen, Decision(Action.COMMIT, plan=PLAN), PODS)
    assert decision.message == (
        "Workload grpojob-run-df678 keeps its quota until pod run-1-1-abcde on node node-1 has "
        "ended; it was evicted: Preempted: somebody else needs it"
    )


def test_an_attempt_is_committed_only_when_kueue_has_admitted_its_pods() -> None:
    assert commits(admitted()).action is Action.COMMIT
    reserved = {"admission": ASSIGNED, "conditions": [workload_condition("QuotaReserved")]}
    checks = [{"name": "nodes", "state": "Pending", "message": "asked for"}]
    for status, words in (
        (None, "waits for Kueue's LocalQueue team"),
        (
            {"conditions": [workload_condition("QuotaReserved", False, message="too many")]},
            "LocalQueue team: too many",
        ),
        (
            reserved | {"admissionChecks": checks},
            "its quota is reserved, nodes is Pending: asked for",
        ),
        (evicted(), "it was evicted: Preempted: somebody else needs it"),
        ({"conditions": [workload_condition("Admitted")]}, "waits for"),
    ):
        found = commits(status)
        assert (found.action, found.reason, found.plan) == (Action.QUEUE, "WaitingForKueue", PLAN)
        assert words in found.message


def test_a_workload_that_a_finalizer_keeps_is_named_as_deleted() -> None:
    waits = commits(admitted(), deletionTimestamp=at(0))
    assert (waits.action, waits.reason) == (Action.QUEUE, "WaitingForKueue")
    assert "is being deleted; once it is gone, a new one is created" in waits.message


def test_a_job_with_a_queue_name_on_a_cluster_without_kueue_says_so_and_asks_again() -> None:
    seen = replace(make_queued(None, status=WAITS), kueue_problem="the cluster has no Kueue")
    found = gate_by_workload(seen, Decision(Action.COMMIT, plan=PLAN), PODS)
    assert (found.action, found.reason, found.requeue_after) == (Action.QUEUE, "NoKueue", 15.0)
    assert found.message == "the cluster has no Kueue"
    assert written(seen, found) is None


@pytest.mark.parametrize("plan", [OTHER_PLAN, SERVED_PLAN])
def test_a_plan_of_another_shape_needs_another_workload(plan: Any) -> None:
    found = commits(admitted(), plan)
    assert (found.action, found.reason) == (Action.QUEUE, "WorkloadReplaced")
    seen = make_queued(make_workload(admitted()), status=WAITS)
    assert written(seen, found) is Write.DELETE
    assert written(replace(seen, workload=None), found) is Write.CREATE


def test_a_job_keeps_its_plan_until_its_spec_changes_or_it_runs_out_of_memory() -> None:
    job, workload = make_job(QUEUED), make_workload(admitted())
    assert planned_for(job, workload) == PLAN
    assert planned_for(make_job(QUEUED, generation=2), workload) is None
    assert planned_for(job, replace(workload, plan_annotation="{")) is None
    assert planned_for(job, None) is None


def test_a_plan_that_answered_a_shortfall_of_memory_stays_although_the_workload_was_made_for_another() -> (  # noqa: E501
    None
):
    workload, smaller = make_workload(admitted()), PLAN.model_copy(update={"micro_batch": 2})
    short = {
        "attempt": 1,
        "where": "host",
        "tried": "as it was",
        "neededBytes": 2,
        "usableBytes": 1,
    }
    learned: dict[str, Any] = {"learned": {"shortfalls": [short]}}
    assert planned_for(make_job(QUEUED, active_status(**learned)), workload) is None
    answered = active_status(2, plan=smaller, **learned)
    assert planned_for(make_job(QUEUED, answered), workload) == smaller
    made_since = make_workload(admitted(), job=make_job(QUEUED, active_status()), plan=smaller)
    assert planned_for(make_job(QUEUED, active_status(**learned)), made_since) == smaller


WORDS = st.sampled_from(["True", "False", "Unknown", ""])
KINDS = st.sampled_from(
    ["QuotaReserved", "Admitted", "Evicted", "Finished", "PodsReady", "Requeued", "Else"]
)
CONDITIONS = st.lists(st.builds(workload_condition, KINDS, WORDS, st.text(max_size=9)), max_size=8)
STATUSES = st.fixed_dictionaries(
    {"conditions": CONDITIONS},
    optional={"admission": st.just(ASSIGNED), "admissionChecks": st.just([])},
)
JOBS = st.sampled_from([WAITS, active_status(), DONE, {}])
THINGS = st.lists(
    st.sampled_from([make_child(), make_pod(0), make_pod(1), make_pod(0, deleted=True)]),
    unique=True,
)


@settings(max_examples=cases(200))
@given(st.none() | STATUSES, JOBS, THINGS, st.booleans(), st.booleans())
def test_whatever_kueue_says_pods_run_only_while_it_admits_them(
    status: dict[str, Any] | None,
    job: dict[str, Any],
    things: list[Any],
    suspend: bool,
    active: bool,
) -> None:
    found = None if status is None else make_workload(status, spec={"active": active})
    seen = make_queued(found, *things, status=job, suspend=suspend)
    decision = judged(seen)
    if decision.action is Action.START:
        assert found
        assert found.may_continue
    if decision.action is Action.ADMIT:
        decision = gate_by_workload(seen, replace(decision, action=Action.COMMIT, plan=PLAN), PODS)
        assert decision.action is not Action.COMMIT or (found is not None and found.may_start)
    write = written(seen, decision)
    if write in (Write.CLEAR, Write.DELETE, Write.FINISH):
        assert not seen.pods_left, "quota goes back when no pod is left"
        assert write is Write.FINISH or not seen.gang_left
    if write in (Write.CREATE, Write.AMEND):
        assert not seen.job.is_active
