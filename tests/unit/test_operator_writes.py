"""A job comes to the same end whatever single write of the operator fails, and whatever becomes of
its Jobs, pods and Workload meanwhile."""

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.plan.plan import ExecutionPlan
from grpo_kube.objects.resources import JOBS, PODS, SERVICES, Object, Resource
from grpo_kube.objects.times import Observed, seconds
from grpo_operator.decide.observation import Silence
from grpo_operator.records.names import (
    COMPONENT_ENGINE,
    COMPONENT_PREFLIGHT,
    COMPONENT_TRAINER,
    GRPOJOBS,
    LABEL_COMPONENT,
    WORKLOADS,
)
from grpo_operator.records.reasons import RELEASES
from tests.generated import cases
from tests.integration import kueue_writes
from tests.unit.kueue_world import QUEUED
from tests.unit.operator_world import GPU_PLAN, NOW, PLAN, SERVED_PLAN, at, terminated
from tests.unit.write_world import BAD, DEATHS, EVICTED, FAULTS, WELL, Act, Story, World, is_live
from tests.virtual_time import virtually

CHECKED: dict[str, Any] = {"placement": {"accelerator": "GPU", "nodes": None}}
CHECKED_QUEUED = {"placement": {**CHECKED["placement"], "queueName": "team"}}
KINDS: dict[str, tuple[dict[str, Any], ExecutionPlan]] = {
    "plain": ({}, PLAN),
    "served": ({}, SERVED_PLAN),
    "queued": (QUEUED, PLAN),
    "queued, served": (QUEUED, SERVED_PLAN),
    "checked": ({**CHECKED, "preflight": "Required"}, GPU_PLAN),
    "checked, queued": ({**CHECKED_QUEUED, "preflight": "Auto"}, GPU_PLAN),
}
ENDS = {"well": (WELL,), "bad, well": (BAD, WELL), "bad": (BAD,)}
LIMIT = {"restarts": {"limit": 2}}
OUTAGE = 600.0
"""Seconds."""


def _edit(**spec: Any) -> Act:
    return lambda world: world.edit(**spec)


def _end(component: str, code: int, **status: Any) -> Act:
    """All pods of that role end with an exit code."""

    def act(world: World) -> None:
        world.failed += component == COMPONENT_TRAINER and not status
        for pod in filter(is_live, world.pods_of(component)):
            world.set_state(pod, terminated(code), **status)

    return act


def _delete(resource: Resource, component: str = "") -> Act:
    """Somebody deletes all objects of a kind, or those of that role."""

    def act(world: World) -> None:
        for item in world.all_of(resource):
            if not component or item["metadata"]["labels"][LABEL_COMPONENT] == component:
                world.remove(resource, item)

    return act


def _preempt(world: World) -> None:
    for item in world.all_of(WORKLOADS):
        if not kueue_writes.is_true(item, "QuotaReserved"):
            continue
        changed: Object = {**item, "status": {**item["status"]}}
        changed["status"]["conditions"] = [{**one} for one in item["status"]["conditions"]]
        kueue_writes.preempt(changed)
        world.store(WORKLOADS, changed)


def _delete_kept(world: World) -> None:
    """A user deletes the job, and a finalizer keeps it."""
    deleted = {"deletionTimestamp": at(0), "finalizers": ["example.com/archive"]}
    world.store(GRPOJOBS, {**world.job, "metadata": {**world.job["metadata"], **deleted}})


def _outage(requests: str, fault: str) -> Act:
    """All writes of that kind fail for a while."""

    def act(world: World) -> None:
        world.outage = (requests, fault, world.now + OUTAGE)

    return act


DISRUPTED = {"conditions": [EVICTED]}
ACTS: dict[str, Act] = {
    "suspend": _edit(suspend=True),
    "resume": _edit(suspend=False),
    "retry": _edit(retry=1),
    "delete": _delete_kept,
    "delete gang": _delete(JOBS, COMPONENT_TRAINER),
    "delete engines": _delete(JOBS, COMPONENT_ENGINE),
    "delete preflight": _delete(JOBS, COMPONENT_PREFLIGHT),
    "delete workload": _delete(WORKLOADS),
    "preempt": _preempt,
    **{
        f"{what} {role}": _end(role, code, **status)
        for role in (COMPONENT_TRAINER, COMPONENT_ENGINE, COMPONENT_PREFLIGHT)
        for what, code, status in (("evict", 143, DISRUPTED), ("crash", 139, {}))
    },
}
MOMENTS = ("Queued", "Starting", "Running", "ending", "Restarting", "Succeeded", "Failed")


