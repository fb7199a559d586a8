"""How a GRPOJob is told that it can't be read: by its conditions alone, by an event, and until it
was told."""

import asyncio
from typing import Any

import pytest

from grpo_api.text.contract import LABEL_QUEUE
from grpo_kube.objects.errors import Conflict, Denied, Unavailable
from grpo_kube.objects.resources import Object, Resource
from grpo_kube.objects.times import Observed, ProcessClock
from grpo_operator.loop.caches import Caches
from grpo_operator.loop.cluster_state import ReservedGangs
from grpo_operator.loop.quarantine_reporter import QuarantineReporter
from tests.unit.dirty_objects import GRPOJOB
from tests.unit.operator_world import (
    KEY,
    LIMITS,
    NOW,
    SPEC,
    UID,
    active_status,
    condition,
    job_object,
    make_child,
)
from tests.unit.queue_world import cluster, gang, judged
from tests.unit.queue_world import job as queued_job


class Recorded:
    """Takes what is written; denies patches, or all."""

    def __init__(self, *, deny: type[Exception] | None = None) -> None:
        self.deny, self.patches, self.events = deny, list[Any](), list[Any]()

    async def patch(
        self, _kind: Resource, namespace: str, name: str, patch: Object, _subresource: str
    ) -> Object:
        self.patches.append((namespace, name, patch))
        if self.deny:
            raise self.deny("no")
        return patch

    async def create(self, _: Any, namespace: str, body: Object) -> Object:
        self.events.append((namespace, body))
        return body


def newer() -> Any:
    return {
        **GRPOJOB,
        "status": {**GRPOJOB["status"], "phase": "Draining", "conditions": [condition("Admitted")]},
    }


async def test_a_status_of_a_newer_version_is_told_by_its_conditions_alone() -> None:
    cluster, caches = Recorded(), Caches()
    teller = QuarantineReporter(cluster, caches.quarantine, lambda: NOW)  # type: ignore[arg-type]
    assert caches.grpojobs.put(newer()) is None
    item, problem = teller._pending.get_nowait()
    await teller.report(item, problem)
    (namespace, name, patch) = cluster.patches[0]
    assert (namespace, name, list(patch["status"])) == (*KEY, ["conditions"])
    kept, told = patch["status"]["conditions"]
    assert kept == condition("Admitted")
    assert (told["type"], told["status"], told["reason"]) == (
        "Readable",
        "False",
        "StatusUnreadable",
    )
    assert "Draining" in told["message"]
    await teller.report({**item, "status": {"conditions": [kept, told]}}, problem)
    assert len(cluster.patches) == 1
    assert cluster.events == []


async def test_another_problem_of_an_unreadable_job_is_no_transition_of_its_condition() -> None:
    cluster, times = Recorded(), iter([NOW, NOW + 60])
    reporter = QuarantineReporter(cluster, Caches().quarantine, lambda: next(times))  # type: ignore[arg-type]
    await reporter.report(newer(), "status.phase: Draining")
    first = cluster.patches[0][2]["status"]["conditions"][-1]
    await reporter.report({**newer(), "status": {"conditions": [first]}}, "status.attempt: many")
    second = cluster.patches[1][2]["status"]["conditions"][-1]
    assert "status.attempt" in second["message"]
    assert second["lastTransitionTime"] == first["lastTransitionTime"]


async def test_where_not_even_conditions_can_be_written_an_event_tells() -> None:
    cluster = Recorded(deny=Denied)
    reporter = QuarantineReporter(cluster, Caches().quarantine, lambda: NOW)  # type: ignore[arg-type]
    await reporter.report(newer(), "status.phase: unknown")
    ((namespace, event),) = cluster.events
    assert (namespace, event["involvedObject"]["name"], event["reason"]) == (
        *KEY,
        "StatusUnreadable",
    )
    assert "status.phase: unknown" in event["message"]


