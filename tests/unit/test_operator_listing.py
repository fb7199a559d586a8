"""A LIST that comes in pages while events go on: the cache ends up like the cluster, whatever
overtakes what.

A small cluster keeps every version of its objects. A LIST shows one moment of it, page by page;
events come in their order but late, answers to our own writes come early, and some objects can't be
read.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kube.cache import Cache, Relist, version_of
from grpo_kube.client import each_listed
from grpo_kube.objects.resources import Object, ObjectKey, Selection
from grpo_kube.pacing import LOOP_BUDGET
from grpo_operator.loop.caches import Caches
from grpo_operator.process.handlers import take
from grpo_operator.records.records import PodRecord
from tests.generated import cases
from tests.virtual_time import virtually

NAMES = ("a", "b", "c", "d")


def pod(name: str, uid: str, version: int, readable: bool = True) -> Object:
    """A pod of a GRPOJob of its own."""
    labels = {"grpo.dev/job-name": name, "grpo.dev/attempt": "1" if readable else "none"}
    meta = {
        "namespace": "n",
        "name": name,
        "uid": uid,
        "resourceVersion": str(version),
        "labels": labels,
    }
    return {"metadata": meta, "spec": {}, "status": {}}


@dataclass
class World:
    """The objects as they are, and how the operator hears of them."""

    now: dict[str, Object] = field(default_factory=dict)
    version: int = 0
    events: list[tuple[str, Object]] = field(default_factory=list)
    """What has happened and was not heard yet."""
    page: list[Object] = field(default_factory=list)
    """What the LIST under way still has to show."""
    listed_at: int = 0
    answers: list[Object] = field(default_factory=list)
    """What answers to our own writes still have to show: they may come after later events."""
    caches: Caches = field(default_factory=Caches)
    listing: Relist[PodRecord] | None = None
    unselected: dict[str, Object] = field(default_factory=dict)
    """Objects whose label is off: neither LIST nor watch shows them."""

    @property
    def cache(self) -> Cache[PodRecord]:
        return self.caches.pods

    def change(self, name: str, readable: bool) -> None:
        """Creates or modifies an object."""
        self.version += 1
        known = self.now.get(name) or self.unselected.pop(name, None)
        uid = known["metadata"]["uid"] if known else f"{name}-{self.version}"
        self.now[name] = pod(name, uid, self.version, readable)
        self.events.append(("MODIFIED", self.now[name]))

    def delete(self, name: str) -> None:
        self.version += 1
        self.unselected.pop(name, None)
        if name in self.now:
            meta = self.now.pop(name)["metadata"]
            self.events.append(("DELETED", pod(name, meta["uid"], self.version)))

    def unlabel(self, name: str) -> None:
        """Takes the label off, which a watch with a selector shows as a deletion; `change` puts it
        on again."""
        before = self.now.get(name)
        if before:
            self.delete(name)
            self.unselected[name] = before

    def hear(self, lost: bool = False) -> None:
        """The next event arrives, or is lost."""
        if not self.events:
            return
        kind, item = self.events.pop(0)
        if lost:
            return
        if kind == "DELETED":
            self.cache.discard(ObjectKey("n", item["metadata"]["name"]), *version_of(item))
        else:
            self.cache.put(item)

    def answered(self, name: str) -> None:
        """The answer to a write of ours shows an object before its event does."""
        if name in self.now:
            self.cache.put(self.now[name])

    def write(self, name: str) -> None:
        """A write of ours, whose answer shows the object as it is now."""
        if name in self.now:
            self.answers.append(self.now[name])

    def late_answer(self) -> None:
        if self.answers:
            self.cache.put(self.answers.pop(0))

    def begin_list(self, again: bool) -> None:
        """A LIST begins, or the one under way has expired and begins anew."""
        if self.listing is None:
            self._context = self.cache.relist()
            self.listing = self._context.__enter__()
        elif not again:
            return
        self.listing.begin()
        self.page, self.listed_at = list(self.now.values()), self.version

    def show(self) -> None:
        """The next object of the LIST; its end, when there is none."""
        if self.listing is None:
            return
        if self.page:
            self._told(lambda listing: listing.add(self.page.pop(0)))
        else:
            self._told(lambda listing: listing.finish(self.listed_at))
            self._context.__exit__(None, None, None)
            self.listing = None

    def _told(self, step: Any) -> None:
        """Whatever the LIST changes in the cache, it tells, but for versions alone."""
        assert self.listing
        before = self.content()
        step(self.listing)
        after = self.content()
        differs = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert differs <= self.listing.changed

    def content(self) -> dict[ObjectKey, PodRecord]:
        return {record.key: replace(record, version=0) for record in self.cache}

    def readable(self) -> dict[str, int]:
        """Version by name of what can be read now."""
        metas = [item["metadata"] for item in self.now.values()]
        return {
            m["name"]: int(m["resourceVersion"])
            for m in metas
            if m["labels"]["grpo.dev/attempt"] == "1"
        }

    def kept(self) -> dict[str, int]:
        return {record.name: record.version for record in self.cache}


NAME = st.sampled_from(NAMES)
STEPS = st.one_of(
    st.tuples(st.just("change"), NAME, st.sampled_from([True, True, False])),
    st.tuples(st.just("delete"), NAME),
    st.tuples(st.just("unlabel"), NAME),
    st.tuples(st.just("hear")),
    st.tuples(st.just("hear")),
    st.tuples(st.just("answered"), NAME),
    st.tuples(st.just("write"), NAME),
    st.tuples(st.just("late_answer")),
    st.tuples(st.just("begin_list"), st.booleans()),
    st.tuples(st.just("show")),
    st.tuples(st.just("show")),
)


def play(steps: list[Any], lost: bool) -> World:
    world = World()
    for name, *arguments in steps:
        getattr(world, name)(*arguments, **({"lost": True} if lost and name == "hear" else {}))
    return world


@settings(max_examples=cases(100))
@given(st.lists(STEPS, min_size=12, max_size=60))
def test_with_every_event_heard_the_cache_is_like_the_cluster(steps: list[Any]) -> None:
    world = play(steps, lost=False)
    while world.listing:
        world.show()
    while world.events:
        world.hear()
    assert world.kept() == world.readable()
    assert world.caches.quarantine.counts().get("pods", 0) == len(world.now) - len(world.readable())


@settings(max_examples=cases(100))
@given(st.lists(STEPS, min_size=12, max_size=60), st.booleans())
def test_one_more_list_heals_whatever_no_event_told_of(steps: list[Any], late: bool) -> None:
    world = play(steps, lost=True)
    world.events.clear()
    while world.listing:
        world.show()
    world.begin_list(again=False)
    if late:
        world.change("a", True)
    while world.listing:
        world.show()
    while world.events:
        world.hear()
    assert world.kept() == world.readable()


def test_the_answer_to_a_write_of_a_deleted_object_does_not_bring_it_back() -> None:
    world = World()
    world.change("a", True)
    world.write("a")
    world.delete("a")
    world.hear()
    world.hear()
    world.late_answer()
    assert world.kept() == {}


def test_the_answer_to_a_write_does_not_replace_the_next_object_of_that_name() -> None:
    """A LIST showed that one, so that no event tells of the first one's deletion."""
    cache = Caches().pods
    cache.put(pod("a", "uid-1", 5))
    with cache.relist() as relist:
        relist.begin()
        relist.add(pod("a", "uid-2", 9))
        relist.finish(9)
    cache.put(pod("a", "uid-1", 6))
    (record,) = cache
    assert (record.uid, record.version) == ("uid-2", 9)