LAGS = st.dictionaries(
    st.sampled_from(("grpojobs", "jobs", "pods", "workloads")), st.sampled_from((0.01, 1.0, 20.0)),
    max_size=2,
)  # fmt: skip


def live(
    kind: str,
    ends: str,
    story: tuple[tuple[str, str], ...] = (),
    *,
    faults: dict[int, str] | None = None,
    lags: dict[str, float] | None = None,
    first: Story = (),
    on_commit: Act | None = None,
) -> World:
    spec, plan = KINDS[kind]
    acts = [*first]
    for moment, name in story:
        acts.append((moment, ACTS[name]))
        if name == "suspend":
            acts.append(("Suspended", ACTS["resume"]))
    world = World(
        {**spec, **LIMIT}, plan, tuple(acts), ends=ENDS[ends], faults=faults,
        lags=lags, on_commit=on_commit,
    )  # fmt: skip
    return virtually(world.live())


@cache
def undisturbed(kind: str, ends: str) -> World:
    return live(kind, ends)


def end_of(world: World) -> tuple[Any, ...]:
    """What a user sees of a job that has ended; a release counts as nothing."""
    status = world.job["status"]
    ends = [(end["reason"], end["counted"]) for end in status["ends"]]
    return (
        status["phase"],
        status.get("restarts", 0),
        status.get("uncountedRestarts", 0),
        [end for end in ends if end[0] not in RELEASES],
        sorted(one["type"] for one in status["conditions"] if one["status"] == "True"),
    )


def check(world: World) -> None:
    """Hold what is left in the end against what a job may leave."""
    assert world.has_died or world.told == world.news, "each change of conditions is told once"
    assert not list(filter(is_live, world.all_of(PODS)))
    roles = [job["metadata"]["labels"][LABEL_COMPONENT] for job in world.all_of(JOBS)]
    assert {COMPONENT_TRAINER} >= {*roles}
    for item in world.all_of(WORKLOADS):
        assert kueue_writes.is_true(item, "Finished"), "quota that nobody uses"


@settings(max_examples=cases(40))
@given(
    st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(ENDS)), st.integers(0, 40),
    st.sampled_from((*FAULTS, *DEATHS)), LAGS,
)  # fmt: skip
@example("queued, served", "bad, well", 3, "not found", {})
@example("queued", "bad", 1, "lost", {"grpojobs": 0.01})
@example("plain", "well", 99, "lost", {"pods": 100.0})
def test_a_job_ends_alike_whatever_write_fails(
    kind: str, ends: str, number: int, fault: str, lags: dict[str, float]
) -> None:
    world = live(kind, ends, faults={number: fault}, lags=lags)
    check(world)
    assert end_of(world) == end_of(undisturbed(kind, ends))


@settings(max_examples=cases(50))
@given(
    st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(ENDS)),
    st.lists(st.tuples(st.sampled_from(MOMENTS), st.sampled_from(sorted(ACTS))), max_size=3),
    st.dictionaries(st.integers(0, 40), st.sampled_from(FAULTS), max_size=2), LAGS,
)  # fmt: skip
def test_a_job_ends_whatever_becomes_of_its_objects_and_counts_no_disruption(
    kind: str,
    ends: str,
    story: list[tuple[str, str]],
    faults: dict[int, str],
    lags: dict[str, float],
) -> None:
    world = live(kind, ends, tuple(story), faults=faults, lags=lags)
    status = world.job["status"]
    if "deletionTimestamp" in world.job["metadata"]:
        assert not list(filter(is_live, world.all_of(PODS)))
        assert world.all_of(WORKLOADS) == []
        return
    check(world)
    assert status["phase"] in ("Succeeded", "Failed")
    assert sum(end["counted"] for end in status["ends"]) <= world.failed


STOPS = (("Running", ACTS["suspend"]),)
LOSES_SERVICES = (("Running", _delete(SERVICES)),)


