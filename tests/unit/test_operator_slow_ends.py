"""Pods hold what they were given until they have ended, and a kubelet gives each a grace period:
nobody else gets it before, whatever becomes of the job and whatever write fails."""

import re
from collections.abc import Awaitable, Callable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_kube.objects.resources import JOBS, PODS, Object, Resource
from grpo_operator.records.names import COMPONENT_TRAINER, LABEL_ATTEMPT, LABEL_COMPONENT
from tests.generated import cases
from tests.unit.test_operator_writes import ACTS, ENDS, KINDS, LAGS, LIMIT, MOMENTS
from tests.unit.write_world import ENDED, FAULTS, Act, T, World, is_live, owner
from tests.virtual_time import virtually

GRACE = 30.0
"""Seconds that a pod takes to end."""


class SlowEnds(World):
    """A cluster whose pods end slowly."""

    early_release = ""
    """The first write that gave quota back under a pod."""
    second_gang = ""
    """The first Job that was made while the gang of another attempt was to run on."""

    async def _write(self, request: str, apply: Callable[[], Awaitable[T]]) -> T:
        had_quota = self.has_quota
        gang = re.fullmatch(r"POST jobs run-(\d+)", request)
        if gang and any(attempt != gang[1] for attempt in self.whole_gangs):
            self.second_gang = self.second_gang or request
        try:
            return await super()._write(request, apply)
        finally:
            if had_quota and not self.has_quota and self.holding_pods:
                self.early_release = self.early_release or request

    @property
    def holding_pods(self) -> list[Object]:
        """Pods that have not ended, terminating ones included."""
        pods = self.pods_of(COMPONENT_TRAINER)
        return [pod for pod in pods if pod["status"]["phase"] not in ENDED]

    @property
    def whole_gangs(self) -> list[str]:
        """Attempts whose Job has not ended, none of its pods either, and nobody ends them."""
        gangs: list[str] = []
        for job in self.all_of(JOBS):
            labels, uid = job["metadata"]["labels"], job["metadata"]["uid"]
            pods = [pod for pod in self.all_of(PODS) if owner(pod) == uid]
            has_ended = job.get("status", {}).get("conditions") or not all(map(is_live, pods))
            has_ended = has_ended or ("deletionTimestamp" in job["metadata"] and not pods)
            if labels[LABEL_COMPONENT] == COMPONENT_TRAINER and not has_ended:
                gangs.append(labels[LABEL_ATTEMPT])
        return gangs

    @property
    def moment(self) -> str:
        """Also `placed`: pods are there, and the status does not say so yet."""
        phase = super().moment
        return "placed" if phase == "Starting" and self.holding_pods else phase

    def control(self) -> bool:
        timers = {*self.timers}
        has_changed = super().control()
        # A pod whose grace period is over leaves in the next step.
        return has_changed or not timers <= self.timers.keys()

    def end_pod(self, pod: Object) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            self.timers[pod["metadata"]["uid"]] = self.now + GRACE
        super().end_pod(pod)

    def remove(self, resource: Resource, item: Object) -> None:
        if resource is not PODS or item["metadata"]["uid"] not in self.timers:
            super().remove(resource, item)

    def _sync(self, job: Object) -> None:
        is_gang = job["metadata"]["labels"][LABEL_COMPONENT] == COMPONENT_TRAINER
        has_ended = bool(job.get("status", {}).get("conditions"))
        pods = [pod for pod in self.all_of(PODS) if owner(pod) == job["metadata"]["uid"]]
        if (
            is_gang
            and not has_ended
            and any("deletionTimestamp" in pod["metadata"] for pod in pods)
        ):
            # The Job controller counts a pod that terminates as one that failed.
            self._finish(job, "Failed")
        else:
            super()._sync(job)


def _edit_unseen(world: World) -> None:
    """A user suspends the job, changes and resumes it before the operator looks."""
    world.edit(suspend=True)
    world.edit(suspend=False, image="mine:2")


MORE_ACTS = {**ACTS, "edit unseen": _edit_unseen}
Acts = list[tuple[str, str]]


def live(
    kind: str, ends: str, acts: Acts, faults: dict[int, str], lags: dict[str, float]
) -> SlowEnds:
    spec, plan = KINDS[kind]
    story: list[tuple[str, Act]] = []
    for moment, name in acts:
        story.append((moment, MORE_ACTS[name]))
        if name == "suspend":
            story.append(("Suspended", ACTS["resume"]))
    world = SlowEnds(
        {**spec, **LIMIT}, plan, tuple(story), ends=ENDS[ends], faults=faults, lags=lags
    )
    virtually(world.live())
    return world


ANY_ACTS = st.lists(
    st.tuples(st.sampled_from((*MOMENTS, "placed")), st.sampled_from(sorted(MORE_ACTS))), max_size=3
)
ANY_FAULTS = st.dictionaries(st.integers(0, 40), st.sampled_from(FAULTS), max_size=2)
QUEUED_KINDS = tuple(kind for kind in KINDS if "queued" in kind)


@settings(max_examples=cases(40))
@given(st.sampled_from(QUEUED_KINDS), st.sampled_from(sorted(ENDS)), ANY_ACTS, ANY_FAULTS, LAGS)
@example("queued", "well", [("placed", "preempt")], {}, {"pods": 20.0})
def test_kueue_counts_the_quota_of_pods_that_still_end(
    kind: str, ends: str, acts: Acts, faults: dict[int, str], lags: dict[str, float]
) -> None:
    assert live(kind, ends, acts, faults, lags).early_release == ""


@settings(max_examples=cases(40))
@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(ENDS)), ANY_ACTS, ANY_FAULTS, LAGS)
@example("plain", "well", [("Running", "edit unseen")], {5: "unavailable"}, {})
@example("plain", "well", [("Starting", "suspend")], {2: "lost", 3: "unavailable"}, {"jobs": 20.0})
def test_no_gang_starts_while_another_is_to_run_on(
    kind: str, ends: str, acts: Acts, faults: dict[int, str], lags: dict[str, float]
) -> None:
    assert live(kind, ends, acts, faults, lags).second_gang == ""