def test_a_label_that_is_back_before_its_loss_is_heard_of_keeps_the_object() -> None:
    world, deleted = World(), list[PodRecord]()
    world.cache.on_deleted = deleted.append
    world.change("a", True)
    world.unlabel("a")
    world.change("a", True)
    world.answered("a")
    world.hear()
    world.hear()
    assert (world.kept(), deleted) == ({"a": 3}, [])


def test_an_object_that_was_deleted_after_the_list_began_does_not_come_back() -> None:
    world = World()
    world.change("a", True)
    world.hear()
    world.begin_list(again=False)
    world.delete("a")
    world.hear()
    while world.listing:
        world.show()
    assert (world.kept(), world.cache.ghosts) == ({}, 0)


def test_a_deletion_that_only_a_list_shows_is_reported_and_final() -> None:
    deleted: list[PodRecord] = []
    cache = Caches().pods
    cache.on_deleted = deleted.append
    cache.put(pod("a", "a-1", 5))
    with cache.relist() as relist:
        relist.begin()
        relist.finish(6)
    assert [record.uid for record in deleted] == ["a-1"]
    # The answer to an earlier write of ours comes late.
    assert cache.put(pod("a", "a-1", 5)) is None
    assert cache.ghosts == 1


def test_a_list_that_is_older_than_an_event_does_not_undo_it() -> None:
    world = World()
    world.change("a", True)
    world.hear()
    world.begin_list(again=False)
    world.change("a", True)
    world.hear()
    while world.listing:
        world.show()
    assert world.kept() == {"a": 2}