@pytest.mark.parametrize("fault", ["unavailable", "denied", "not found"])
@pytest.mark.parametrize(
    ("kind", "outage", "acts", "condition"),
    [
        ("queued", ("Starting", "workloads"), (), "Succeeded"),
        ("queued", ("Running", "workloads"), STOPS, "Suspended"),
        ("plain", ("Running", "services"), LOSES_SERVICES, "Succeeded"),
    ],
)
def test_what_is_decided_on_a_gang_does_not_wait_for_writes_of_other_objects(
    kind: str, outage: tuple[str, str], acts: Story, condition: str, fault: str
) -> None:
    moment, requests = outage
    world = live(kind, "well", first=((moment, _outage(requests, fault)), *acts))
    conditions = {one["type"]: one for one in world.job["status"]["conditions"]}
    since = seconds(conditions[condition]["lastTransitionTime"]) or 0.0
    assert (conditions[condition]["status"], since - NOW < OUTAGE / 2) == ("True", True)
    assert not list(filter(is_live, world.all_of(PODS)))


def test_engines_that_end_with_their_attempt_are_not_told_as_lost() -> None:
    reasons = [reason for _, _, reason in live("served", "bad").told]
    assert "EnginesLost" not in reasons


def test_a_job_that_is_known_by_its_pods_alone_was_not_deleted() -> None:
    """No answer to its creation came, and its watch is late."""
    world = live("plain", "well", faults={2: "lost", 3: "unavailable"}, lags={"jobs": 1.0})
    assert world.writes[2:4] == ["POST jobs run-1"] * 2
    assert end_of(world) == end_of(undisturbed("plain", "well"))


@pytest.mark.parametrize("fault", ["unavailable", "denied"])
def test_a_job_whose_preflight_can_not_be_created_says_so(fault: str) -> None:
    outage = ("Suspended", _outage("POST jobs", fault))
    acts = (("Queued", ACTS["suspend"]), outage, ("Suspended", ACTS["resume"]))
    world = live("checked", "well", first=acts)
    assert "PreflightBlocked" in [reason for _, _, reason in world.news]
    assert end_of(world) == end_of(undisturbed("checked", "well"))
    assert world.writes.count("POST jobs run-preflight") <= 20


@pytest.mark.parametrize("fault", ["unavailable", "denied"])
def test_engines_that_can_not_be_created_again_are_told_as_lost(fault: str) -> None:
    acts = (("Running", _outage("POST jobs", fault)), ("Running", ACTS["delete engines"]))
    world = live("served", "well", first=acts)
    assert ("Degraded", "True", "EnginesLost") in world.news
    assert end_of(world) == end_of(undisturbed("served", "well"))


@pytest.mark.parametrize("fault", ["unavailable", "denied"])
def test_a_rank_0_that_is_silent_is_shown_also_while_engines_can_not_be_created(fault: str) -> None:
    def fall_silent(world: World) -> None:
        world.rank0.silent = Silence(Observed(NOW - 10 * OUTAGE), "no route to host")

    acts = (_outage("POST jobs", fault), fall_silent, ACTS["delete engines"])
    world = live("served", "well", first=tuple(("Running", act) for act in acts))
    assert ("Degraded", "True", "ProgressUnknown") in world.news
    assert end_of(world) == end_of(undisturbed("served", "well"))


@pytest.mark.parametrize(
    ("edits", "job"),
    [
        (({"suspend": True}, {"suspend": False, "image": "mine:2"}), "run-2"),
        (({"samples": {"groups": 0}},), "run-1"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "queued", "checked"])
def test_an_attempt_is_of_the_spec_that_it_was_planned_by(
    kind: str, edits: tuple[dict[str, Any], ...], job: str
) -> None:
    """The user changes the spec after the commit, before the Job is created."""

    def edit(world: World) -> None:
        for spec in edits:
            world.edit(**spec)

    world = live(kind, "well", on_commit=edit)
    check(world)
    created = [write for write in world.writes if write.startswith("POST jobs run-")]
    assert created[-1] == f"POST jobs {job}"
    assert [write for write in created if "preflight" not in write] == [f"POST jobs {job}"]
    assert world.job["status"]["phase"] == "Succeeded"
