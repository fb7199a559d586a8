"""What a mirror does with each event, and from where it watches on: the LIST that heals all comes
much later."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

from grpo_kube.informer import Informer
from grpo_kube.objects.errors import ClusterError, Stale, Unavailable
from grpo_kube.objects.resources import PODS, Object, ObjectKey, Selection
from grpo_operator.loop.caches import Caches
from grpo_operator.records.records import PodRecord

RESYNC = 600.0
"""Seconds between two LISTs."""


def pod(name: str, version: int, phase: str = "Running") -> Object:
    """A pod of a GRPOJob of its own."""
    labels = {"grpo.dev/job-name": name, "grpo.dev/attempt": "1"}
    meta = {
        "namespace": "n",
        "name": name,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "labels": labels,
    }
    return {"metadata": meta, "spec": {}, "status": {"phase": phase}}


class Script:
    """A cluster whose watches show one part of the events each, then break; the last one stays
    open."""

    def __init__(
        self,
        listed: Sequence[Object],
        *watches: Sequence[tuple[str, Object]],
        broken_by: type[ClusterError] = Unavailable,
    ) -> None:
        self.listed = listed
        self.broken_by = broken_by
        self.watches = list(watches)
        self.lists = 0
        self.watched_from: list[int] = []

    async def pages(self, _: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        """One page, of version 10 or that of its newest object."""
        self.lists += 1
        versions = [int(item["metadata"]["resourceVersion"]) for item in self.listed]
        yield list(self.listed), max(10, *versions, 0)

    async def watch(
        self, _: Selection, version: int, seconds: float
    ) -> AsyncIterator[tuple[str, Object]]:
        """The next part of the events."""
        self.watched_from.append(version)
        for event in self.watches.pop(0):
            yield event
        if self.watches:
            raise self.broken_by("the watch broke")
        await asyncio.sleep(seconds)


async def mirrored(script: Script, seconds: float) -> tuple[dict[str, str], list[ObjectKey]]:
    """The phases of the pods that are known after so long, by name, and the jobs that were woken,
    in order."""
    caches, woken = Caches(), list[ObjectKey]()
    mirror = Informer(script, Selection(PODS), caches.pods, woken.extend, resync=RESYNC)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.follow())
    await asyncio.sleep(seconds)
    task.cancel()
    return {record.name: record.phase for record in caches.pods}, woken


async def test_every_event_is_in_the_cache_and_wakes_its_job_before_the_next_list() -> None:
    events = [
        ("ADDED", pod("b", 11)),
        ("MODIFIED", pod("b", 12, "Failed")),
        ("DELETED", pod("a", 13)),
    ]
    script = Script([pod("a", 5)], events)
    known, woken = await mirrored(script, seconds=1.0)
    assert known == {"b": "Failed"}
    assert [key.name for key in woken] == ["a", "b", "b", "a"]
    assert script.lists == 1


async def test_a_pod_that_changes_its_job_wakes_both() -> None:
    relabelled = pod("a", 11)
    relabelled["metadata"]["labels"]["grpo.dev/job-name"] = "b"
    listed = pod("a", 5)
    _, woken = await mirrored(Script([listed], [("MODIFIED", relabelled)]), seconds=1.0)
    assert sorted(key.name for key in woken) == ["a", "a", "b"]  # the LIST, and the event
    caches = Caches()
    caches.pods.put(listed)
    with caches.pods.relist() as relist:
        relist.add(relabelled)
    assert {key.name for key in relist.changed} == {"a", "b"}


async def test_a_watch_that_breaks_goes_on_after_the_last_event_or_bookmark() -> None:
    bookmark = {"metadata": {"resourceVersion": "40"}}
    script = Script(
        [], [("ADDED", pod("a", 12))], [("BOOKMARK", bookmark)], [("ADDED", pod("b", 41))]
    )
    known, _ = await mirrored(script, seconds=60.0)
    assert set(known) == {"a", "b"}
    assert script.watched_from == [10, 12, 40]
    assert script.lists == 1


async def test_a_watch_whose_version_is_too_old_is_followed_by_a_list() -> None:
    """410 Gone: the events in between are lost, and with them a deletion."""
    script = Script([pod("a", 5)], [("ADDED", pod("b", 12))], [], broken_by=Stale)
    task = asyncio.create_task(mirrored(script, seconds=60.0))
    await asyncio.sleep(0.01)
    script.listed = [pod("b", 12)]
    known, _ = await task
    assert set(known) == {"b"}
    assert script.watched_from == [10, 12]
    assert script.lists == 2


async def test_an_event_whose_version_can_t_be_read_does_not_move_the_watch() -> None:
    unreadable = pod("b", 13)
    unreadable["metadata"]["resourceVersion"] = "newest"
    script = Script([], [("ADDED", pod("a", 12)), ("ADDED", unreadable)], [])
    await mirrored(script, seconds=60.0)
    assert script.watched_from == [10, 12]


async def test_a_deletion_that_no_event_told_of_is_found_by_the_next_list() -> None:
    script = Script([pod("a", 5)], [], [], [])
    task = asyncio.create_task(mirrored(script, seconds=2 * RESYNC))
    await asyncio.sleep(RESYNC / 2)
    script.listed = []
    script.watches = [[], [], []]
    known, woken = await task
    assert known == {}
    assert [key.name for key in woken] == ["a", "a"]


class Wanting(Script):
    """A cluster that changes while its first LIST is under way, and whose source of events asks for
    another."""

    mirror: Informer[PodRecord]

    async def pages(self, selection: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        """Show the pods as they were, and ask for a LIST of those that have come since."""
        async for page in super().pages(selection):
            yield page
        if self.lists == 1:
            self.listed = [pod("a", 5), pod("b", 11)]
            self.mirror.request_list()


async def test_a_list_that_is_asked_for_during_another_follows_it_at_once() -> None:
    script, caches = Wanting([pod("a", 5)]), Caches()
    script.mirror = Informer(script, Selection(PODS), caches.pods, lambda _: None, resync=RESYNC)  # type: ignore[arg-type]
    task = asyncio.create_task(script.mirror.relist_forever())
    await asyncio.sleep(1.0)
    task.cancel()
    assert {record.name for record in caches.pods} == {"a", "b"}
    assert script.lists == 2


class Away:
    """A cluster that answers nothing, and notes when it was asked."""

    def __init__(self) -> None:
        self.asked_at: list[float] = []

    async def pages(self, _: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        """Fail before the first page."""
        self.asked_at.append(asyncio.get_running_loop().time())
        raise Unavailable("the API server is away")
        yield [], 0


async def test_a_list_that_fails_is_tried_again_after_pauses_that_double_up_to_a_limit() -> None:
    cluster = Away()
    mirror = Informer(cluster, Selection(PODS), Caches().pods, lambda _: None, resync=RESYNC)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.follow())
    await asyncio.sleep(300.0)
    task.cancel()
    pauses = [later - earlier for earlier, later in pairwise(cluster.asked_at)]
    assert len(pauses) > 6
    for number, pause in enumerate(pauses):
        due = min(30.0, 2.0**number)
        assert 0.5 * due <= pause <= 1.5 * due


class Flaky:
    """A cluster that is away for the given LISTs, by their number."""

    def __init__(self, away: set[int]) -> None:
        self.away = away
        self.asked_at: list[float] = []

    async def pages(self, _: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        """An empty LIST, or none."""
        self.asked_at.append(asyncio.get_running_loop().time())
        if len(self.asked_at) in self.away:
            raise Unavailable("the API server is away")
        yield [], 5


async def test_a_list_that_fails_long_after_another_outage_is_tried_again_soon() -> None:
    cluster = Flaky({1, 2, 3, 4, 5, 7})
    mirror = Informer(cluster, Selection(PODS), Caches().pods, lambda _: None, resync=RESYNC)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.relist_forever())
    await asyncio.sleep(100.0 + 2 * RESYNC)
    task.cancel()
    assert cluster.asked_at[7] - cluster.asked_at[6] <= 1.5


async def test_an_api_server_that_was_restored_from_a_backup_is_believed() -> None:
    """Its objects and their versions are again what they were; what was deleted is there again."""
    since_the_backup = [("MODIFIED", pod("b", 30, "Failed")), ("DELETED", pod("a", 31))]
    after_it = [("MODIFIED", pod("a", 12, "Failed"))]
    script = Script([pod("a", 5), pod("b", 6)], since_the_backup, after_it, broken_by=Stale)
    known, woken = await mirrored(script, seconds=60.0)
    assert known == {"a": "Failed", "b": "Running"}
    assert [key.name for key in woken[-3:]] == ["a", "b", "a"]
