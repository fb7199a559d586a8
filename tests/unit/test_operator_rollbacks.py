"""spec.guard.onDivergence: what follows when a run diverges, derived from the status alone, at most
twice per run."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.report.revisions import Generations
from grpo_api.report.root_cause import DIVERGED
from grpo_api.status.status import MAX_ROLLBACKS, GRPOJobStatus
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.pods.manifests import attempt_of, training_plan
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.report.status import build_status, to_json
from tests.unit.operator_world import (
    PLAN,
    active_status,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    of_type,
    terminated,
)

ROLLBACK = {"guard": {"onDivergence": "Rollback"}}
SEVENTH = {"first": 7, "last": 7}


def diverged(
    spec: dict[str, Any] | None,
    on: Any = SEVENTH,
    result: str = "Diverged",
    attempt: int = 1,
    **status: Any,
) -> Observation:
    """A rank of the attempt says that it diverged on these generations."""
    message = json.dumps({"result": result, "message": "the loss is nan", "divergedOn": on})
    job = make_job(spec, active_status(attempt, **status))
    pods = make_pod(0, attempt, terminated(47, message)), make_pod(1, attempt)
    return make_seen(job, make_child(attempt), *pods)


def committed(seen: Observation, decision: Decision) -> GRPOJobStatus:
    """The status with the next attempt that an ADMIT leads to."""
    assert decision.action is Action.ADMIT, decision
    return build_status(
        seen, Decision(Action.COMMIT, ended=decision.ended, rollback=decision.rollback, plan=PLAN)
    )


def left_out(job: GRPOJobRecord) -> list[Generations]:
    """What the plan of the job's attempt leaves out."""
    return training_plan(attempt_of(job, job.valid_spec, PLAN, job.status.attempt)).skipped


@pytest.mark.parametrize("result", sorted(DIVERGED))
def test_a_run_that_diverged_fails_unless_a_rollback_is_asked_for(result: str) -> None:
    decision = judged(diverged(None, result=result))
    assert (decision.action, decision.reason, decision.message) == (
        Action.FAIL,
        result,
        "the loss is nan",
    )


@pytest.mark.parametrize("result", sorted(DIVERGED))
def test_a_rollback_is_a_restart_without_the_batch_that_counts_by_itself(result: str) -> None:
    seen = diverged(ROLLBACK, result=result)
    status = committed(seen, judged(seen))
    assert (status.attempt, status.restarts, status.uncounted_restarts) == (2, 0, 1)
    assert [one.model_dump() for one in status.rollbacks] == [
        {"attempt": 1, "reason": result, "skipped": SEVENTH}
    ]
    kind, reason, message = of_type(status, "Degraded")
    assert (kind, reason) == ("True", result)
    assert "before generation 7 of the data, which is left out" in message


def test_later_attempts_leave_it_out_too_whyever_they_start() -> None:
    seen = diverged(ROLLBACK)
    second = make_job(ROLLBACK, to_json(committed(seen, judged(seen))))
    assert left_out(second) == [Generations(first=7, last=7)]
    status = active_status(2, rollbacks=to_json(second.status)["rollbacks"])
    crashed = make_seen(
        make_job(ROLLBACK, status), make_child(2), make_pod(0, 2, terminated(139)), make_pod(1, 2)
    )
    third = committed(crashed, judged(crashed))
    assert left_out(make_job(ROLLBACK, to_json(third))) == [Generations(first=7, last=7)]


def test_a_gang_that_queues_for_its_next_attempt_remembers_it() -> None:
    seen = diverged(ROLLBACK)
    queued = build_status(
        seen, replace(judged(seen), action=Action.QUEUE, reason="WaitingForGPUs", plan=PLAN)
    )
    assert [one.skipped.first for one in queued.rollbacks] == [7]
    assert (queued.attempt, queued.uncounted_restarts) == (1, 1)


