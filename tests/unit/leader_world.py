"""A pure world of one GRPOJob's Jobs and pods, in any state that a new leader may find.

A small model of the Job controller, the garbage collector and trainers answers the operator, which
looks through the real parsers, policies and status.
"""

from dataclasses import astuple, dataclass, field, replace
from typing import Any

from grpo_api.plan.plan import ExecutionPlan
from grpo_kube.objects.times import Observed
from grpo_operator.admission.queue import _decision
from grpo_operator.admission.scheduler import Verdict, hold_until_checked, refusal
from grpo_operator.decide.cleanup import clean_up
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.next_action import decide
from grpo_operator.decide.observation import Observation, observe
from grpo_operator.pods.manifests import spec_version
from grpo_operator.records.names import (
    COMPONENT_ENGINE,
    COMPONENT_TRAINER,
    LABEL_CONTROLLER,
    engine_job,
)
from grpo_operator.records.parsing import pod_record
from grpo_operator.records.reasons import Reason
from grpo_operator.records.records import PodRecord
from grpo_operator.records.workloads import WorkloadRecord
from grpo_operator.report.status import build_status, to_json
from tests.unit.operator_world import (
    ENGINE,
    KEY,
    LIMITS,
    NOW,
    PLAN,
    UID,
    make_child,
    make_job,
    pod_object,
    said,
    terminated,
)

SERVED_PLAN = PLAN.model_copy(update={"engine": ENGINE.model_copy(update={"replicas": 1})})
ENDS = {"live": {"running": {}}, "well": terminated(0, said("Succeeded")), "bad": terminated(1)}
ATTEMPT = 2
"""The current attempt at first."""
LONGEST = 1e5
"""Seconds of a round, more than any deadline."""


@dataclass
class Child:
    """A Job. `owner` is the uid of its GRPOJob, empty for a stranger's."""

    uid: str
    attempt: int
    owner: str
    engines: bool = False
    deleting: bool = False
    ended: str = ""
    version: str = ""
    """The spec that it was made from (pods.spec_version)."""

    @property
    def name(self) -> str:
        return engine_job(KEY.name, self.attempt) if self.engines else f"{KEY.name}-{self.attempt}"


@dataclass
class Pod:
    """A pod. `made` is the uid of the Job that made it, `owner` of the one that controls it."""

    attempt: int
    index: int
    engine: bool
    made: str
    owner: str
    state: str = "live"
    deleting: bool = False
    number: int = field(default=0, kw_only=True)

    @property
    def is_live(self) -> bool:
        return self.state == "live" and not self.deleting

    def record(self) -> PodRecord:
        component = COMPONENT_ENGINE if self.engine else COMPONENT_TRAINER
        name = f"pod-{self.number}"
        item = pod_object(
            self.index, self.attempt, ENDS[self.state], name=name, uid=name, by=self.owner or None,
            deleted=self.deleting, component=component,
        )  # fmt: skip
        item["metadata"]["labels"] |= {LABEL_CONTROLLER: self.made} if self.made else {}
        return pod_record(item)


