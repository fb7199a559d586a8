"""Content can't kill: whatever an object contains, it costs that object only.

Cases are generated: any field of a real-looking object, at any depth, gets another type, an
extreme, or goes. What can still be read must then also be decided on without an error.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kube.informer import Informer
from grpo_kube.objects.errors import Denied, Expired, Unavailable
from grpo_kube.objects.resources import PODS, Object, ObjectKey, Selection, identity
from grpo_kube.objects.times import Observed
from grpo_kube.pacing import Backoff
from grpo_operator.admission.inventory import node_facts, pod_facts
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.next_action import decide
from grpo_operator.decide.observation import observe
from grpo_operator.loop.caches import Caches
from grpo_operator.records.names import GRPOJOBS
from grpo_operator.records.parsing import grpojob_record, job_record, pod_record, service_record
from grpo_operator.report.status import build_status, to_json
from tests.generated import cases
from tests.unit.dirty_objects import (
    EXTREMES,
    GRPOJOB,
    JOB,
    LABELS,
    NODE,
    PENDING,
    POD,
    RUNNING_JOB,
    SERVICE,
    STUCK,
    VALUES,
    dirty,
    places,
)
from tests.unit.operator_world import KEY, LIMITS, NOW
from tests.virtual_time import virtually

PARSERS: list[tuple[Callable[[Any], Any], Any]] = [
    (pod_record, POD), (job_record, JOB), (grpojob_record, GRPOJOB), (service_record, SERVICE),
    (node_facts, NODE), (pod_facts, POD),
]  # fmt: skip


@settings(max_examples=cases(60))
@given(data=st.data())
@pytest.mark.parametrize(
    ("parse", "base"), PARSERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_parser_names_what_it_can_not_read(
    parse: Callable[[Any], Any], base: Any, data: st.DataObject
) -> None:
    with contextlib.suppress(ValueError):
        parse(data.draw(dirty(base) | VALUES))


@settings(max_examples=cases(200))
@given(
    job=st.just(GRPOJOB) | dirty(GRPOJOB),
    child=st.just(RUNNING_JOB) | dirty(JOB),
    pods=st.lists(st.sampled_from([POD, PENDING, STUCK]).flatmap(dirty), max_size=2),
)
def test_what_can_be_read_can_be_decided_on(job: Any, child: Any, pods: list[Any]) -> None:
    decided(job, child, pods)


@pytest.mark.parametrize("base", [GRPOJOB, RUNNING_JOB, JOB, POD, PENDING, STUCK])
def test_every_field_takes_every_extreme(base: Any) -> None:
    for path in places(base):
        for value in EXTREMES:
            item = copy.deepcopy(base)
            place = item
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            decided(
                item if base is GRPOJOB else GRPOJOB,
                item if base in (JOB, RUNNING_JOB) else RUNNING_JOB,
                [item] if base in (POD, PENDING, STUCK) else [],
            )


def decided(job: Any, child: Any, pods: list[Any]) -> None:
    """Reads all, decides on what can be read and makes its status."""
    caches = Caches()
    for cache, items in ((caches.grpojobs, [job]), (caches.jobs, [child]), (caches.pods, pods)):
        for item in items:
            cache.put(item)
    for record in caches.grpojobs:
        seen = observe(
            record,
            list(caches.jobs),
            list(caches.pods),
            now=NOW,
            at=Observed(NOW),
            first_seen_tracker=FirstSeenTracker(),
        )
        to_json(build_status(seen, decide(seen, LIMITS)))


class Stream:
    """A cluster whose LIST and watch show what they are given, once; then the watch is silent."""

    def __init__(self, listed: list[Any], events: list[Any]) -> None:
        self.listed, self.events, self.shown = listed, events, asyncio.Event()

    async def pages(self, _: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        yield self.listed, 10

    async def watch(
        self, _: Selection, version: int, seconds: float
    ) -> AsyncIterator[tuple[str, Object]]:
        assert seconds > 0
        assert version >= 0
        events, self.events = self.events, []
        for event in events:
            yield event
        self.shown.set()
        await asyncio.Event().wait()


def clean(number: int) -> Any:
    item = copy.deepcopy(POD)
    item["metadata"] |= {"name": f"clean-{number}", "uid": f"clean-{number}"}
    return item


@settings(max_examples=cases(25))
@given(
    listed=st.lists(dirty(POD) | VALUES, max_size=20),
    events=st.lists(
        st.tuples(st.sampled_from(["ADDED", "MODIFIED", "DELETED"]), dirty(POD) | VALUES),
        max_size=40,
    ),
)
def test_the_watch_goes_on_over_any_objects(listed: list[Any], events: list[Any]) -> None:
    virtually(_watched(listed, events))


async def _watched(listed: list[Any], events: list[Any]) -> None:
    caches = Caches()
    script = Stream([*listed, clean(1)], [*events, ("ADDED", clean(2))])
    told: list[ObjectKey] = []
    backoff, selection = Backoff(0.01, 0.02), Selection(PODS)
    mirror = Informer(script, selection, caches.pods, told.extend, resync=60, backoff=backoff)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.follow())
    async with asyncio.timeout(20):
        await script.shown.wait()
    assert not task.done()
    task.cancel()
    assert {"clean-1", "clean-2"} <= {record.name for record in caches.pods}
    assert KEY in told


def changed(version: int, **status: Any) -> Any:
    item = clean(1)
    item["metadata"]["resourceVersion"] = str(version)
    item["status"] |= status
    return item


async def test_an_event_that_changes_nothing_that_is_read_wakes_nobody() -> None:
    caches, told = Caches(), list[ObjectKey]()
    events = [changed(100), changed(101, qosClass="Guaranteed"), changed(102, phase="Failed")]
    script = Stream([clean(1)], [("MODIFIED", item) for item in events])
    mirror = Informer(script, Selection(PODS), caches.pods, told.extend, resync=60)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.follow())
    async with asyncio.timeout(20):
        await script.shown.wait()
    task.cancel()
    assert told == [KEY, KEY]
    assert [(pod.version, pod.phase) for pod in caches.pods] == [(102, "Failed")]


@settings(max_examples=cases(100))
@given(item=dirty(POD))
def test_an_event_wakes_exactly_when_something_that_is_read_has_changed(item: Any) -> None:
    if not isinstance(item, dict):
        return
    item["metadata"] = copy.deepcopy(POD["metadata"])
    try:
        news = pod_record(item) != pod_record(POD)
    except Exception:  # unreadable: what was known of it is dropped
        news = True
    item["metadata"]["resourceVersion"] = "1000000"
    virtually(_woken(item, news))


async def _woken(item: Any, news: bool) -> None:
    caches, told = Caches(), list[ObjectKey]()
    script = Stream([POD], [("MODIFIED", item)])
    mirror = Informer(script, Selection(PODS), caches.pods, told.extend, resync=60)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.follow())
    async with asyncio.timeout(20):
        await script.shown.wait()
    task.cancel()
    assert len(told) == 1 + news


def broken(index: str, version: int = 7) -> Any:
    item = clean(7)
    item["metadata"]["resourceVersion"] = str(version)
    item["metadata"]["labels"] = {**LABELS, "batch.kubernetes.io/job-completion-index": index}
    return item


def test_an_unreadable_object_is_counted_logged_once_and_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caches = Caches()
    for _ in range(3):
        assert caches.pods.put(broken("abc")) is None
    assert caches.quarantine.counts()["pods"] == 1
    assert [record.getMessage() for record in caplog.records] == [
        "pods team-a/clean-7 can't be read and is set aside: "
        "metadata.labels[batch.kubernetes.io/job-completion-index]: 'abc' is not a number"
    ]
    caches.pods.put(broken("0"))
    assert caches.quarantine.counts()["pods"] == 0
    caches.pods.put(broken("²", version=8))
    assert len(caches.pods) == 0
    with caches.pods.relist() as listing:
        listing.finish(99)
    assert caches.quarantine.counts()["pods"] == 0


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    caches = Caches()
    caches.pods.put(clean(1))
    other = clean(2)
    other["metadata"]["namespace"] = "team-b"
    caches.pods.put(other)
    with caches.pods.relist("team-b") as listing:
        listing.finish(99)
    assert listing.changed == {ObjectKey("team-b", KEY.name)}
    assert [record.name for record in caches.pods] == ["clean-1"]


@given(item=VALUES | dirty(GRPOJOB))
def test_every_object_has_some_identity(item: Any) -> None:
    assert len(identity(item)) == 2


class Torn:
    """A cluster whose LISTs break off between two pages, so many times."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error, self.lists, self.watched = times, error, 0, asyncio.Event()

    async def pages(self, _: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        self.lists += 1
        yield [clean(self.lists)], 20
        if self.lists <= self.times:
            raise self.error
        yield [clean(0)], 20

    async def watch(self, *_: Any) -> AsyncIterator[tuple[str, Object]]:
        self.watched.set()
        await asyncio.Event().wait()
        yield "ADDED", {}


@pytest.mark.parametrize("times", [1, 2, 5, 8])
@pytest.mark.parametrize(
    "error", [Expired("410 the continue token is too old"), Unavailable("503")]
)
async def test_a_list_that_breaks_off_begins_anew_and_is_never_half(
    times: int, error: Exception
) -> None:
    caches, torn = Caches(), Torn(times, error)
    told: set[ObjectKey] = set()
    backoff, selection = Backoff(0.001, 0.002), Selection(PODS)
    mirror = Informer(torn, selection, caches.pods, told.update, resync=60, backoff=backoff)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.follow())
    async with asyncio.timeout(20):
        await mirror.settled.wait()
    task.cancel()
    assert sorted(record.name for record in caches.pods) == ["clean-0", f"clean-{times + 1}"]
    assert told == {KEY}


async def test_a_refusal_settles_a_mirror_and_is_told_until_it_is_over() -> None:
    caches, torn = Caches(), Torn(2, Denied("403 forbidden"))
    backoff, selection = Backoff(0.05, 0.1), Selection(GRPOJOBS, KEY.namespace)
    changed: set[ObjectKey] = set()
    mirror = Informer(torn, selection, caches.pods, changed.update, resync=60, backoff=backoff)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.follow())
    async with asyncio.timeout(20):
        await mirror.settled.wait()
    assert "forbidden" in mirror.not_served
    mirror.settled.clear()
    async with asyncio.timeout(20):
        await mirror.settled.wait()
    async with asyncio.timeout(20):
        await torn.watched.wait()
    task.cancel()
    assert (mirror.not_served, len(caches.pods)) == ("", 2)
