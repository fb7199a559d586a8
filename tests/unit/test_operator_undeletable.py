"""A Job that nobody can delete, for a policy or a finalizer keeps it, holds neither its job's
status up nor GPUs; the next gang starts once no pod of it is left."""

from typing import Any

import pytest

from grpo_kube.objects.resources import JOBS, Object, Resource
from grpo_kube.objects.times import seconds
from grpo_operator.records.names import COMPONENT_ENGINE, GRPOJOBS
from tests.unit.operator_world import NOW, at
from tests.unit.test_operator_slow_ends import GRACE, SlowEnds
from tests.unit.test_operator_writes import (
    ACTS,
    ENDS,
    KINDS,
    LIMIT,
    OUTAGE,
    check,
    end_of,
)
from tests.unit.write_world import Story, World, is_live
from tests.virtual_time import virtually

SOON = 4 * GRACE
"""Seconds that a job may lose: its pods end, and what was denied is tried again."""


class Kept(SlowEnds):
    """A cluster in which a finalizer keeps Jobs for a while."""

    kept_until = 0.0

    engines_until = NOW
    """When an engine lived last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.reasons: set[str] = set()
        """Reasons that users have seen."""
        super().__init__(*args, **kwargs)

    def control(self) -> bool:
        if any(map(is_live, self.pods_of(COMPONENT_ENGINE))):
            self.engines_until = self.now
        return super().control()

    def store(self, resource: Resource, item: Object) -> Object:
        if resource is GRPOJOBS:
            self.reasons.add(item.get("status", {}).get("reason", ""))
        return super().store(resource, item)

    def remove(self, resource: Resource, item: Object) -> None:
        if resource is not JOBS or self.now >= self.kept_until:
            super().remove(resource, item)
        elif "deletionTimestamp" not in item["metadata"]:
            kept = {"deletionTimestamp": at(0), "finalizers": ["example.com/archive"]}
            self.store(JOBS, {**item, "metadata": {**item["metadata"], **kept}})
            self.timers["finalizer"] = self.kept_until

    def _sync(self, job: Object) -> None:
        # The Job controller makes no pods for a Job that is being deleted, and ends none.
        if "deletionTimestamp" not in job["metadata"]:
            super()._sync(job)
        elif self.now >= self.kept_until:
            self.remove(JOBS, job)


def forbid(requests: str, fault: str, moment: str = "Running") -> Story:
    """Nothing of that kind can be deleted for a while, from when the gang runs."""

    def act(world: World) -> None:
        if fault == "finalizer":
            assert isinstance(world, Kept)
            world.kept_until = NOW + OUTAGE
        else:
            world.outage = (requests, fault, NOW + OUTAGE)

    return ((moment, act),)


def live(kind: str, ends: str, story: Story, **more: Any) -> Kept:
    spec, plan = KINDS[kind]
    world = Kept({**spec, **LIMIT}, plan, story, ends=ENDS[ends], **more)
    virtually(world.live())
    return world


def completion(world: World) -> float:
    return seconds(world.job["status"]["completionTime"]) or 0.0


RESUMED: Story = (("Running", ACTS["suspend"]), ("Suspended", ACTS["resume"]))
PREEMPTED: Story = (("Running", ACTS["preempt"]),)


@pytest.mark.parametrize("fault", ["denied", "unavailable", "finalizer"])
@pytest.mark.parametrize(
    ("kind", "ends", "story"),
    [
        ("plain", "bad", ()),
        ("plain", "well", RESUMED),
        ("queued", "well", RESUMED),
        ("queued", "well", PREEMPTED),
    ],
)
def test_a_job_goes_on_once_the_pods_of_a_job_that_can_not_be_deleted_have_ended(
    kind: str, ends: str, story: Story, fault: str
) -> None:
    world = live(kind, ends, forbid("DELETE jobs", fault) + story)
    undisturbed = live(kind, ends, story)
    check(world)
    assert (world.second_gang, world.early_release) == ("", "")
    assert end_of(world) == end_of(undisturbed)
    assert completion(world) - completion(undisturbed) <= SOON


@pytest.mark.parametrize("fault", ["denied", "unavailable"])
@pytest.mark.parametrize(
    ("kind", "requests"), [("plain", "DELETE"), ("queued", "DELETE"), ("served", "DELETE jobs")]
)
def test_a_job_says_that_its_last_gang_can_not_be_ended(
    kind: str, requests: str, fault: str
) -> None:
    """Engines are made again by their Job however often their pods are deleted."""
    world = live(kind, "well", forbid(requests, fault) + RESUMED)
    check(world)
    assert world.second_gang == ""
    assert "FailedCreate" in world.reasons


STOPS: tuple[Story, ...] = ((), (("Running", ACTS["suspend"]),), (("Running", ACTS["delete"]),))


@pytest.mark.parametrize(("ends", "story"), [("bad", ()), *(("well", story) for story in STOPS)])
def test_engines_end_with_their_gang_although_a_finalizer_keeps_their_job(
    ends: str, story: Story
) -> None:
    world = live("served", ends, forbid("", "finalizer") + story)
    undisturbed = live("served", ends, story)
    assert world.engines_until - undisturbed.engines_until <= SOON


@pytest.mark.parametrize(
    ("kind", "ends", "story", "count"),
    [
        *(("served", "well", story, 1) for story in STOPS),
        ("served", "bad", (), 1),
        ("plain", "bad", (), 0),
        ("plain", "well", (("Running", ACTS["suspend"]),), 0),
    ],
)
def test_pods_that_can_not_be_ended_are_reported(
    kind: str, ends: str, story: Story, count: int
) -> None:
    """Once, however often their deletion is tried again; a Job without pods holds nothing."""
    world = live(kind, ends, forbid("DELETE jobs", "denied") + story)
    assert [event["reason"] for event in world.events] == ["FailedDelete"] * count
    assert all("DELETE jobs run-" in event["message"] for event in world.events)


SILENT_HUB = {"path": "spec.model.name", "value": "m", "message": "no answer", "transient": True}


@pytest.mark.parametrize(
    ("kind", "edit", "fault"),
    [
        ("checked", False, "denied"),
        ("checked", True, "finalizer"),
        ("checked, queued", False, "finalizer"),
        ("checked, queued", True, "unavailable"),
    ],
)
def test_a_preflight_whose_last_job_can_not_be_deleted_says_so(
    kind: str, edit: bool, fault: str
) -> None:
    story = forbid("DELETE jobs", fault, "Queued")
    reports: Any = ({"problems": [SILENT_HUB]}, {})
    if edit:
        story += (("Queued", lambda world: world.edit(dataset={"name": "x/z"})),)
        reports = ({},)
    world = live(kind, "well", story, reports=reports)
    check(world)
    assert "PreflightBlocked" in world.reasons
    is_auto = kind == "checked, queued"
    assert (completion(world) - NOW < OUTAGE) is is_auto, "it starts unchecked after a while"
