"""Any state that a new leader may meet comes to a rest, and no attempt's number has two gangs."""

from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kube.objects.times import Observed
from tests.generated import cases
from tests.unit import kueue_world
from tests.unit.leader_world import ATTEMPT, SERVED_PLAN, Child, World
from tests.unit.operator_world import KEY, NOW, PLAN, UID, active_status, at, condition

ROUNDS = 20
NO_ADMISSION = [condition("Admitted", "False", "SchedulingTimeout"), condition("Running", "False")]
PHASES: dict[str, list[dict[str, Any]]] = {
    "starting": [condition("Admitted"), condition("Running", "False")],
    "running": [condition("Admitted"), condition("Running")],
    "backing off": [condition("Admitted"), condition("Running", "False", "RestartBackoff")],
    "released": NO_ADMISSION,
    "suspended": [*NO_ADMISSION, condition("Suspended")],
    "succeeded": [condition("Admitted"), condition("Succeeded")],
    "failed": [condition("Admitted"), condition("Failed"), condition("Succeeded", "False")],
}
JOBS = ("none", "ours", "deleting", "Failed", "Complete", "stranger", "old")
PODS = ("none", "live", "well", "bad", "orphan", "orphan well", "deleting", "hand", "earlier")
WORKLOADS = {
    "none": None,
    "gone": None,
    "unknown": None,
    "admitted": kueue_world.make_workload(kueue_world.admitted()),
    "evicted": kueue_world.make_workload(kueue_world.evicted()),
}
SELDOM = (False, False, False, False, True)


class State(NamedTuple):
    """What a new leader finds; an engines' Job of None: the plan has no engines in pods."""

    job: str
    job_uid: str | None
    phase: str
    rank0: str
    rank1: str
    engines: str | None
    engine: str
    kueue: str
    suspended: bool
    deleted: bool
    unreadable: bool
    earlier: str
    """The Job of another attempt; "later" where somebody has set the status back."""
    knows_job: bool
    """True for an operator that has led since it made the attempt's Job."""
    policy: str
    """How somebody deletes all Jobs later, before the next leader; empty: nobody does."""

    def world(self) -> World:
        """The cluster in this state."""
        spec: dict[str, Any] = {"suspend": self.suspended}
        spec |= {"training": {"beta": "much"}} if self.unreadable else {}
        meta: dict[str, Any] = {"deletionTimestamp": at(0)} if self.deleted else {}
        if self.kueue != "none":
            meta["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
        plan = SERVED_PLAN if self.engines else PLAN
        status = active_status(ATTEMPT, plan, jobUid=self.job_uid, conditions=PHASES[self.phase])
        world = World(spec, meta, status, plan, WORKLOADS[self.kueue])
        world.kueue_problem = "not known" if self.kueue == "unknown" else ""
        world.policy = self.policy
        world.put_job(self.job, "job-2")
        world.put_pod(self.rank0, 0, "job-2")
        world.put_pod(self.rank1, 1, "job-2")
        if self.engines:
            world.put_job(self.engines, "engines-2", engines=True)
            world.put_pod(self.engine, 0, "engines-2", engine=True)
        if self.earlier == "later":
            world.jobs.append(Child("job-3", ATTEMPT + 1, UID))
        elif self.earlier != "none":
            world.jobs.append(Child("job-1", 1, UID, ended=self.earlier))
        if self.knows_job:
            world.tracker.record_created(KEY, ATTEMPT, "job-2", Observed(NOW - 50))
        return world


DOMAIN: tuple[tuple[Any, ...], ...] = (
    JOBS, (None, "job-2", "other"), ("starting", "running", *PHASES), PODS, PODS, (None, *JOBS),
    PODS, ("none", *WORKLOADS), SELDOM, SELDOM, SELDOM,
    ("none", "", "Failed", "later"), (False, True),
    ("", "", "", "", "Background", "Foreground", "Orphan"),
)  # fmt: skip


@settings(max_examples=cases(1000, gate=60))
@given(st.builds(State, *map(st.sampled_from, DOMAIN)))
def test_any_state_comes_to_a_rest_where_only_the_running_attempt_has_live_pods(
    state: State,
) -> None:
    """World.start has the assertion that no two gangs share an attempt's number."""
    world = state.world()
    decision = world.rest(ROUNDS)
    seen, phase = world.look(), world.status.get("phase")
    # What a stranger made by hand is not the operator's to end.
    live = [pod for pod in world.pods if pod.state == "live" and pod.made]
    runs = phase == "Running" and seen.job.is_active
    if runs and seen.child and not seen.child.ended:
        own = {job.uid for job in (seen.child, seen.engines) if job}
        assert {pod.owner for pod in live} <= own
        trainers = [pod for pod in world.pods if pod.owner == seen.child.uid]
        assert len(trainers) == PLAN.nodes
        assert all(pod.state != "bad" for pod in trainers)
    else:
        assert live == []
        has_reason = bool(decision.reason) or phase in ("Queued", "Suspended")
        assert has_reason or seen.job.is_finished or seen.job.deleting
