"""Pods hold what they were given until they have ended, and a kubelet gives each a grace period:
nobody else gets it before, whatever becomes of the job and whatever write fails."""

from collections.abc import Awaitable, Callable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_kube.objects.resources import PODS, Object, Resource
from grpo_operator.records.names import COMPONENT_TRAINER, LABEL_COMPONENT
from tests.generated import cases
from tests.unit.test_operator_writes import ACTS, ENDS, KINDS, LAGS, LIMIT, MOMENTS
from tests.unit.write_world import ENDED, FAULTS, Act, T, World, owner
from tests.virtual_time import virtually

GRACE = 30.0
"""Seconds that a pod takes to end."""


class SlowEnds(World):
    """A cluster whose pods end slowly."""

    early_release = ""
    """The first write that gave quota back under a pod."""

    async def _write(self, request: str, apply: Callable[[], Awaitable[T]]) -> T:
        had_quota = self.has_quota
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
    def moment(self) -> str:
        """Also `placed`: pods are there, and the status does not say so yet."""
        phase = super().moment
        return "placed" if phase == "Starting" and self.holding_pods else phase

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


Acts = list[tuple[str, str]]


def live(
    kind: str, ends: str, acts: Acts, faults: dict[int, str], lags: dict[str, float]
) -> SlowEnds:
    spec, plan = KINDS[kind]
    story: list[tuple[str, Act]] = []
    for moment, name in acts:
        story.append((moment, ACTS[name]))
        if name == "suspend":
            story.append(("Suspended", ACTS["resume"]))
    world = SlowEnds(
        {**spec, **LIMIT}, plan, tuple(story), ends=ENDS[ends], faults=faults, lags=lags
    )
    virtually(world.live())
    return world


ANY_ACTS = st.lists(
    st.tuples(st.sampled_from((*MOMENTS, "placed")), st.sampled_from(sorted(ACTS))), max_size=3
)
ANY_FAULTS = st.dictionaries(st.integers(0, 40), st.sampled_from(FAULTS), max_size=1)
QUEUED_KINDS = tuple(kind for kind in KINDS if "queued" in kind)


@settings(max_examples=cases(40))
@given(st.sampled_from(QUEUED_KINDS), st.sampled_from(sorted(ENDS)), ANY_ACTS, ANY_FAULTS, LAGS)
@example("queued", "well", [("placed", "preempt")], {}, {"pods": 20.0})
def test_kueue_counts_the_quota_of_pods_that_still_end(
    kind: str, ends: str, acts: Acts, faults: dict[int, str], lags: dict[str, float]
) -> None:
    assert live(kind, ends, acts, faults, lags).early_release == ""
