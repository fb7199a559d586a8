"""What single looks add to a job's usage: nothing while nothing happens, and each hold of GPUs
once."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.report import Progress
from grpo_api.status.status import GRPOJobStatus
from grpo_api.status.usage import AttemptUsage, Usage
from grpo_api.text.timing import Account, Clock
from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.observation import Observation, Pull, observe
from grpo_operator.loop.caches import REMEMBERED, DeletedPods
from grpo_operator.records.records import JobRecord, PodRecord
from grpo_operator.report.status import to_json
from tests.generated import cases
from tests.unit.operator_world import (
    GPU_PLAN,
    KEY,
    NOW,
    UID,
    active_status,
    after,
    at,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    terminated,
)

GPUS = {"placement": {"accelerator": "GPU", "nodes": 2}}
SIZE = {"gpus": 8, "nodes": 2}
WAIT = Decision(Action.WAIT)
CHILD, PODS = make_child(), (make_pod(0), make_pod(1))
GANG = (CHILD, *PODS)


def seen(
    status: dict[str, Any], *things: JobRecord | PodRecord, later: float = 0.0, **more: Any
) -> Observation:
    spec = {**GPUS, "placement": {**GPUS["placement"], **more.pop("placement", {})}}
    return make_seen(make_job(spec, status), *things, now=NOW + later, **more)


def told(status: GRPOJobStatus) -> Usage:
    assert status.usage
    return status.usage


def running(**more: Any) -> GRPOJobStatus:
    """The status after a gang of eight GPUs was seen to run, which was committed a minute ago."""
    committed = after(seen(active_status(plan=GPU_PLAN), make_child(), **more), WAIT)
    return after(seen(to_json(committed), *GANG, **more), WAIT)


def test_a_job_on_cpus_has_no_usage() -> None:
    assert after(make_seen(make_job(status=active_status()), *GANG), WAIT).usage is None


def test_time_that_passes_is_no_news_and_a_finished_step_brings_it_up_to_date() -> None:
    first = running()
    quiet = after(seen(to_json(first), *GANG, later=500.0), WAIT)
    assert quiet == first, "it costs no write"
    pull = make_pull(ago=0, step=1, account=Account(clock=Clock(loading=30)))
    usage = told(after(seen(to_json(first), *GANG, later=500.0, pull=pull), WAIT))
    assert (usage.as_of, usage.held_gpu_seconds, usage.gpu_seconds.loading) == (
        at(500),
        8 * 500.0,
        8 * 30.0,
    )


def test_a_clock_that_was_ahead_once_adds_no_gpu_time() -> None:
    before = to_json(running())
    before["usage"]["asOf"] = at(365 * 86400.0)
    ended = [make_pod(index, state=terminated(1, clock=400.0), arrived=0.0) for index in (0, 1)]
    usage = told(after(seen(before, make_child(), *ended, later=400.0), WAIT))
    assert (usage.as_of, usage.held_gpu_seconds) == (at(400), 8 * 400.0)


@settings(max_examples=cases(60))
@given(st.lists(st.tuples(st.integers(1, 600), st.integers(-86400, 86400)), max_size=5))
def test_a_step_of_the_operators_clock_neither_adds_nor_takes_gpu_time(
    looks: list[tuple[int, int]],
) -> None:
    """Rank 0 answers before each look; the clock is off by other seconds at each but the first."""
    tracker, status, elapsed = FirstSeenTracker(), to_json(running()), 0
    for number, (passed, clock_off) in enumerate([(0, 0), *looks], 1):
        elapsed += passed
        moment = Observed(elapsed)
        observation = observe(
            make_job(GPUS, status), [CHILD], PODS, now=NOW + elapsed + clock_off, at=moment,
            first_seen_tracker=tracker,
        )  # fmt: skip
        answer = Pull(Progress(attempt=1, step=number), moment, moment)
        new = after(replace(observation, pull=answer), WAIT)
        assert told(new).held_gpu_seconds == pytest.approx(8 * elapsed, abs=8)
        status = to_json(new)


@pytest.mark.parametrize(
    ("jump", "seconds"), [(0.0, 700.0), (-500.0, 400.0), (3600.0, 1060.0), (-3600.0, 1000.0)]
)
def test_a_node_whose_clock_is_set_meanwhile_can_not_leave_what_the_operator_saw(
    jump: float, seconds: float
) -> None:
    """It held its GPUs for 400 s at least, and not before its attempt began; an end before the
    begin tells nothing."""
    status = to_json(
        after(seen(to_json(running()), *GANG, later=400.0, pull=make_pull(ago=0, step=1)), WAIT)
    )
    ended = [
        make_pod(index, state=terminated(1, clock=700.0 + jump), arrived=0.0) for index in (0, 1)
    ]
    usage = told(after(seen(status, make_child(), *ended, later=1000.0), WAIT))
    assert [pod.seconds for pod in usage.attempts[0].pods] == [seconds, seconds]


def test_a_pod_that_ends_and_is_deleted_between_two_looks_is_timed_by_its_own_end() -> None:
    """The account went on a few seconds longer, until its kubelet told."""
    counted = make_pull(ago=0, step=1)
    status = to_json(after(seen(to_json(running()), *GANG, later=405.0, pull=counted), WAIT))
    ended = [make_pod(index, state=terminated(1, clock=400.0), arrived=0.0) for index in (0, 1)]
    gone = replace(seen(status, make_child(), later=500.0), deleted_pods=tuple(ended))
    usage = told(after(gone, WAIT))
    assert [pod.seconds for pod in usage.attempts[0].pods] == [400.0, 400.0]
    forgotten = told(after(seen(to_json(after(gone, WAIT)), make_child(), later=900.0), WAIT))
    assert forgotten.held_gpu_seconds == usage.held_gpu_seconds == 8 * 400.0


def test_only_the_last_pods_that_told_of_their_end_are_remembered() -> None:
    departed = DeletedPods()
    departed.remember(make_pod(0))
    assert not departed.of_job(KEY, UID)
    pods = [
        replace(make_pod(0, state=terminated(1)), uid=f"pod-{number}")
        for number in range(REMEMBERED + 2)
    ]
    for pod in pods:
        departed.remember(pod)
    assert [pod.uid for pod in departed.of_job(KEY, UID)] == [pod.uid for pod in pods[2:]]
    assert not departed.of_job(KEY, "another of its name")
    for pod in pods:
        departed.remember(replace(pod, uid=f"other-{pod.uid}", job_key=KEY._replace(name="other")))
    assert not departed.of_job(KEY, UID)


def test_a_pod_that_is_deleted_twice_is_remembered_once() -> None:
    """Somebody takes its label off, which its watch shows as a deletion, and puts it on again."""
    departed = DeletedPods()
    pod = make_pod(0, state=terminated(1))
    for _ in range(2):
        departed.remember(pod)
    assert departed.of_job(KEY, UID) == (pod,)
    for number in range(REMEMBERED + 2):
        departed.remember(replace(pod, uid=f"pod-{number}", job_key=KEY._replace(name="other")))
    assert not departed.of_job(KEY, UID)


def test_pods_that_only_say_that_they_are_the_jobs_are_not_counted() -> None:
    stranger = make_pod(0, attempt=1, by="somebody")
    status = {**to_json(running()), "attempt": 2, "jobUid": "job-2"}
    usage = told(after(seen(status, make_child(2), stranger, make_pod(1, attempt=1)), WAIT))
    names = {pod.name for one in usage.attempts for pod in one.pods}
    assert names == {pod.name for pod in GANG[1:] if isinstance(pod, PodRecord)}, (
        "only those that were known"
    )


def test_many_attempts_have_few_records_and_the_same_sums() -> None:
    records = [
        AttemptUsage(
            attempt=number,
            gpus=8,
            nodes=2,
            start_time=at(0),
            ended="Error",
            gone_seconds=10,
            gpu_hour_price=2.0,
        )
        for number in range(1, 9)
    ]
    status = active_status(
        9, plan=GPU_PLAN, usage=Usage(as_of=at(0), attempts=records).model_dump(mode="json")
    )
    usage = told(after(seen(status, make_child(9)), WAIT))
    assert [one.attempt for one in usage.attempts] == [4, 5, 6, 7, 8, 9]
    assert (usage.earlier.attempts, usage.held_gpu_seconds) == (3, 8 * 40.0)
    assert usage.cost == pytest.approx(8 * 40.0 / 3600 * 2.0, abs=1e-3)
