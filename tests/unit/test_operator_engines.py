"""Engines in pods of their own: when they are started, what is told of them, and what becomes of
them at every end."""

from typing import Any

import pytest

from grpo_operator.decide.cleanup import CleanUp, clean_up
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.decide.start_checks import asks_about, current_engine_pods
from grpo_operator.records.records import PodRecord
from grpo_operator.report.events import telling_change
from tests.unit.operator_world import (
    KILLED,
    LIMITS,
    SERVED_PLAN,
    TRAINERS,
    Thing,
    active_status,
    after,
    at,
    condition,
    judged,
    make_child,
    make_engine,
    make_engines,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    of_type,
    said,
    stored,
    terminated,
)

ENGINES: tuple[Thing, ...] = (make_engines(), make_engine(0), make_engine(1))
WHOLE = (*TRAINERS, *ENGINES)


def seen_of(*things: Thing, ago: float = 10, ran: bool = True, **status: Any) -> Observation:
    """What is seen of an attempt of two training pods and two engines."""
    full = active_status(plan=SERVED_PLAN, running=ran, attemptStartTime=at(-ago), **status)
    return make_seen(make_job(status=full), *things, ago=ago)


def engine_waits(index: int, **more: Any) -> PodRecord:
    return make_engine(index, state={}, phase="Pending", **more)


def test_engines_follow_as_soon_as_the_training_pods_have_their_nodes() -> None:
    waiting = make_pod(1, state={}, phase="Pending", node="")
    assert judged(seen_of(make_child(), make_pod(0), waiting, ran=False)).action is Action.WAIT
    assert judged(seen_of(*TRAINERS, ran=False)).action is Action.START
    assert judged(seen_of(*TRAINERS, make_engines(), ran=False)).action is Action.WAIT


def test_a_plan_without_engines_lacks_none() -> None:
    seen = make_seen(make_job(status=active_status()), *TRAINERS)
    assert judged(seen).action is Action.WAIT
    assert of_type(after(seen, judged(seen)), "Running")[2] == "attempt 1 runs with 2 pods"


def test_the_gang_runs_only_once_its_engines_do() -> None:
    seen = seen_of(*TRAINERS, make_engines(), make_engine(0), engine_waits(1), ran=False)
    status = after(seen, judged(seen))
    assert status.phase == "Starting"
    assert of_type(status, "Scheduled")[:2] == ("True", "AllPodsBound")
    seen = seen_of(*WHOLE, ran=False)
    status = after(seen, judged(seen))
    assert (status.phase, of_type(status, "Running")[2]) == (
        "Running",
        "attempt 1 runs with 2 pods and 2 of 2 engines",
    )
    assert [(pod.index, pod.engine) for pod in status.pods] == [
        (0, None),
        (1, None),
        (0, True),
        (1, True),
    ]


def test_engines_without_a_node_release_the_whole_gang_in_time() -> None:
    refused = engine_waits(
        1,
        node="",
        conditions=[{"type": "PodScheduled", "status": "False", "message": "no L4 is free"}],
    )
    things = (*TRAINERS, make_engines(), make_engine(0), refused)
    early = seen_of(*things, ran=False, ago=100)
    assert judged(early).action is Action.WAIT
    assert of_type(after(early, judged(early)), "Scheduled")[2] == (
        "2 of 2 pods and 1 of 2 engines have a node: no L4 is free"
    )
    late = seen_of(*things, ran=False, ago=LIMITS.scheduling_timeout_seconds + 1)
    decision = judged(late)
    assert (decision.action, decision.reason) == (Action.RELEASE, "SchedulingTimeout")
    assert "1 of 2 engines were bound" in decision.message
    released = make_seen(stored(late.job, after(late, decision)), *things)
    assert set(clean_up(released, LIMITS).delete_jobs) == {"run-1", "run-1-engine"}, "both roles go"


