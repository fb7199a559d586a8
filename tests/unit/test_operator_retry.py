"""spec.retry: when it starts a failed job again, when it is only taken note of, and what counts
anew."""

from typing import Any

import pytest

from grpo_operator.decide.cleanup import clean_up
from grpo_operator.decide.decisions import Action
from tests.unit.operator_world import (
    KEY,
    LIMITS,
    active_status,
    after,
    at,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    of_type,
    said,
    stored,
    terminated,
)

USED_UP: dict[str, Any] = {
    "restarts": 3,
    "uncountedRestarts": 2,
    "activeSeconds": 500,
    "avoidedNodes": ["node-1"],
    "completionTime": at(-30),
    "ends": [{"attempt": 1, "reason": "Hang", "counted": True, "endTime": at(-40)}],
    "progress": {"step": 40, "totalSteps": 90},
}


def failed(retry: int, seen: int = 0, **spec: Any) -> Any:
    """A job that has failed with spec.retry and status.retry as given."""
    status = active_status(attempt=4, retry=seen, phase="Failed", **USED_UP)
    status["conditions"] = [
        condition("Admitted", reason="Admitted"),
        condition("Failed", reason="RestartLimit"),
    ]
    return make_job({"retry": retry, **spec}, status)


@pytest.mark.parametrize(
    ("retry", "seen", "starts"), [(0, 0, False), (1, 0, True), (2, 2, False), (5, 2, True)]
)
def test_only_a_raise_starts_a_failed_job_again(retry: int, seen: int, starts: bool) -> None:
    decision = judged(make_seen(failed(retry, seen)))
    assert (decision.action is Action.RETRY) is starts
    assert starts or decision.action is Action.WAIT


@pytest.mark.parametrize(
    ("attempt", "checkpoint", "goes_on"),
    [(4, {"store": {"url": "s3://runs"}}, True), (0, {"store": {"url": "s3://runs"}}, False),
     (4, {}, False)],
)  # fmt: skip
def test_a_retried_job_speaks_of_a_checkpoint_only_where_it_may_have_one(
    attempt: int, checkpoint: dict[str, Any], goes_on: bool
) -> None:
    job = failed(1, checkpoint=checkpoint)
    status = job.status.model_copy(update={"attempt": attempt})
    message = judged(make_seen(stored(job, status))).message
    assert ("last checkpoint" in message) is goes_on


def test_a_retried_job_counts_anew_and_queues_as_any() -> None:
    seen = make_seen(failed(1, ttlSecondsAfterFinished=5))
    decision = judged(seen)
    assert decision.action is Action.RETRY  # although its time to live is over
    status = after(seen, decision)
    assert (status.retry, status.attempt, status.phase) == (1, 4, "Pending")
    assert (status.restarts, status.uncounted_restarts, status.ends, status.avoided_nodes) == (
        0,
        0,
        [],
        [],
    )
    assert (status.active_seconds, status.completion_time) == (0, None)
    assert status.progress is not None
    assert status.progress.step == 40
    for kind in ("Failed", "Admitted", "Running"):
        assert of_type(status, kind)[:2] == ("False", "Retrying")
    job = stored(seen.job, status)
    assert not job.is_finished
    assert not job.is_active
    assert judged(make_seen(job)).action is Action.ADMIT


def test_what_is_left_of_the_failed_attempt_ends_and_its_job_is_kept_for_its_logs() -> None:
    seen = make_seen(failed(1))
    job = stored(seen.job, after(seen, judged(seen)))
    old = make_pod(0, attempt=4, state=terminated(43, said("BadInput")))
    left = clean_up(
        make_seen(job, make_child(3), make_child(4), old, make_pod(1, attempt=3)), LIMITS
    )
    assert left.delete_jobs == ()
    assert left.stop_attempts == (3,)
    assert judged(make_seen(job, make_child(4), old)).action is Action.ADMIT


@pytest.mark.parametrize(("created", "left"), [(-300, ()), (-50, ()), (-20, (f"{KEY.name}-1",))])
def test_a_job_of_an_earlier_attempt_that_was_made_after_the_current_ones_goes(
    created: float, left: tuple[str, ...]
) -> None:
    """Nobody but an operator that has been deposed makes one."""
    job = make_job(status=active_status(2))
    seen = make_seen(
        job,
        make_child(1, created=created),
        make_child(2, created=-50),
        make_pod(0, 2),
        make_pod(1, 2),
    )
    assert clean_up(seen, LIMITS).delete_jobs == left
    assert judged(seen).action is Action.WAIT


@pytest.mark.parametrize("kind", ["Succeeded", "Running", "Suspended"])
def test_a_raise_at_another_time_is_taken_note_of_and_does_nothing(kind: str) -> None:
    status = active_status(conditions=[condition("Admitted", reason="Admitted"), condition(kind)])
    seen = make_seen(make_job({"retry": 3}, status), make_child(), make_pod(0), make_pod(1))
    decision = judged(seen)
    assert decision.action is Action.WAIT
    assert after(seen, decision).retry == 3


def test_a_raise_before_the_end_does_not_fire_after_it() -> None:
    end = make_pod(0, state=terminated(43, said("BadInput", message="no such column")))
    seen = make_seen(make_job({"retry": 1}, active_status()), make_child(), end, make_pod(1))
    decision = judged(seen)
    assert decision.action is Action.FAIL
    job = stored(make_job({"retry": 1}), after(seen, decision))
    assert judged(make_seen(job)).action is Action.WAIT


def test_a_suspended_job_is_retried_when_it_is_resumed() -> None:
    seen = make_seen(failed(1, suspend=True))
    job = stored(seen.job, after(seen, judged(seen)))
    assert judged(make_seen(job)).action is Action.SUSPEND
