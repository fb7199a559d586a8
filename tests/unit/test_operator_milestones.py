"""Times to the first attempt's milestones and restarts by reason: each counted by the write that
brings it about."""

from itertools import pairwise
from typing import Any

import pytest

from grpo_api.report.metrics import RESTARTS, TIMES_TO, Metric
from grpo_api.status.status import GRPOJobStatus
from grpo_kube.work_queue import WorkQueue
from grpo_operator.process.metrics_server import Metrics, milestones, restart_reason
from grpo_operator.records.records import GRPOJobRecord
from tests.unit.operator_world import NOW, active_status, at, condition, make_job

STEPPED = {"step": 1, "lastStepTime": at(0)}


def job(*true: str, **more: Any) -> GRPOJobRecord:
    return make_job(status=active_status(conditions=[condition(kind) for kind in true], **more))


def told(before: GRPOJobRecord, after: GRPOJobRecord, now: float = NOW) -> list[Metric]:
    return [metric for metric, _ in milestones(before, after.status, now)]


def test_each_milestone_is_told_by_the_write_that_reaches_it_and_by_no_other() -> None:
    story = [
        job(attempt=0),
        job("Admitted"),
        job("Admitted", "Scheduled"),
        job("Admitted", "Scheduled", "Running"),
    ]
    story.append(job("Admitted", "Scheduled", "Running", progress=STEPPED))
    assert [told(before, after) for before, after in pairwise(story)] == [[one] for one in TIMES_TO]
    assert [told(one, one) for one in story] == [[]] * len(story)
    assert told(story[0], story[-1]) == list(TIMES_TO), (
        "an operator that was away tells all at once"
    )


def test_times_count_from_the_creation_and_clocks_that_disagree_give_none_below_0() -> None:
    before, new = job(attempt=0), job("Admitted").status
    assert [round(seconds) for _, seconds in milestones(before, new, before.created + 90)] == [90]
    assert [seconds for _, seconds in milestones(before, new, before.created - 90)] == [0.0]


def test_a_later_attempt_and_one_that_was_interrupted_have_no_such_times() -> None:
    assert told(job(attempt=1), job("Admitted", attempt=2)) == []
    assert told(job(activeSeconds=60), job("Admitted", "Running", activeSeconds=60)) == []


def end(attempt: int, reason: str) -> dict[str, Any]:
    return {"attempt": attempt, "reason": reason, "endTime": at(0)}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({}, {"restarts": 1, "ends": [end(1, "Hang")]}, "Hang"),
        (
            {"restarts": 1},
            {"restarts": 1, "uncountedRestarts": 1, "ends": [end(2, "Preempted")]},
            "Preempted",
        ),
        ({}, {"ends": [end(1, "SchedulingTimeout")]}, None),
        ({"restarts": 3}, {"restarts": 0}, None),
    ],
)
def test_a_restart_has_the_reason_of_the_end_before(
    before: Any, after: Any, reason: str | None
) -> None:
    assert restart_reason(job(**before), job(**after).status) == reason


async def test_the_metrics_hold_no_series_of_a_job_whatever_comes_and_goes() -> None:
    metrics = Metrics(WorkQueue(), 1)
    families = {one.name: len(one.samples) for one in metrics.registry.collect()}
    for number in range(1000):
        before = make_job(
            status=active_status(conditions=[]), name=f"job-{number}", uid=f"uid-{number}"
        )
        metrics.record_status_write(before, after(number), NOW)
    assert {one.name: len(one.samples) for one in metrics.registry.collect()} == families
    assert metrics.registry.get_sample_value(RESTARTS.name, {"reason": "Hang"}) == 500
    assert metrics.registry.get_sample_value(RESTARTS.name, {"reason": "OutOfMemory"}) == 0


def after(number: int) -> GRPOJobStatus:
    """Of two jobs one gets to its first step, the other is restarted."""
    if number % 2:
        return job("Admitted", "Scheduled", "Running", progress=STEPPED).status
    return job("Admitted", restarts=1, ends=[end(1, "Hang")]).status