class Counted(dict[str, Any]):
    """An object that counts how often its status is read."""

    asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counted.asked += key == "status"
        return super().get(key, default)


def test_the_event_of_a_write_of_ours_is_not_read_after_its_answer() -> None:
    caches = Caches()
    answer = caches.pods.put(pod("a", "uid", 5))
    Counted.asked = 0
    assert caches.pods.put(Counted(pod("a", "uid", 5))) is answer
    assert Counted.asked == 0
    assert caches.pods.put(Counted(pod("a", "uid", 6))) is not answer
    assert Counted.asked > 0


def test_the_event_of_a_write_of_ours_is_no_news() -> None:
    caches, key = Caches(), ObjectKey("n", "a")

    def heard(
        version: int, *, uid: str = "a", readable: bool = True, kind: str = "MODIFIED"
    ) -> tuple[ObjectKey, bool]:
        return take(caches, {"type": kind, "object": grpojob(uid, version, readable)})

    assert heard(1, kind="ADDED") == (key, True)
    caches.grpojobs.put(grpojob("a", 3))
    assert [heard(version) for version in (2, 3, 4)] == [(key, False), (key, False), (key, True)]
    assert [heard(5, readable=False), heard(5, readable=False), heard(6)] == [(key, True)] * 3
    assert heard(7, uid="b") == (key, True)
    assert heard(7, uid="b", kind="DELETED") == (key, True)
    assert caches.grpojobs.get(key) is None


def grpojob(uid: str, version: int, readable: bool = True) -> Object:
    """A GRPOJob without a spec."""
    meta = {"namespace": "n", "name": "a", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {}, "status": {} if readable else {"attempt": "one"}}


def test_what_is_known_already_is_not_read_again() -> None:
    caches = Caches()
    items = [Counted(pod(name, f"uid-{name}", 5)) for name in NAMES]
    for expected in (len(NAMES), 0):
        Counted.asked = 0
        with caches.pods.relist() as listing:
            for item in items:
                listing.add(item)
            listing.finish(9)
        assert (Counted.asked > 0, len(caches.pods)) == (expected > 0, len(NAMES))


class Paged:
    """Pages of many objects."""

    async def pages(self, _: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        for number in range(3):
            yield [pod(f"{number}-{n}", f"{number}-{n}", 5) for n in range(50)], 9


def test_others_run_between_two_slices_of_a_page() -> None:
    async def story() -> tuple[int, int]:
        caches, turns = Caches(), 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        def take(item: Object) -> None:
            # each object takes a slice of time of its own
            asyncio.get_running_loop()._clock.now += 2 * LOOP_BUDGET  # type: ignore[attr-defined]
            listing.add(item)

        running = asyncio.create_task(other())
        with caches.pods.relist() as listing:
            selection = Selection(caches.pods.resource)
            versions = await each_listed(Paged(), selection, listing.begin, take)  # type: ignore[arg-type]
            listing.finish(versions)
        running.cancel()
        return turns, len(caches.pods)

    turns, kept = virtually(story())
    assert kept == 150
    assert turns >= 150