def test_engines_that_do_not_start_release_the_gang_as_training_pods_do() -> None:
    status = active_status(plan=SERVED_PLAN, running=False)
    status["conditions"].append(condition("Scheduled", since=-9999))
    failed = (make_engine(0, state=KILLED), make_engine(0, life="again", state=KILLED))
    seen = make_seen(make_job(status=status), *TRAINERS, make_engines(), *failed, make_engine(1))
    decision = judged(seen)
    assert (decision.action, decision.reason) == (Action.RELEASE, "StartTimeout")
    assert "not all of 2 engines ran" in decision.message
    assert "engine 0 ended with OOMKilled" in decision.message


def test_events_are_asked_for_engines_that_are_refused() -> None:
    seen = seen_of(
        *TRAINERS, make_engines(), make_engine(0), ran=False, ago=LIMITS.pods_missing_seconds + 1
    )
    assert asks_about(seen, LIMITS) == "engines-1"
    assert asks_about(seen_of(*WHOLE, ran=False, ago=LIMITS.pods_missing_seconds + 1), LIMITS) == ""


@pytest.mark.parametrize(
    "lost",
    [
        (make_engine(1, state=KILLED),),
        (make_engine(1, state=terminated(51, said("EngineLost"))),),
        (make_engine(1, deleted=True),),
        (make_engine(1, state=KILLED), engine_waits(1, life="again", node="")),
        (),
    ],
)
def test_a_lost_engine_ends_nothing_and_is_told(lost: tuple[PodRecord, ...]) -> None:
    seen = seen_of(*TRAINERS, make_engines(), make_engine(0), *lost)
    decision = judged(seen)
    assert decision.action is Action.WAIT
    status = after(seen, decision)
    assert (status.phase, status.attempt, status.restarts, status.uncounted_restarts) == (
        "Running",
        1,
        0,
        0,
    )
    assert of_type(status, "Running")[::2] == (
        "True",
        "attempt 1 runs with 2 pods and 1 of 2 engines",
    )
    held, reason, message = of_type(status, "Degraded")
    assert (held, reason) == ("True", "EnginesLost")
    assert message.startswith("1 of 2 engines run")
    change = telling_change(seen.job.status.conditions, status.conditions)
    assert change
    assert (change.type, change.reason) == ("Degraded", "EnginesLost")
    assert clean_up(seen, LIMITS).delete_jobs == ()


def test_an_engine_that_is_back_is_told_too() -> None:
    lost = seen_of(*TRAINERS, make_engines(), make_engine(0), make_engine(1, state=KILLED))
    told = stored(lost.job, after(lost, judged(lost)))
    back = make_seen(told, *WHOLE, make_engine(1, life="first", state=KILLED))
    status = after(back, judged(back))
    assert of_type(status, "Degraded")[:2] == ("False", "AsExpected")
    change = telling_change(told.status.conditions, status.conditions)
    assert change
    assert (change.type, change.status) == ("Degraded", "False")
    assert [pod.phase for pod in status.pods if pod.engine] == ["Running", "Running"], (
        "the pods that count are shown"
    )


def test_how_engines_ended_is_told_in_the_kubelets_word() -> None:
    seen = seen_of(*TRAINERS, make_engines(), make_engine(0, state=KILLED), make_engine(1))
    assert (
        "engine 0 ended with OOMKilled, exit code 137"
        in of_type(after(seen, judged(seen)), "Degraded")[2]
    )


def test_a_volume_that_refuses_a_checkpoint_is_told_before_a_lost_engine() -> None:
    things = (*TRAINERS, make_engines(), make_engine(0))
    full = active_status(plan=SERVED_PLAN)
    pull = make_pull(checkpoint_problem="no space left", stage="Training", step=3)
    seen = make_seen(make_job(status=full), *things, pull=pull)
    assert of_type(after(seen, judged(seen)), "Degraded")[1] == "CheckpointNotWritten"


def test_a_job_of_engines_that_is_gone_is_made_again_while_the_gang_trains() -> None:
    assert judged(seen_of(*TRAINERS, ago=9999)).action is Action.START
    left = (make_engine(0), make_engine(1))
    assert judged(seen_of(*TRAINERS, *left)).action is Action.START, (
        "pods without their Job are nobody's"
    )
    assert judged(seen_of(*TRAINERS, make_engines(deleting=True), *left)).action is Action.START


