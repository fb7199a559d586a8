"""Writes to Workloads against a small API server: taken names, old versions, missing classes,
another cluster."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from grpo_kube.objects.errors import AlreadyExists, Conflict, Denied, NotFound
from grpo_kube.objects.resources import ObjectKey, Resource, Selection
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.loop.caches import Caches
from grpo_operator.loop.workload_sync import Workloads, sync_dispatched, unseen_message
from grpo_operator.pods.manifests import attempt_of, indexed_job
from grpo_operator.records.names import RESOURCE_FLAVORS, WORKLOAD_PRIORITIES, WORKLOADS
from grpo_operator.records.records import GRPOJobRecord
from tests.unit.kueue_world import (
    QUEUED,
    admitted,
    evicted,
    make_item,
    make_queued,
    workload_condition,
)
from tests.unit.operator_world import (
    KEY,
    NOW,
    PLAN,
    PODS,
    TRAINERS,
    active_status,
    condition,
    make_child,
    make_job,
    make_seen,
)
from tests.unit.queue_world import cluster, queue
from tests.unit.reconcile_world import apply_merge_patch, make_observer

Item = dict[str, Any]
QUEUES = Decision(Action.QUEUE, "WaitingForKueue", plan=PLAN)
WAITS: Item = {"attempt": 1, "conditions": [condition("Admitted", "False")]}
DONE: Item = {"attempt": 1, "conditions": [{**condition("Failed"), "message": "no such row"}]}


class World:
    """An API server with objects by path, each with a version."""

    def __init__(
        self, *workloads: Item, snapshot: Snapshot | None = None, problem: str = ""
    ) -> None:
        self.snapshot, self.problem, self.now = snapshot or Snapshot(), problem, NOW
        self.objects: dict[str, Item] = {}
        self.caches = Caches()
        self.denies: Exception | None = None
        self.sent: list[str] = []
        for one in workloads:
            self.keep(WORKLOADS, one)
            self.caches.workloads.put(one)
        found: Any = self
        self.workloads = Workloads(
            found, self.caches, self.take, lambda _: self.problem, pods=PODS, clock=lambda: self.now
        )

    def take(self) -> Snapshot:
        return self.snapshot

    def keep(self, resource: Resource, item: Item) -> None:
        metadata = item["metadata"]
        self.objects[resource.path(metadata.get("namespace"), metadata["name"])] = item

    async def get(self, resource: Resource, namespace: str, name: str) -> Item:
        path = resource.path(namespace, name)
        if path not in self.objects:
            raise NotFound(f"GET {path}: 404", 404)
        return self.objects[path]

    async def create(self, resource: Resource, namespace: str, body: Item) -> Item:
        self.sent.append("POST")
        if self.denies:
            raise self.denies
        path = resource.path(namespace, body["metadata"]["name"])
        if path in self.objects:
            raise AlreadyExists("it is there", 409)
        self.objects[path] = body | {
            "metadata": {**body["metadata"], "uid": "new", "resourceVersion": "20"}
        }
        return self.objects[path]

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Item, subresource: str = ""
    ) -> Item:
        self.sent.append(f"PATCH {subresource}".strip())
        if self.denies:
            raise self.denies
        item = await self.get(resource, namespace, name)
        if patch["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
            raise Conflict("it has changed", 409)
        fields = {
            key: value for key, value in patch.items() if key in ("metadata", "spec", "status")
        }
        found = apply_merge_patch(item, fields)
        found["metadata"]["resourceVersion"] = str(int(item["metadata"]["resourceVersion"]) + 1)
        self.objects[resource.path(namespace, name)] = found
        return found

    async def delete(self, resource: Resource, namespace: str, name: str, _: Any) -> None:
        self.sent.append("DELETE")
        del self.objects[resource.path(namespace, name)]

    async def pages(self, _: Selection) -> AsyncIterator[tuple[list[Item], int]]:
        """No pods."""
        yield [], 0

    async def step(self, seen: Observation, decision: Decision = QUEUES) -> Decision:
        return await self.workloads.step(self.workloads.look(seen), decision)

    def only(self) -> Item:
        (found,) = self.objects.values()
        return found


def states(item: Item) -> dict[str, str]:
    return {one["type"]: one["status"] for one in item["status"]["conditions"]}


@contextmanager
def changed_meanwhile(world: World) -> Iterator[None]:
    """Somebody writes to the Workload after it was looked at."""
    ((path, item),) = world.objects.items()
    world.objects[path] = apply_merge_patch(item, {"metadata": {"resourceVersion": "99"}})
    yield


async def test_a_workload_is_made_once_and_found_by_an_operator_that_did_not_hear_of_it() -> None:
    world, waits = World(), make_queued(None, status=WAITS)
    assert replace(await world.step(waits), requeue_after=None) == QUEUES
    assert world.workloads.look(waits).workload, "without an event"
    world.caches.workloads.discard(
        ObjectKey(KEY.namespace, world.only()["metadata"]["name"]), "new"
    )
    before = dict(world.objects)
    await World.step(world, waits)
    assert world.objects == before


async def test_a_strangers_workload_of_that_name_is_told_and_left_alone() -> None:
    world = World()
    world.keep(WORKLOADS, make_item(ownerReferences=[]))
    found = await world.step(make_queued(None, status=WAITS))
    assert (found.action, found.reason) == (Action.QUEUE, "NameTaken")
    assert "is not this GRPOJob's" in found.message
    assert found.requeue_after


async def test_what_the_api_server_refuses_is_told_in_its_words_and_tried_again() -> None:
    world = World()
    world.denies = Denied("spec.podSets: too many", 422)
    found = await world.step(make_queued(None, status=WAITS))
    assert (found.reason, found.requeue_after) == ("WaitingForKueue", 15.0)
    assert "spec.podSets: too many" in found.message


async def test_the_priority_is_the_labels_classs_or_the_pods() -> None:
    high = make_job(QUEUED, WAITS, labels={"kueue.x-k8s.io/priority-class": "high"})
    world = World()
    found = await world.step(make_seen(high))
    assert found.reason == "PriorityClassNotFound"
    assert "WorkloadPriorityClass high" in found.message
    world.keep(WORKLOAD_PRIORITIES, {"metadata": {"name": "high"}, "value": 500})
    assert replace(await world.step(make_seen(high)), requeue_after=None) == QUEUES
    made = next(one for path, one in world.objects.items() if "/workloads/" in path)
    assert (made["spec"]["priority"], made["spec"]["priorityClassRef"]["kind"]) == (
        500,
        "WorkloadPriorityClass",
    )
    for name, value in ((None, 10), ("urgent", 1000)):
        snapshot = Snapshot(
            priorities={"usual": 10, "": 10, "urgent": 1000}, default_priority="usual"
        )
        world = World(snapshot=snapshot)
        await world.step(
            make_queued(None, status=WAITS, placement={"queueName": "a", "priorityClassName": name})
        )
        assert world.only()["spec"]["priority"] == value
        assert world.only()["spec"]["priorityClassRef"]["name"] == (name or "usual")
    found = await world.step(
        make_queued(None, status=WAITS, placement={"queueName": "a", "priorityClassName": "no"})
    )
    assert (found.reason, "PriorityClass no" in found.message) == ("PriorityClassNotFound", True)


async def test_a_job_that_names_no_class_any_more_gives_its_priority_back() -> None:
    reference = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "urgent"}
    urgent = make_item(spec={"priority": 1000, "priorityClassRef": reference})
    waits = make_queued(None, status=WAITS)
    for default, wanted in (("usual", (10, "usual")), ("", (0, None))):
        values = {"usual": 10, "urgent": 1000} | ({"": 10} if default else {})
        world = World(urgent, snapshot=Snapshot(priorities=values, default_priority=default))
        for _ in range(2):
            await world.step(waits)
        spec = world.only()["spec"]
        name = spec.get("priorityClassRef", {}).get("name")
        assert ((spec["priority"], name), world.sent) == (wanted, ["PATCH"])
    world = World(urgent)
    await world.step(waits)
    assert world.sent == [], "while classes can't be seen"


async def test_an_eviction_is_given_back_in_one_write_of_the_version_that_was_looked_at() -> None:
    world = World(make_item(evicted()))
    waits = make_queued(None, status=WAITS)
    with changed_meanwhile(world), pytest.raises(Conflict):
        await world.step(waits)
    assert world.sent == []
    await world.step(waits)
    assert world.sent == ["PATCH status"]
    assert "admission" not in world.only()["status"]
    assert states(world.only()) == {
        "QuotaReserved": "False", "Admitted": "False", "Evicted": "True", "PodsReady": "False",
        "Requeued": "True",
    }  # fmt: skip
    await world.step(waits)
    assert len(world.sent) == 1


async def test_a_job_that_ends_says_how_and_keeps_what_others_have_written() -> None:
    world = World(make_item(admitted(workload_condition("example.com/Mine"))))
    await world.step(make_queued(None, status=DONE), Decision(Action.WAIT))
    found = next(one for one in world.only()["status"]["conditions"] if one["type"] == "Finished")
    assert (found["status"], found["reason"], found["message"]) == ("True", "Failed", "no such row")
    assert states(world.only())["example.com/Mine"] == "True"
    assert "admission" in world.only()["status"]


@pytest.mark.parametrize(
    ("status", "job", "decision"),
    [
        (admitted(), DONE, Decision(Action.WAIT)),
        (admitted(), DONE, Decision(Action.WAIT, requeue_after=3600.0)),
        (evicted(), WAITS, Decision(Action.SUSPEND)),
        (evicted(), WAITS, QUEUES),
    ],
)
async def test_a_denied_write_is_tried_again_soon(
    status: Item, job: Item, decision: Decision
) -> None:
    world = World(make_item(status))
    world.denies = Denied("workloads/status is forbidden", 403)
    after = await world.step(make_queued(None, status=job), decision)
    assert (after.action, after.requeue_after) == (decision.action, 15.0)
    world.denies = None
    await world.step(make_queued(None, status=job), decision)
    assert world.sent == ["PATCH status", "PATCH status"]


async def test_pods_that_are_ready_or_not_yet_again_are_told_once() -> None:
    world = World(make_item(admitted()))
    runs = make_queued(None, *TRAINERS, status=active_status())
    starts_again = make_queued(None, make_child(2), status=active_status(2, running=False))
    told = []
    for seen in (runs, runs, starts_again, starts_again, runs):
        await world.step(seen, Decision(Action.WAIT))
        ready = next(
            one for one in world.only()["status"]["conditions"] if one["type"] == "PodsReady"
        )
        told.append((ready["status"], ready["reason"]))
    assert told == [
        *[("True", "Started")] * 2,
        *[("False", "WaitForRecovery")] * 2,
        ("True", "Started"),
    ]
    assert len(world.sent) == 3


async def test_a_suspended_jobs_workload_is_inactive_by_its_own_mark() -> None:
    world = World(make_item(admitted()))
    await world.step(make_queued(None, status=WAITS, suspend=True), Decision(Action.SUSPEND))
    assert world.only()["spec"]["active"] is False
    await world.step(make_queued(None, status=WAITS))
    assert world.only()["spec"]["active"] is True
    assert "grpo.dev/paused" not in world.only()["metadata"]["annotations"]


async def test_a_workload_that_can_not_be_read_is_neither_made_again_nor_missed() -> None:
    world = World(make_item(admitted(), resourceVersion="5"))
    world.caches.workloads.put(make_item({"conditions": 7}, resourceVersion="6"))
    seen = world.workloads.look(make_queued(None, status=WAITS))
    assert (seen.workload, "can't be read" in seen.kueue_problem) == (None, True)
    await world.step(make_queued(None, status=WAITS))
    assert world.sent == []


async def test_multikueues_workload_is_taken_over_and_neither_changed_nor_deleted() -> None:
    name = {"annotations": {"kueue.x-k8s.io/prebuilt-workload-name": "theirs"}}
    world, job = World(), make_job(QUEUED, WAITS, **name)
    assert "404" in (await world.step(make_seen(job))).message
    world.keep(WORKLOADS, make_item(name="theirs", ownerReferences=[], labels={"x": "y"}))
    assert replace(await world.step(make_seen(job)), requeue_after=None) == QUEUES
    (owner,) = world.only()["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (job.uid, True)
    seen = world.workloads.look(make_seen(job))
    assert seen.workload
    renamed = make_job({"placement": {"queueName": "b"}}, {**WAITS}, **name)
    other = replace(QUEUES, plan=PLAN.model_copy(update={"nodes": 3}))
    for one in (renamed, make_job({**QUEUED, "suspend": True}, WAITS, **name)):
        await world.step(make_seen(one), other)
    assert world.sent == ["PATCH"]
    labelled = make_job(QUEUED, WAITS, labels={"kueue.x-k8s.io/prebuilt-workload-name": "theirs"})
    assert world.workloads.look(make_seen(labelled)).workload, "as Kueue named it before 0.18"


def dispatched(**more: Any) -> GRPOJobRecord:
    return make_job({**QUEUED, "managedBy": "kueue.x-k8s.io/multikueue"}, **more)


async def dispatch(world: World, job: GRPOJobRecord) -> None:
    observation = make_observer(world, world.caches, world.workloads).read_dispatched(job)
    if observation:
        await sync_dispatched(observation, queue([job], cluster()), world.workloads)


async def test_on_multikueues_manager_the_workload_is_all_that_is_made() -> None:
    world = World()
    await dispatch(world, dispatched())
    assert world.only()["spec"]["podSets"][0]["count"] == 2
    assert "POST" in world.sent
    copied = dispatched(status=active_status(3))
    for status in (admitted(), {"conditions": [workload_condition("QuotaReserved")]}):
        item = make_item(status, job=copied)
        world = World(item)
        await dispatch(world, copied)
        assert world.sent == []
    world = World(make_item(evicted(), job=copied))
    await dispatch(world, copied)
    assert states(world.only())["QuotaReserved"] == "False"
    await dispatch(world, dispatched(status=DONE))
    assert world.sent == ["PATCH status"], "the worker's end is Kueue's to copy"


async def test_the_pods_go_where_the_flavors_are_and_a_missing_one_starts_none() -> None:
    world = World(make_item(admitted()))
    seen = world.workloads.look(make_queued(None, status=active_status()))
    assert seen.job.spec
    body = indexed_job(attempt_of(seen.job, seen.job.spec, PLAN, 1), PODS)
    with pytest.raises(NotFound, match="resourceflavors/default"):
        await world.workloads.place_job(seen, body)
    spec = {
        "nodeLabels": {"pool": "a"},
        "tolerations": [{"key": "a"}],
        "nodeTaints": [{"key": "b"}],
    }
    world.keep(RESOURCE_FLAVORS, {"metadata": {"name": "default"}, "spec": spec})
    found = (await world.workloads.place_job(seen, body))["spec"]["template"]["spec"]
    assert (found["nodeSelector"], found["tolerations"]) == ({"pool": "a"}, [{"key": "a"}])


def test_why_workloads_can_not_be_seen() -> None:
    assert unseen_message("", forbidden=False) == ""
    assert "has no Kueue" in unseen_message("404", forbidden=False)
    assert "may not see" in unseen_message("403", forbidden=True)