class Changing(Recorded):
    """Has changed since it was read, once; then fails as often as it is told to."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.stale, self.failures, self.told = True, failures, asyncio.Event()

    async def get(self, *_: Any) -> Object:
        return {**newer(), "metadata": {**GRPOJOB["metadata"], "resourceVersion": "99"}}

    async def patch(
        self, _kind: Resource, namespace: str, name: str, patch: Object, _subresource: str
    ) -> Object:
        if self.stale:
            self.stale = False
            raise Conflict("changed")
        if self.failures:
            self.failures -= 1
            self.told.set()
            raise Unavailable("away")
        self.told.set()
        return await super().patch(_kind, namespace, name, patch, _subresource)


@pytest.mark.parametrize("failures", [0, 1])
async def test_what_could_not_be_told_is_told_with_the_next_list(failures: int) -> None:
    cluster, caches = Changing(failures), Caches()
    teller = QuarantineReporter(cluster, caches.quarantine, lambda: NOW)  # type: ignore[arg-type]
    caches.grpojobs.put(newer())
    telling = asyncio.create_task(teller.run())
    for _ in range(1 + failures):
        async with asyncio.timeout(20):
            await cluster.told.wait()
        cluster.told.clear()
        await asyncio.sleep(0)
        caches.grpojobs.put(newer())
    await asyncio.sleep(0.01)
    telling.cancel()
    assert [patch["metadata"]["resourceVersion"] for _, _, patch in cluster.patches][:1] == [
        "11" if failures else "99"
    ]
    assert teller._pending.empty()


def stored(phase: str, version: int, **more: Any) -> Any:
    """A job whose second attempt was committed a minute ago, with a status of this phase."""
    meta = {
        "namespace": KEY.namespace,
        "name": KEY.name,
        "uid": UID,
        "resourceVersion": str(version),
        "generation": 1,
    }
    return {
        "metadata": meta,
        "spec": SPEC,
        "status": {**active_status(attempt=2), **more, "phase": phase},
    }


def gangs(caches: Caches, later: float = 0.0) -> ReservedGangs:
    clock = ProcessClock(lambda: NOW + later, lambda: Observed(NOW))
    return ReservedGangs(caches, clock, LIMITS.scheduling_timeout_seconds)


def held(caches: Caches, later: float = 0.0) -> list[int]:
    """The attempts that admission must count, whether it asks for all jobs or for this one."""
    one = gangs(caches, later).get(KEY)
    found = [job.status.attempt for job in gangs(caches, later)]
    assert found == ([one.status.attempt] if one else [])
    return found


@pytest.mark.parametrize("listed", [False, True])
def test_a_gang_whose_job_can_not_be_read_any_more_keeps_its_place_while_its_job_lives(
    listed: bool,
) -> None:
    caches = Caches()
    caches.grpojobs.put(stored("Starting", 5))
    caches.jobs._store(make_child(2))
    if listed:
        with caches.grpojobs.relist() as listing:
            listing.begin()
            listing.add(stored("Draining", 6))
            listing.finish(7)
    else:
        caches.grpojobs.put(stored("Draining", 6))
    assert caches.grpojobs.get(KEY) is None, "nobody may act on an old picture"
    assert held(caches) == [2]
    caches.jobs._store(make_child(2, ended="Complete"))
    assert held(caches) == []
    caches.jobs._store(make_child(1))
    assert held(caches) == [], "the Job of another attempt"


@pytest.mark.parametrize(
    ("more", "attempts"),
    [
        ({}, [2]),
        ({"progress": "far"}, [2]),
        ({"plan": {"nodes": "two"}}, []),
        ({"attempt": "2nd"}, []),
    ],
)
def test_what_it_reserves_is_read_by_an_operator_that_never_could_read_it_whole(
    more: dict[str, Any], attempts: list[int]
) -> None:
    caches = Caches()
    caches.jobs._store(make_child(2))
    assert caches.grpojobs.put(stored("Draining", 5, **more)) is None
    assert held(caches) == attempts


def test_what_a_newer_version_reserves_counts_and_not_what_was_known_before() -> None:
    caches = Caches()
    caches.grpojobs.put(stored("Starting", 5))
    caches.grpojobs.put(stored("Draining", 6, attempt=3))
    caches.jobs._store(make_child(2))
    assert held(caches) == []
    caches.jobs._store(make_child(3))
    assert held(caches) == [3]


def test_one_that_may_still_start_when_it_can_be_read_again_keeps_its_place_until_then() -> None:
    caches, left = Caches(), LIMITS.scheduling_timeout_seconds - 60
    caches.grpojobs.put(stored("Starting", 5, jobUid=""))
    caches.grpojobs.put(stored("Draining", 6, jobUid=""))
    assert (held(caches), gangs(caches).requeue_after) == ([2], left)
    assert (held(caches, left - 1), gangs(caches, left - 1).requeue_after) == ([2], 1)
    assert (held(caches, left), gangs(caches, left).requeue_after) == ([], None)
    caches.jobs._store(make_child(2))
    assert (held(caches, left), gangs(caches).requeue_after) == ([2], None), (
        "it has started after all"
    )


@pytest.mark.parametrize(
    "more", [{"conditions": [condition("Admitted", "False")]}, {"jobUid": "job-2"}]
)
def test_one_that_can_not_start_any_more_keeps_nothing(more: Any) -> None:
    caches = Caches()
    caches.grpojobs.put(stored("Starting", 5, **more))
    caches.grpojobs.put(stored("Draining", 6, **more))
    assert (held(caches), gangs(caches).requeue_after) == ([], None)


@pytest.mark.parametrize("gone", ["deleted", "not listed", "readable"])
def test_what_was_known_of_it_is_forgotten_with_it(gone: str) -> None:
    caches = Caches()
    caches.grpojobs.put(stored("Starting", 5))
    caches.jobs._store(make_child(2))
    caches.grpojobs.put(stored("Draining", 6))
    if gone == "deleted":
        caches.grpojobs.discard(KEY, UID)
    elif gone == "not listed":
        with caches.grpojobs.relist() as listing:
            listing.begin()
            listing.finish(7)
    else:
        caches.grpojobs.put(stored("Running", 7))
    assert held(caches) == ([2] if gone == "readable" else [])
    assert not caches.grpojobs.quarantined_records


@pytest.mark.parametrize("step", [0, -86400, 600])
@pytest.mark.parametrize(("first", "left"), [(NOW, 240.0), (NOW - 86400, 300.0)])
def test_a_clock_that_is_set_holds_no_place_for_longer_or_shorter(
    first: float, left: float, step: float
) -> None:
    """The attempt was committed a minute ago; a time in the future counts from the first sight."""
    caches, wall, monotonic = Caches(), [first], [0.0]
    caches.grpojobs.put(stored("Draining", 6, jobUid=""))
    clock = ProcessClock(lambda: wall[0], lambda: Observed(monotonic[0]))
    reserved = ReservedGangs(caches, clock, LIMITS.scheduling_timeout_seconds)
    assert (len(list(reserved)), reserved.requeue_after) == (1, left)
    wall[0], monotonic[0] = first + left - 1 + step, left - 1
    assert (len(list(reserved)), reserved.requeue_after) == (1, 1.0)
    monotonic[0] = left
    assert (list(reserved), reserved.requeue_after) == ([], None)


@pytest.mark.parametrize(("workload", "is_free"), [("", False), ("of-kueue", True)])
def test_a_gang_that_gets_a_queue_name_keeps_the_place_that_the_operator_gave_it(
    workload: str, is_free: bool
) -> None:
    """Where Kueue admitted the unbound gang, Kueue's quota counts it."""
    caches = Caches()
    spec = {"placement": {"accelerator": "GPU"}}
    named = {LABEL_QUEUE: "team"}
    caches.grpojobs.put(job_object(spec, active_status(plan=gang(1, 8)), labels=named))
    caches.jobs._store(make_child(workload=workload))
    waiting = queued_job("next", gang(1, 8))
    verdicts = judged([*gangs(caches), waiting], cluster(8))
    assert verdicts[waiting.uid].admitted is is_free