def test_an_engine_job_is_never_taken_for_the_gangs() -> None:
    seen = seen_of(*ENGINES, jobUid="job-1")
    assert seen.child is None
    assert seen.pods == ()
    decision = judged(seen)
    assert (decision.action, decision.counted) == (Action.ADMIT, False), (
        "the gang's Job was deleted"
    )


@pytest.mark.parametrize("end", [said("Error", message="x"), said("WeightSyncTimeout"), ""])
def test_the_end_of_a_training_pod_ends_both_roles(end: str) -> None:
    failed = make_pod(1, state=terminated(1, end))
    seen = seen_of(make_child(), make_pod(0), failed, *ENGINES)
    decision = judged(seen)
    assert (decision.action, decision.counted) == (Action.ADMIT, True)
    left = clean_up(seen, LIMITS)
    assert left.delete_jobs == ("run-1-engine",), "the gang's is kept for its logs"
    committed = after(
        seen, Decision(Action.COMMIT, plan=SERVED_PLAN, ended=decision.ended, counted=True)
    )
    nxt = make_seen(stored(seen.job, committed), make_child(), make_pod(0), failed, *ENGINES)
    assert nxt.engines is None
    assert nxt.engine_pods == ()
    assert clean_up(nxt, LIMITS).delete_jobs == ("run-1-engine",)
    assert judged(nxt).action is Action.START


def test_no_engine_is_started_for_a_gang_that_is_over() -> None:
    ends = [{"attempt": 1, "reason": "Error", "runningSeconds": 1, "endTime": at(-20)}]
    failed = make_pod(1, state=terminated(1, said("Error")))
    seen = seen_of(make_child(), make_pod(0), failed, ends=ends)
    assert judged(seen).action is not Action.START
    done = seen_of(
        make_child(), make_pod(0), make_pod(1, state=terminated(0, said("Succeeded", rank=1)))
    )
    assert judged(done).action is Action.WAIT, "rank 0 exports and needs no engine"


@pytest.mark.parametrize("action", [Action.SUSPEND, Action.SUCCEED, Action.FAIL])
def test_engines_go_with_their_attempt(action: Action) -> None:
    seen = seen_of(*WHOLE)
    ended = stored(seen.job, after(seen, Decision(action, "Because")))
    assert "run-1-engine" in clean_up(make_seen(ended, *WHOLE), LIMITS).delete_jobs


def test_a_failed_engine_of_an_ended_attempt_does_not_spare_its_training_pods() -> None:
    things = (make_child(), make_pod(0), make_engines(), make_engine(0, state=KILLED))
    job = make_job(status=active_status(attempt=2, plan=SERVED_PLAN, jobUid=None))
    assert clean_up(make_seen(job, *things), LIMITS).stop_attempts == (1,)


def test_engine_pods_whose_job_was_deleted_without_them_end() -> None:
    """Theirs is the DNS name of the engine that was made in their place."""
    orphan = make_engine(0, by="", life="orphan")
    assert clean_up(seen_of(*WHOLE, orphan), LIMITS) == CleanUp(stop_orphans=True)
    assert clean_up(seen_of(*TRAINERS, orphan), LIMITS) == CleanUp(stop_orphans=True)
    gone = make_engine(0, by="", life="orphan", deleted=True)
    assert clean_up(seen_of(*WHOLE, gone, make_engine(1, by=None)), LIMITS) == CleanUp()
    job = make_job(status=active_status(attempt=2, plan=SERVED_PLAN, jobUid=None))
    left = clean_up(make_seen(job, orphan), LIMITS)
    assert (left.stop_attempts, left.stop_engines) == ((), (1,))


def test_strangers_with_an_engines_labels_are_nobodys() -> None:
    stranger = make_engine(1, by="somebody", life="stranger")
    seen = seen_of(*TRAINERS, make_engines(), make_engine(0), stranger)
    assert [pod.index for pod in seen.engine_pods] == [0]
    assert seen.engines_up == {0}


def test_of_an_engine_that_was_made_again_the_last_pod_counts() -> None:
    old, new = make_engine(0, state=KILLED), engine_waits(0, life="again")
    assert current_engine_pods([new, old]) == [new]
    assert current_engine_pods([old]) == [old]