def earlier(*numbers: int) -> list[dict[str, Any]]:
    """Rollbacks of attempts 1, 2, … that left out these generations."""
    return [
        {"attempt": at, "reason": "Diverged", "skipped": {"first": number, "last": number}}
        for at, number in enumerate(numbers, 1)
    ]


def test_the_third_time_the_job_fails() -> None:
    decision = judged(diverged(ROLLBACK, attempt=3, rollbacks=earlier(3, 5)))
    assert (decision.action, decision.reason) == (Action.FAIL, "Diverged")
    assert decision.message == "diverged again after 2 of 2 rollbacks: the loss is nan"


@pytest.mark.parametrize(
    "on",
    [
        None,
        {"first": 3, "last": 3},
        {"first": 9, "last": 2},
        {"first": -1, "last": 1},
        {"first": 2**53, "last": 2**53},
    ],
)
def test_without_a_batch_that_can_be_left_out_the_job_fails(on: Any) -> None:
    decision = judged(diverged(ROLLBACK, on, attempt=2, rollbacks=earlier(3)))
    assert (decision.action, decision.reason) == (Action.FAIL, "Diverged")


def test_only_the_trainers_own_word_counts() -> None:
    job = make_job(ROLLBACK, active_status())
    decision = judged(make_seen(job, make_child(), make_pod(0, 1, terminated(47)), make_pod(1)))
    assert (decision.action, decision.reason, decision.rollback) == (Action.ADMIT, "Diverged", None)


def test_the_users_rules_come_first() -> None:
    rules = {"restarts": {"rules": [{"action": "Fail", "onResults": ["Diverged"]}]}}
    decision = judged(diverged(ROLLBACK | rules))
    assert (decision.action, decision.rollback) == (Action.FAIL, None)
    rules = {"restarts": {"rules": [{"action": "Restart", "onResults": ["Diverged"]}]}}
    decision = judged(diverged(ROLLBACK | rules))
    assert (decision.action, decision.counted, decision.rollback) == (Action.ADMIT, True, None)


def test_a_job_that_is_paused_meanwhile_is_not_started() -> None:
    assert judged(diverged(ROLLBACK | {"suspend": True})).action is Action.SUSPEND


def test_a_retry_forgets_no_batch() -> None:
    status = active_status(3, rollbacks=earlier(3, 5))
    status["conditions"].append(condition("Failed", reason="Diverged"))
    seen = make_seen(make_job(ROLLBACK | {"retry": 1}, status))
    decision = judged(seen)
    assert decision.action is Action.RETRY
    assert [one.skipped.first for one in build_status(seen, decision).rollbacks] == [3, 5]


ENDS = st.tuples(
    st.sampled_from(["Diverged", "DivergedKL", "OutOfMemory", "Preempted"]),
    st.none() | st.integers(0, 5).map(lambda first: {"first": first, "last": first + first % 2}),
    st.sampled_from(["Fail", "Rollback"]),
)


@given(st.lists(ENDS, max_size=8))
def test_whatever_ends_follow_each_other_the_status_is_all_that_is_needed(
    ends: list[tuple[str, dict[str, int] | None, str]],
) -> None:
    kept: list[dict[str, Any]] = []
    for attempt, (result, on, wish) in enumerate(ends, 1):
        seen = diverged({"guard": {"onDivergence": wish}}, on, result, attempt, rollbacks=kept)
        decision = judged(seen)
        rolls_back = (
            result in DIVERGED
            and wish == "Rollback"
            and on is not None
            and len(kept) < MAX_ROLLBACKS
            and on not in [one["skipped"] for one in kept]
        )
        assert (decision.action is Action.FAIL) == (result in DIVERGED and not rolls_back)
        if decision.action is Action.FAIL:
            return
        status = committed(seen, decision)
        now = to_json(status).get("rollbacks", [])
        assert (
            now == [*kept, {"attempt": attempt, "reason": result, "skipped": on}]
            if rolls_back
            else now == kept
        )
        kept = now
        job = make_job(None, to_json(status))
        assert [one.model_dump() for one in left_out(job)] == [one["skipped"] for one in kept]
