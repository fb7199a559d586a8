"""Webhooks and controllers of others change what the operator made: no gang runs on beside the
next one, and no attempt is lost."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from grpo_kube.objects.resources import JOBS, PODS, Object, Resource, Selection
from tests.unit.reconcile_world import selects
from tests.unit.test_operator_slow_ends import SlowEnds
from tests.unit.test_operator_writes import ACTS, ENDS, KINDS, LIMIT, check, end_of, undisturbed
from tests.unit.write_world import Story, World, is_live, owner
from tests.virtual_time import virtually


class Meshed(SlowEnds):
    """A cluster whose webhook gives each pod a second container, which never ends by itself."""

    def set_state(self, pod: Object, state: Object, **status: Any) -> None:
        containers = [
            {"name": "trainer", "state": state},
            {"name": "proxy", "state": {"running": {}}},
        ]
        super().set_state(pod, state, phase="Running", containerStatuses=containers, **status)


@pytest.mark.parametrize("ends", ["bad, well", "bad"])
@pytest.mark.parametrize("kind", ["served", "checked, queued"])
def test_a_pod_whose_second_container_runs_on_holds_no_gpu_after_its_attempt(
    kind: str, ends: str
) -> None:
    spec, plan = KINDS[kind]
    world = Meshed({**spec, **LIMIT}, plan, ends=ENDS[ends])
    virtually(world.live())
    check(world)
    assert end_of(world) == end_of(undisturbed(kind, ends))


def test_a_job_that_is_deleted_as_it_succeeds_leaves_no_pod() -> None:
    """Its peers need no moment any more to end by themselves, and a finalizer keeps the job."""
    spec, plan = KINDS["plain"]
    world = Meshed(spec, plan, (("Succeeded", ACTS["delete"]),))
    virtually(world.live())
    assert not list(filter(is_live, world.all_of(PODS)))


class Unlabelled(SlowEnds):
    """A cluster in which somebody takes the labels of Jobs away, so that no watch shows them."""

    has_labels = True

    def shown(self, resource: Resource, item: Object) -> Object:
        if resource is not JOBS or self.has_labels:
            return item
        return {**item, "metadata": {**item["metadata"], "labels": {}}}

    def _take(self, resource: Resource, item: Object, is_gone: bool = False) -> bool:
        if resource is JOBS and not self.has_labels and not is_gone:
            return False
        return super()._take(resource, item, is_gone)

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return self.shown(resource, await super().get(resource, namespace, name))

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        return self.shown(resource, await super().create(resource, namespace, body))


def take_labels(world: World) -> None:
    """The watch shows this as a deletion."""
    assert isinstance(world, Unlabelled)
    world.has_labels = False
    for job in world.all_of(JOBS):
        world._take(JOBS, job, is_gone=True)
        world.call_for(0.0)


@pytest.mark.parametrize("moment", ["Queued", "Starting", "Running", "ending"])
@pytest.mark.parametrize("kind", ["served", "checked, queued"])
def test_a_gang_whose_job_has_lost_its_labels_trains_on(kind: str, moment: str) -> None:
    spec, plan = KINDS[kind]
    story: Story = ((moment, take_labels),)
    world = Unlabelled({**spec, **LIMIT}, plan, story, ends=ENDS["bad, well"])
    virtually(world.live())
    check(world)
    assert (world.second_gang, world.early_release) == ("", "")
    assert end_of(world) == end_of(undisturbed(kind, "bad, well"))


class UnlabelledPods(SlowEnds):
    """A cluster in which somebody takes our labels from pods; the Job controller's own stay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.unlabelled: set[str] = set()
        """uids of those pods."""
        super().__init__(*args, **kwargs)

    def shown(self, pod: Object) -> Object:
        metadata = pod["metadata"]
        if metadata["uid"] not in self.unlabelled:
            return pod
        labels = {key: text for key, text in metadata["labels"].items() if "batch" in key}
        maker = {"controller": True, "uid": owner(pod), "name": metadata["name"].rsplit("-", 2)[0]}
        return {**pod, "metadata": {**metadata, "labels": labels, "ownerReferences": [maker]}}

    def _take(self, resource: Resource, item: Object, is_gone: bool = False) -> bool:
        if item["metadata"].get("uid") in self.unlabelled and not is_gone:
            return False
        return super()._take(resource, item, is_gone)

    async def pages(self, selection: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        pods = map(self.shown, self.all_of(PODS))
        labels = selection.labels
        yield [pod for pod in pods if selects(labels, pod["metadata"]["labels"])], self._version


def take_pods_labels(world: World) -> None:
    """The watch shows this as deletions."""
    assert isinstance(world, UnlabelledPods)
    for pod in world.all_of(PODS):
        world.unlabelled.add(pod["metadata"]["uid"])
        world._take(PODS, pod, is_gone=True)
    world.call_for(0.0)


@pytest.mark.parametrize("ends", ["bad, well", "well"])
@pytest.mark.parametrize("moment", ["Running", "ending"])
@pytest.mark.parametrize("kind", ["plain", "served"])
def test_a_gang_whose_pods_have_lost_their_labels_ends_as_they_say(
    kind: str, moment: str, ends: str
) -> None:
    spec, plan = KINDS[kind]
    story: Story = ((moment, take_pods_labels),)
    world = UnlabelledPods({**spec, **LIMIT}, plan, story, ends=ENDS[ends])
    virtually(world.live())
    check(world)
    assert world.second_gang == ""
    assert end_of(world) == end_of(undisturbed(kind, ends))
