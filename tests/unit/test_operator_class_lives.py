"""A job waits while what it names is away, and comes to its end once that is back: its class and
its service account, whatever becomes of the job, its Workload and single writes meanwhile."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.effective_spec import applied_class
from grpo_kube.objects.resources import Object, Resource
from grpo_kube.objects.times import Observed, ProcessClock
from grpo_operator.admission.queue import AdmissionQueue
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.loop.cluster_state import ReservedGangs
from grpo_operator.records.job_class import JobClasses
from grpo_operator.records.names import GRPOJOBS
from tests.generated import cases
from tests.unit.operator_world import LIMITS, PLAN
from tests.unit.queue_world import cluster
from tests.unit.test_operator_slow_ends import SlowEnds
from tests.unit.test_operator_writes import ACTS, ENDS, LAGS, LIMIT, check
from tests.unit.write_world import FAULTS, Act, Story
from tests.virtual_time import virtually

AWAY = 100.0
"""Seconds for which something is away."""
NAMES: dict[str, Any] = {
    "jobClassName": "h100",
    "podTemplate": {"spec": {"serviceAccountName": "trainer"}},
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "queued": {"placement": {"queueName": "team"}},
    "checked, queued": {
        "placement": {"accelerator": "GPU", "nodes": 2, "queueName": "team"},
        "preflight": "Auto",
    },
}
CLASS = applied_class("h100", 1, {"fixed": {"image": "theirs:1"}})
OTHER = applied_class("h100", 2, {"fixed": {"image": "theirs:2"}})
REFUSES = applied_class("h100", 3, {"limits": {"requiredLabels": ["team"]}})


def classes(*of_cluster: Any) -> dict[str, Any]:
    return {"job_classes": JobClasses(by_name={one.name: one for one in of_cluster})}


def accounts(*names: str) -> dict[str, Any]:
    return {"service_accounts": {"team-a": frozenset({"default", *names})}}


THERE: dict[str, Any] = {**classes(CLASS), **accounts("trainer")}


class Named(SlowEnds):
    """A cluster whose admission queue is the real one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.snapshot = replace(cluster(8, 8), **THERE)
        self.planned_without: list[str] = []
        """Attempts that were committed while something was away."""
        super().__init__(*args, **kwargs)

    def make_queue(self) -> Any:
        clock = ProcessClock(self.clock, lambda: Observed(self.now))
        jobs = ReservedGangs(self.caches, clock, LIMITS.scheduling_timeout_seconds)
        self.first_seen = FirstSeenTracker()
        self.queue = AdmissionQueue(
            jobs,
            lambda: self.snapshot,
            self.call,
            limits=LIMITS,
            clock=clock,
            pods=self.pods,
            first_seen_tracker=self.first_seen,
        )
        return self.queue

    def _make_reconciler(self) -> Any:
        reconciler = super()._make_reconciler()
        reconciler.observer.classes = lambda: self.snapshot.job_classes
        reconciler.observer.first_seen_tracker = self.first_seen
        reconciler.starter.first_seen_tracker = self.first_seen
        return reconciler

    def call(self, keys: Any, **_: bool) -> None:
        if [*keys]:
            self.call_for(0.0)

    def change(self, **facts: Any) -> None:
        self.snapshot = replace(self.snapshot, **facts)
        self.queue.wake()

    def control(self) -> bool:
        if self.timers.get("back", self.now + 1) <= self.now:
            del self.timers["back"]
            self.change(**THERE)
        # Of jobs that no cycle judges, a cycle wakes those whose facts have changed.
        if self.queue._is_due.is_set():
            self.queue._is_due.clear()
            self.queue._wake_held_up()
            if self.due is not None and self.due <= self.now:
                return True
        return super().control()

    def store(self, resource: Resource, item: Object) -> Object:
        attempt = item.get("status", {}).get("attempt", 0) if resource is GRPOJOBS else 0
        before = self.job["status"].get("attempt", 0) if attempt else 0
        stored = super().store(resource, item)
        is_there = self.snapshot.job_classes.by_name.get("h100") in (CLASS, OTHER)
        has_account = "trainer" in self.snapshot.service_accounts["team-a"]
        if attempt > before and not (is_there and has_account):
            self.planned_without.append(json.dumps(stored["status"]["conditions"]))
        return stored


def _away(**facts: Any) -> Act:
    def act(world: Any) -> None:
        world.change(**facts)
        world.timers["back"] = world.now + AWAY

    return act


CHANGES: dict[str, Act] = {
    "class away": _away(**classes()),
    "classes unseen": _away(job_classes=JobClasses(problem="classes can't be seen: 403")),
    "class refuses": _away(**classes(REFUSES)),
    "account away": _away(**accounts()),
    "other class": lambda world: world.change(**classes(OTHER)),  # type: ignore[attr-defined]
}
MOMENTS = ("", "Queued", "Starting", "Running", "ending", "Restarting", "Suspended")
MORE = ("suspend", "resume", "preempt", "delete workload", "crash trainer", "delete gang")
ALL = {**CHANGES, **{name: ACTS[name] for name in MORE}}


def live(kind: str, ends: str, story: Story, **more: Any) -> Named:
    world = Named({**KINDS[kind], **NAMES, **LIMIT}, PLAN, story, ends=ENDS[ends], **more)
    virtually(world.live())
    return world


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(work: Any, *given: Any) -> Any:
        return work(*given)

    monkeypatch.setattr("asyncio.to_thread", at_once)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_job_that_lacks_nothing_trains(kind: str) -> None:
    world = live(kind, "well", ())
    check(world)
    assert world.job["status"]["phase"] == "Succeeded"


@pytest.mark.parametrize("change", sorted(CHANGES))
@pytest.mark.parametrize("moment", ["", "Queued", "Running", "Restarting"])
@pytest.mark.parametrize("kind", ["queued", "checked, queued"])
def test_a_job_of_kueue_waits_for_what_it_names(kind: str, moment: str, change: str) -> None:
    world = live(kind, "bad, well", ((moment, CHANGES[change]),))
    check(world)
    assert world.planned_without == []
    assert world.job["status"]["phase"] == "Succeeded"


@settings(max_examples=cases(200), deadline=None)
@given(
    st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(ENDS)),
    st.lists(st.tuples(st.sampled_from(MOMENTS), st.sampled_from(sorted(ALL))), max_size=4),
    st.dictionaries(st.integers(0, 40), st.sampled_from(FAULTS), max_size=2), LAGS,
)  # fmt: skip
def test_a_job_ends_whatever_becomes_of_what_it_names(
    kind: str,
    ends: str,
    story: list[tuple[str, str]],
    faults: dict[int, str],
    lags: dict[str, float],
) -> None:
    acts: list[tuple[str, Act]] = []
    for moment, name in story:
        acts.append((moment, ALL[name]))
        if name == "suspend":
            acts.append(("Suspended", ACTS["resume"]))
    world = live(kind, ends, tuple(acts), faults=faults, lags=lags)
    check(world)
    assert world.planned_without == []
    assert world.early_release == ""
    assert world.job["status"]["phase"] in ("Succeeded", "Failed")
    assert sum(end["counted"] for end in world.job["status"]["ends"]) <= world.failed
