"""A job, its status or its Workload is not what the operator left: made anew, restored from a
backup, written by an older version, or stopped by an administrator. It ends, and no two gangs of it
run at a time."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.status.status import GRPOJobStatus
from grpo_kube.objects.resources import JOBS, Object
from grpo_operator.records.names import GRPOJOBS, WORKLOADS
from tests.generated import cases
from tests.unit.operator_world import job_object
from tests.unit.test_operator_slow_ends import QUEUED_KINDS, SlowEnds
from tests.unit.test_operator_writes import ACTS, ENDS, KINDS, LIMIT, MOMENTS, check, end_of
from tests.unit.write_world import DEATHS, Act, Story, World
from tests.virtual_time import virtually

CLOCKS = (-600.0, -5.0, 0.0, 5.0, 600.0)
"""Seconds by which the clock of a leader is fast."""
PATIENCE = 90.0
"""Seconds that a change of leaders may cost: a gang that it releases pauses first."""
ANY_KIND = st.sampled_from(sorted(KINDS))
ANY_MOMENT = st.sampled_from((*MOMENTS, "placed"))


class ManyClocks(SlowEnds):
    """A cluster whose leaders have clocks of their own."""

    offsets: tuple[float, ...] = (0.0,)
    """By how much the clock of each leader is fast; the last stays."""

    def clock(self) -> float:
        return self.now + self.offsets[0]

    async def _work(self) -> None:
        before = self._reconciler
        await super()._work()
        if self._reconciler is not before and len(self.offsets) > 1:
            self.offsets = self.offsets[1:]


def recreate(world: World) -> None:
    """A user deletes the job and creates it again under its name, before the operator looks."""
    job = world.job
    world.remove(GRPOJOBS, job)
    fresh = job_object(uid=f"{job['metadata']['uid']}-again")
    del fresh["metadata"]["resourceVersion"]
    world.store(GRPOJOBS, {**fresh, "spec": job["spec"]})


def without(*fields: str) -> Act:
    """Somebody writes the status without these fields."""

    def act(world: World) -> None:
        status = {name: value for name, value in world.job["status"].items() if name not in fields}
        job = {**world.job, "status": status}
        # The world holds each status against the one before.
        del world._objects[GRPOJOBS.path(job["metadata"]["namespace"], job["metadata"]["name"])]
        world.store(GRPOJOBS, job)

    return act


def strip_annotations(world: World) -> None:
    """An older version made the Jobs, without annotations of their own."""
    for job in world.all_of(JOBS):
        metadata = {name: value for name, value in job["metadata"].items() if name != "annotations"}
        world.store(JOBS, {**job, "metadata": metadata})


def set_active(active: bool) -> Act:
    """An administrator stops the Workload, or lets it go on."""

    def act(world: World) -> None:
        for item in world.all_of(WORKLOADS):
            changed: Object = {**item, "spec": {**item["spec"], "active": active}}
            world.store(WORKLOADS, changed)

    return act


def live(
    kind: str, ends: str, story: Story = (), *,
    faults: dict[int, str] | None = None, clocks: tuple[float, ...] = (0.0,),
    lags: dict[str, float] | None = None,
) -> ManyClocks:  # fmt: skip
    spec, plan = KINDS[kind]
    world = ManyClocks({**spec, **LIMIT}, plan, story, ends=ENDS[ends], faults=faults, lags=lags)
    world.offsets = clocks
    virtually(world.live())
    check(world)
    assert (world.second_gang, world.early_release) == ("", "")
    return world


@cache
def undisturbed(kind: str, ends: str) -> ManyClocks:
    return live(kind, ends)


@settings(max_examples=cases(40))
@given(
    ANY_KIND, st.sampled_from(sorted(ENDS)), st.integers(0, 30), st.sampled_from(DEATHS),
    st.tuples(st.sampled_from(CLOCKS), st.sampled_from(CLOCKS)),
)  # fmt: skip
def test_a_job_ends_alike_and_in_time_whatever_the_clock_of_the_next_leader_says(
    kind: str, ends: str, number: int, death: str, clocks: tuple[float, float]
) -> None:
    world = live(kind, ends, faults={number: death}, clocks=clocks)
    usual = undisturbed(kind, ends)
    assert end_of(world) == end_of(usual)
    assert world.now - usual.now <= PATIENCE


LAGS = st.dictionaries(
    st.sampled_from(("grpojobs", "jobs", "pods", "workloads")), st.sampled_from((1.0, 20.0)),
    max_size=2,
)  # fmt: skip


@settings(max_examples=cases(40))
@given(ANY_KIND, ANY_MOMENT, LAGS)
def test_a_job_that_is_made_anew_under_its_name_begins_anew(
    kind: str, moment: str, lags: dict[str, float]
) -> None:
    world = live(kind, "well", ((moment, recreate),), lags=lags)
    assert end_of(world) == end_of(undisturbed(kind, "well"))


FIELDS = tuple(field.alias or name for name, field in GRPOJobStatus.model_fields.items())
OLDER = {field: without(field) for field in FIELDS} | {"annotations": strip_annotations}


@settings(max_examples=cases(120, gate=12))
@given(ANY_KIND, st.sampled_from(("well", "bad, well")), ANY_MOMENT, st.sampled_from([*OLDER]))
def test_what_an_older_operator_did_not_write_costs_no_attempt(
    kind: str, ends: str, moment: str, missing: str
) -> None:
    world = live(kind, ends, ((moment, OLDER[missing]),))
    status = world.job["status"]
    assert status["phase"] == "Succeeded"
    # Without these nobody can know that an attempt runs.
    if missing not in ("attempt", "conditions"):
        assert status["attempt"] == undisturbed(kind, ends).job["status"]["attempt"]


@settings(max_examples=cases(40))
@given(ANY_KIND, st.sampled_from(("Queued", "Starting", "placed", "Running", "ending")))
def test_a_job_whose_status_is_lost_ends_and_never_runs_twice(kind: str, moment: str) -> None:
    world = live(kind, "well", ((moment, without(*FIELDS)),))
    assert world.job["status"]["phase"] == "Succeeded"


@pytest.mark.parametrize("moment", ["Queued", "Starting", "placed", "Running", "ending"])
@pytest.mark.parametrize("kind", QUEUED_KINDS)
def test_a_workload_that_is_stopped_goes_on_when_it_may(kind: str, moment: str) -> None:
    story = ((moment, set_active(False)), ("Queued", set_active(True)))
    world = live(kind, "well", story)
    assert world.job["status"]["phase"] == "Succeeded"


@pytest.mark.parametrize("moment", ["Starting", "placed", "Running"])
@pytest.mark.parametrize("lag", [0.0, 1.0])
def test_a_job_that_is_resumed_while_kueue_evicts_it_waits_for_no_event_of_its_own_writes(
    moment: str, lag: float
) -> None:
    def manage(world: World) -> None:
        for item in world.all_of(WORKLOADS):
            world._manage(item)

    story = ((moment, ACTS["suspend"]), ("Suspended", manage), ("Suspended", ACTS["resume"]))
    world = live("queued", "well", story, lags={"pods": lag, "workloads": lag})
    assert world.job["status"]["phase"] == "Succeeded"
