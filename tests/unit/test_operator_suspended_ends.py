"""An attempt that has ended before its job is suspended or evicted teaches and counts as one that
is followed by the next attempt."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.report import Result
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.kueue.pod_sets import planned_for
from grpo_operator.report.status import build_status
from tests.generated import cases
from tests.unit.kueue_world import admitted, evicted, make_workload
from tests.unit.operator_world import (
    PLAN,
    active_status,
    at,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    said,
    stored,
    terminated,
)
from tests.unit.test_operator_replanning import SPEC, first_plan

LEFT = {"attempt": 1, "reason": "Error", "runningSeconds": 5, "node": "node-0", "endTime": at(-90)}
"""A short attempt before, so that the end is followed by a pause."""
RUNS = [condition("Admitted"), condition("Running", since=-560)]
SUSPENDED = {"suspend": True}
QUEUED = {"placement": {**SPEC["placement"], "queueName": "team"}}
ENDS: dict[str, dict[str, Any]] = {
    result: terminated(1, said(result)) for result in Result if result != Result.SUCCEEDED
}
ENDS["killed"] = terminated(137, reason="OOMKilled")
ENDS["crashed"] = terminated(139)


def ended(state: dict[str, Any], spec: dict[str, Any], ago: float, **status: Any) -> Observation:
    """The one pod of the second attempt has ended so many seconds ago."""
    full = active_status(2, first_plan(), ends=[LEFT], conditions=RUNS, **status)
    job = make_job({**SPEC, **spec}, full)
    return make_seen(job, make_child(2), make_pod(0, 2, state), ago=ago)


def lesson(seen: Observation, decision: Decision) -> list[Any]:
    """What the status keeps of the end, once it is written."""
    if decision.action is Action.ADMIT:
        decision = replace(decision, action=Action.COMMIT, plan=PLAN)
    status = build_status(seen, decision)
    return [
        status.ends,
        status.restarts,
        status.uncounted_restarts,
        status.rollbacks,
        status.learned,
        status.outcome,
        decision.action is Action.FAIL,
    ]


@settings(max_examples=cases(100))
@given(
    state=st.sampled_from(sorted(ENDS)),
    ago=st.sampled_from([0.0, 1.0, 5.0, 500.0]),
    restarts=st.integers(0, 3),
)
def test_the_end_of_an_attempt_is_recorded_alike_with_and_without_a_suspension(
    state: str, ago: float, restarts: int
) -> None:
    later = ended(ENDS[state], {}, 500.0, restarts=restarts)
    suspended = ended(ENDS[state], SUSPENDED, ago, restarts=restarts)
    assert lesson(suspended, judged(suspended)) == lesson(later, judged(later))


@settings(max_examples=cases(40))
@given(state=st.sampled_from(sorted(ENDS)), ago=st.sampled_from([0.0, 5.0, 500.0]))
def test_the_end_of_an_attempt_is_recorded_alike_with_and_without_an_eviction(
    state: str, ago: float
) -> None:
    later = replace(ended(ENDS[state], QUEUED, 500.0), workload=make_workload(admitted()))
    taken_back = ended(ENDS[state], QUEUED, ago)
    taken_back = replace(taken_back, workload=make_workload(evicted()))
    decision = judged(taken_back)
    if decision.action is not Action.WAIT:
        assert decision.action in (Action.RELEASE, Action.FAIL)
        assert lesson(taken_back, decision) == lesson(later, judged(later))


def test_an_eviction_in_the_restart_pause_repeats_no_plan_that_ran_out_of_memory() -> None:
    taken_back = replace(
        ended(ENDS["killed"], QUEUED, 5.0), workload=make_workload(evicted(), plan=first_plan())
    )
    decision = judged(taken_back)
    assert (decision.action, decision.reason) == (Action.RELEASE, "Evicted")
    released = stored(taken_back.job, build_status(taken_back, decision))
    assert not released.is_active
    assert planned_for(released, taken_back.workload) is None


@pytest.mark.parametrize("gone", [(), (make_child(2, ended="Failed"),)], ids=["job", "pods"])
def test_a_suspension_counts_an_attempt_whose_job_or_pods_were_deleted(gone: Any) -> None:
    job = make_job(SUSPENDED, active_status(2, ends=[LEFT]))
    seen = make_seen(job, *gone, ago=0)
    decision = judged(seen)
    status = build_status(seen, decision)
    assert (decision.action, status.uncounted_restarts) == (Action.SUSPEND, 1)
    assert [end.reason for end in status.ends] == ["Error", "Preempted"]


def test_a_suspension_waits_until_the_cause_of_an_end_is_known() -> None:
    job = make_job(SUSPENDED, active_status())
    symptom = make_pod(1, state=terminated(1, said("RendezvousTimeout")))
    seen = make_seen(job, make_child(), make_pod(0), symptom, ago=0)
    decision = judged(seen)
    assert decision.action is Action.WAIT
    assert decision.requeue_after is not None
    assert 0 < decision.requeue_after <= 2.5
    later = judged(make_seen(job, make_child(), make_pod(0), symptom, ago=3))
    assert (later.action, later.reason) == (Action.SUSPEND, "Suspended")