@dataclass
class World:
    """The cluster and its new leader."""

    spec: dict[str, Any]
    meta: dict[str, Any]
    status: dict[str, Any]
    plan: ExecutionPlan
    workload: WorkloadRecord | None
    kueue_problem: str = ""
    jobs: list[Child] = field(default_factory=list)
    pods: list[Pod] = field(default_factory=list)
    tracker: FirstSeenTracker = field(default_factory=FirstSeenTracker)
    now: float = 0.0
    wall: float = 0.0
    """Seconds by which the leader's wall clock is fast."""
    made: int = 0
    policy: str = ""
    """How somebody deletes all Jobs after two rounds; empty: nobody does."""
    still: int = 0
    """Rounds in a row without a change."""

    def put_job(self, kind: str, uid: str, *, engines: bool = False) -> None:
        """Add a Job of the current attempt."""
        owner = {"stranger": "", "old": "uid-old"}.get(kind, UID)
        ended = kind if kind in ("Failed", "Complete") else ""
        if kind != "none":
            uid = uid if owner == UID else kind
            self.jobs.append(Child(uid, ATTEMPT, owner, engines, kind == "deleting", ended))

    def put_pod(self, kind: str, index: int, uid: str, *, engine: bool = False) -> None:
        """Add a pod of that kind, which the Job with this uid made."""
        state = next((end for end in ("well", "bad") if end in kind), "live")
        if kind == "hand":
            self.add(ATTEMPT, index, engine, "", "")
        elif kind == "earlier":
            self.add(ATTEMPT - 1, index, engine, "job-1", "")
        elif "orphan" in kind:
            # The Job controller adopts the orphans of a Job that is there.
            is_there = any(job.uid == uid and not job.deleting for job in self.jobs)
            self.add(ATTEMPT, index, engine, "lost" if is_there else uid, "", state)
        elif kind != "none":
            self.add(ATTEMPT, index, engine, uid, uid, state, kind == "deleting")

    def add(self, *pod: Any) -> None:
        self.made += 1
        self.pods.append(Pod(*pod, number=self.made))

    def look(self) -> Observation:
        children = [
            make_child(
                job.attempt, job.owner, uid=job.uid, name=job.name, deleting=job.deleting,
                ended=job.ended, version=job.version,
            )
            for job in self.jobs
        ]  # fmt: skip
        seen = observe(
            make_job(self.spec, self.status, **self.meta),
            children,
            [pod.record() for pod in self.pods],
            now=NOW + self.now + self.wall,
            at=Observed(NOW + self.now),
            first_seen_tracker=self.tracker,
        )
        return replace(seen, workload=self.workload, kueue_problem=self.kueue_problem)

    def reconcile(self) -> Decision:
        """What loop/reconcile.py does."""
        seen = self.look()
        decision = Decision(Action.WAIT)
        if not seen.job.deleting:
            decision = decide(seen, LIMITS)
            if decision.action is Action.ADMIT:
                decision = self.admit(seen, decision)
            if decision.action is Action.COMMIT:
                self.write(seen, decision)
                seen = self.look()
                decision = decide(seen, LIMITS)
            for _ in range(2):
                if decision.action is Action.START:
                    seen, decision = self.start(seen)
            self.write(seen, decision)
        self.collect(self.look())
        return decision

    def write(self, seen: Observation, decision: Decision) -> None:
        self.status = to_json(build_status(seen, decision))

    def admit(self, seen: Observation, decision: Decision) -> Decision:
        if seen.job.queue_name and not (self.workload and self.workload.may_start):
            return replace(decision, action=Action.QUEUE, reason="WaitingForKueue", plan=self.plan)
        return replace(decision, action=Action.COMMIT, plan=self.plan)

    def start(self, seen: Observation) -> tuple[Observation, Decision]:
        """Create a Job, unless its name is taken."""
        attempt, engines = seen.job.status.attempt, seen.child is not None
        if not engines:
            assert not [pod for pod in self.pods if pod.attempt == attempt and pod.made]
            assert not [job for job in self.jobs if (job.owner, job.attempt) == (UID, attempt)]
        self.made += 1
        assert seen.job.spec
        version = spec_version(seen.job.spec)
        job = Child(f"new-{self.made}", attempt, UID, engines, version=version)
        if any(other.name == job.name for other in self.jobs):
            return seen, Decision(Action.WAIT, "NameTaken", "taken", requeue_after=15)
        self.jobs.append(job)
        if not engines:
            self.tracker.record_created(KEY, attempt, job.uid, seen.at)
        seen = self.look()
        return seen, decide(seen, LIMITS)

    def collect(self, seen: Observation) -> None:
        """What loop/garbage_collector.py does."""
        garbage = clean_up(seen, LIMITS)
        self.jobs = [job for job in self.jobs if job.name not in garbage.delete_jobs]
        kept = {"", *(job.uid for job in (seen.child, seen.engines) if job)}
        for pod in self.pods:
            stopped = garbage.stop_engines if pod.engine else garbage.stop_attempts
            is_current = pod.attempt == seen.job.status.attempt
            is_lost = garbage.stop_orphans and is_current and pod.made not in kept
            if pod.is_live and (is_lost or pod.attempt in stopped):
                pod.deleting = True

    def control(self) -> None:
        """One step of Kubernetes' controllers, and the end of pods that were deleted before it."""
        gone = [pod.number for pod in self.pods if pod.deleting]
        self.jobs = [job for job in self.jobs if job.owner in (UID, "")]
        for job in [job for job in self.jobs if job.owner]:
            pods = [pod for pod in self.pods if pod.owner == job.uid]
            if job.deleting and not pods:
                self.jobs.remove(job)
            elif job.deleting or job.ended:
                for pod in pods:
                    pod.deleting |= job.deleting or pod.is_live
            else:
                self.sync(job, pods)
        uids = {"", *(job.uid for job in self.jobs)}
        for pod in self.pods:
            pod.deleting |= pod.owner not in uids
        self.pods = [pod for pod in self.pods if pod.number not in gone]

    def sync(self, job: Child, pods: list[Pod]) -> None:
        """A Job that has not ended: a gang ends with its first pod, engines are made again."""
        live = [pod for pod in pods if pod.is_live]
        there = live if job.engines else pods
        missing = set(range(1 if job.engines else PLAN.nodes)) - {pod.index for pod in there}
        is_failing = any(pod.deleting or pod.state == "bad" for pod in pods)
        if not job.engines and (is_failing or (missing and len(live) < len(pods))):
            job.ended = "Failed"
        elif not missing and not live:
            job.ended = "Complete"
        elif not missing and self.still > 2 and not self.has_engines():
            # Rank 0 has waited for engines in vain (guard.rendezvousTimeoutSeconds).
            live[0].state = "bad"
        else:
            for index in missing:
                self.add(job.attempt, index, job.engines, job.uid, job.uid)

    def replace_leader(self, policy: str) -> None:
        """Somebody deletes all Jobs with this propagation policy, before a new leader that finds
        their uids nowhere."""
        self.tracker = FirstSeenTracker()
        self.status.pop("jobUid", None)
        for job in self.jobs:
            job.deleting |= policy == "Foreground"
        if policy == "Orphan":
            for pod in self.pods:
                pod.owner = ""
        if policy != "Foreground":
            self.jobs = []

    def has_engines(self) -> bool:
        return not self.plan.engine or any(pod.engine and pod.is_live for pod in self.pods)

    def rest(self, rounds: int) -> Decision:
        """Drive the world until nothing changes, whatever time passes. Return the last decision."""
        before: Any = None
        for number in range(rounds):
            decision = self.reconcile()
            if self.policy and number == 1:
                self.replace_leader(self.policy)
            self.control()
            status = {key: self.status.get(key) for key in ("attempt", "phase", "conditions")}
            now = repr((status, [*map(astuple, self.jobs)], [*map(astuple, self.pods)]))
            before, self.still = now, self.still + 1 if now == before else 0
            if self.still > (5 if decision.requeue_after else 3):
                return decision
            pause = (decision.requeue_after or 1.0) * 10.0**self.still
            self.now += min(LONGEST, max(1.0, pause))
        raise AssertionError(f"no rest after {rounds} rounds: {decision}")


@dataclass
class QueuedWorld(World):
    """A cluster whose own queue judges jobs: a verdict becomes the decision as it does there."""

    answer: str = "admitted"
    """`admitted`, `waits`, `no plan` or `refused`."""

    def admit(self, seen: Observation, decision: Decision) -> Decision:
        job = seen.job
        if job.queue_name:
            return super().admit(seen, decision)
        message = f"{self.answer} in generation {job.generation}"
        verdict = Verdict(
            generation=job.generation,
            plan=None if self.answer == "no plan" else self.plan,
            admitted=self.answer == "admitted",
            reason=Reason.WAITING_FOR_GPUS,
            message=message,
        )
        if self.answer == "refused":
            verdict = refusal(job, (Reason.NO_IMAGE, message))
        return _decision(decision, hold_until_checked(job, verdict, preflight=True))
