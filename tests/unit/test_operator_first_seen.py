"""What this operator remembers of the current attempt's Job, from one look to the next."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import Action
from grpo_operator.decide.first_seen import FirstSeenTimes, FirstSeenTracker
from grpo_operator.decide.observation import Observation, observe
from grpo_operator.records.records import JobRecord, PodRecord
from tests.unit.operator_world import (
    KEY,
    NOW,
    active_status,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    said,
    terminated,
)


def look(
    first_seen_tracker: FirstSeenTracker, attempt: int, *children: JobRecord, uid: str | None = None
) -> Observation:
    """A look at a job whose attempt's Job may not be in its status yet."""
    job = make_job(status=active_status(attempt=attempt, jobUid=uid))
    there: Collection[JobRecord] = children
    return observe(job, there, [], now=NOW, at=Observed(NOW), first_seen_tracker=first_seen_tracker)


def test_a_job_that_was_created_and_is_not_there_was_deleted() -> None:
    first_seen_tracker = FirstSeenTracker()
    assert judged(look(first_seen_tracker, 1)).action is Action.START
    first_seen_tracker.record_created(KEY, 1, "job-1", Observed(NOW))
    decision = judged(look(first_seen_tracker, 1))
    assert (decision.action, decision.reason) == (Action.ADMIT, "Preempted")


def test_the_job_of_one_attempt_says_nothing_about_the_next() -> None:
    first_seen_tracker = FirstSeenTracker()
    look(first_seen_tracker, 1, make_child())
    assert judged(look(first_seen_tracker, 2)).action is Action.START


def test_a_new_process_knows_of_no_job_before_it_sees_one() -> None:
    assert judged(look(FirstSeenTracker(), 1)).action is Action.START
    assert judged(look(FirstSeenTracker(), 1, uid="job-1")).action is Action.ADMIT


def test_the_ends_of_a_large_gang_cost_as_much_as_its_pods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No watch, probe or renewal of the Lease has its turn meanwhile."""
    count = 200
    ends = [terminated(1, said("Error", rank=index)) for index in range(count)]
    pods = [make_pod(index, state=end, deleted=True) for index, end in enumerate(ends)]
    seen = make_seen(make_job(status=active_status()), make_child(), *pods)
    looks: list[str] = []

    def end_of(_: FirstSeenTimes, pod: PodRecord, at: Observed) -> Observed:
        looks.append(pod.uid)
        return at

    monkeypatch.setattr(FirstSeenTimes, "end_of", end_of)
    monkeypatch.setattr(FirstSeenTimes, "deletion_of", end_of)
    assert len(replace(seen).terminations) == count
    assert len(looks) <= 4 * count
