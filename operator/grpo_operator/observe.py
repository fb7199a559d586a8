"""One GRPOJob and everything that belongs to it, at one moment: what the policies decide on.

Decisions see facts ("the gang runs", "this termination is the cause"), not API objects. Records and the time in,
Observation out.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

from grpo_api.causes import Tier
from grpo_api.report import Outcome, Progress, Result
from grpo_api.status import ConditionType

from .names import runs_engines
from .records import ENDED_PHASES, GRPOJobRecord, JobRecord, PodRecord
from .roles import replicas
from .sightings import Sighting, Sightings
from .terminations import PodTermination
from .times import Observed, seconds
from .workloads import WorkloadRecord

NO_PODS: tuple[PodRecord, ...] = ()
_BEGUN = ("Training", "Saving", "Exporting", "Finished")
"""Stages of an attempt that waits for no engine's first sign any more."""


@dataclass(frozen=True, slots=True)
class Pull:
    """The last successful pull of a running attempt's /progress."""

    progress: Progress
    at: Observed
    """When it was pulled."""
    advanced_at: Observed
    """When a pull first showed this step, this stage and this number of events."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Rank 0 of a running attempt does not answer."""

    since: Observed
    """When it answered last, or was asked first."""
    problem: str
    """What the last pull failed with."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The world as one GRPOJob sees it."""

    job: GRPOJobRecord
    now: float
    """Unix seconds of the operator's own clock, for what is stored."""
    at: Observed
    """The same moment, for what is measured."""
    child: JobRecord | None = None
    """The Job of the current attempt, if it is this GRPOJob's own and (once known) the one that was started."""
    pods: tuple[PodRecord, ...] = NO_PODS
    """Training pods of the current attempt, by index, then name."""
    engines: JobRecord | None = None
    """The Job of the current attempt's engines, if it is this GRPOJob's own."""
    engine_pods: tuple[PodRecord, ...] = NO_PODS
    """Its pods, by index, then name: also those that failed and were made again."""
    sighting: Sighting = field(default_factory=Sighting)
    """When the operator first saw these."""
    earlier_jobs: tuple[JobRecord, ...] = ()
    """This GRPOJob's Jobs of earlier attempts, oldest first."""
    earlier_pods: tuple[PodRecord, ...] = NO_PODS
    """Pods that carry an earlier attempt's labels; and the current one's, where it is not to run and its Job doesn't
    control them."""
    departed: tuple[PodRecord, ...] = NO_PODS
    """Pods of any attempt that ended and were deleted since, as they were last seen."""
    orphaned: bool = False
    """Whether pods of the current attempt are there without their Job: it was deleted, maybe before it was known."""
    pull: Pull | None = None
    """Last answer of the current attempt's rank 0."""
    silence: Silence | None = None
    """That rank 0 does not answer."""
    source: GRPOJobRecord | None = None
    """The GRPOJob that spec.resumeFrom names, if it is there."""
    gang_left: bool = False
    """Whether a pod of any attempt has not ended, or a Job may still make one."""
    pods_left: bool = False
    """Whether a pod of any attempt has not ended."""
    workload: WorkloadRecord | None = None
    """Kueue's Workload of this GRPOJob, if it is there and this GRPOJob's own."""
    kueue_problem: str = ""
    """Why the Workload can't be looked up; empty if it can, or if Kueue doesn't admit the job."""
    words: str = ""
    """What an event says of the Job or pod that is not getting on, such as `FailedMount: …`; empty when unknown."""

    @property
    def retry_asked(self) -> bool:
        """Whether the job has failed, and the user has raised spec.retry since."""
        job = self.job
        if not job.ended or job.spec is None or not job.is_true(ConditionType.FAILED):
            return False
        return job.spec.retry > job.status.retry

    @property
    def replicas(self) -> int:
        """How many engines in pods of their own the plan has."""
        return replicas(self.job.status.plan)

    @property
    def ran(self) -> bool:
        """Whether the whole gang has run, so that what is missing has ended, and engines are made again; or whether it
        trains without engines that did not come in guard.rendezvousTimeoutSeconds."""
        begun = self.pull is not None and self.pull.progress.stage in _BEGUN
        return self.job.is_true(ConditionType.RUNNING) or (bool(self.replicas) and begun)

    @cached_property
    def pods_bound(self) -> bool:
        """Whether every training pod has a node."""
        return len(self.pods) >= self.job.nodes and all(pod.node for pod in self.pods)

    @cached_property
    def bound(self) -> bool:
        """Whether every pod of the gang has a node, before it runs its engines among them."""
        return self.pods_bound and (self.ran or len(self.engines_bound) >= self.replicas)

    @cached_property
    def engines_bound(self) -> frozenset[int]:
        """Indices of the engines that have a node, or had one."""
        return frozenset(pod.index for pod in self.engine_pods if pod.node)

    @cached_property
    def pods_started(self) -> bool:
        """Whether every training pod runs or has run."""
        return len(self.pods) >= self.job.nodes and all(pod.phase in ("Running", *ENDED_PHASES) for pod in self.pods)

    @cached_property
    def started(self) -> bool:
        """Whether every pod of the gang runs or has run, before that its engines among them."""
        return self.pods_started and (self.ran or len(self.engines_up) >= self.replicas)

    @cached_property
    def engines_up(self) -> frozenset[int]:
        """Indices of the engines that run."""
        up = (pod for pod in self.engine_pods if pod.phase == "Running" and pod.live and not pod.termination)
        return frozenset(pod.index for pod in up if not pod.node_lost and pod.index < self.replicas)

    @cached_property
    def terminations(self) -> tuple[PodTermination, ...]:
        """How the current attempt's pods ended, deletions and lost nodes among them."""
        return tuple(self._ends.values())

    @cached_property
    def _ends(self) -> dict[str, PodTermination]:
        """The terminations by uid of the pod."""
        found = {pod.uid: _termination(pod, self._deleted_first(pod), self._any_ended) for pod in self.pods}
        return {uid: end for uid, end in found.items() if end}

    @cached_property
    def _any_ended(self) -> bool:
        return any(pod.termination for pod in self.pods)

    def _deleted_first(self, pod: PodRecord) -> bool:
        """Whether the pod's deletion was seen before any pod failed by itself.

        After a failure it is the Job controller that deletes the others. A deletion and a failure that were first seen
        at the same moment may have come in either order: then the failure is the cause.
        """
        if not pod.deleting:
            return False
        failed = [self.sighting.end_of(one, self.at) for one in self.pods if self._failed_by_itself(one)]
        return not failed or self.sighting.deletion_of(pod, self.at) < min(failed)

    def _failed_by_itself(self, pod: PodRecord) -> bool:
        """Whether a pod failed, and not because it was deleted: that ends a program too, mostly without a report."""
        end = pod.termination
        if end is None or not end.own_failure:
            return False
        if not pod.deleting:
            return True
        ended, deleted = self.sighting.end_of(pod, self.at), self.sighting.deletion_of(pod, self.at)
        return ended < deleted or (end.reported and ended == deleted)

    @cached_property
    def succeeded(self) -> Outcome | None:
        """Rank 0's word that training is done, or that of all ranks together."""
        done = [(pod, pod.termination) for pod in self.pods if pod.termination and pod.termination.succeeded]
        if any(pod.index == 0 for pod, _ in done) or len(done) >= self.job.nodes:
            return min((found.outcome for _, found in done), key=lambda outcome: outcome.rank)
        return None

    @cached_property
    def cause(self) -> PodTermination | None:
        """The end to blame for the end of the attempt; None while nothing has ended badly.

        The first pod of a gang to fail is often only a symptom: when one rank dies, its peers lose their connections,
        and the Job controller deletes the survivors. So the lowest tier is blamed, then what was seen first.
        """
        ended = self.sighting.ended
        failed = [
            (end.tier, ended.get(uid, self.at), end.outcome.rank, uid)
            for uid, end in self._ends.items()
            if not end.succeeded
        ]
        return self._ends[min(failed)[-1]] if failed else None

    @property
    def over_for(self) -> float:
        """Seconds since the operator first saw that the current attempt is over; endless if only it thinks so."""
        return self.at - self.sighting.over if self.sighting.over else float("inf")

    @cached_property
    def settled(self) -> bool:
        """Whether waiting longer can't change the cause."""
        return self.cause is not None and (self.cause.certain or len(self.terminations) >= self.job.nodes)

    @property
    def elapsed(self) -> float:
        """Seconds that count for spec.activeDeadlineSeconds."""
        since = seconds(self.job.status.attempt_start_time)
        return self.job.status.active_seconds + (max(0.0, self.now - since) if since is not None else 0.0)

    @property
    def running_seconds(self) -> float:
        """How long the whole gang of the current attempt has run."""
        return self.since(ConditionType.RUNNING) if self.job.is_true(ConditionType.RUNNING) else 0.0

    def since(self, kind: ConditionType) -> float:
        """Seconds since the condition last changed; 0 when it was never written, or the clock was set back since."""
        found = self.job.condition(kind)
        return max(0.0, self.now - (seconds(found.last_transition_time) or self.now)) if found else 0.0


def _termination(pod: PodRecord, deleted_first: bool, any_ended: bool) -> PodTermination | None:
    """A pod's end, or its deletion or lost node as one.

    A lost node explains its peers' ends, but is none by itself: the node may come back.
    """
    known = pod.termination
    if known:
        blamed = deleted_first and not known.disrupted and known.tier >= Tier.HANG
        return replace(known, disrupted=True, node="") if blamed else known
    if deleted_first:
        message, node = f"pod {pod.name} was deleted while it ran", ""
    elif pod.node_lost and any_ended:
        message, node = f"node {pod.node} of pod {pod.name} is not ready", pod.node
    else:
        return None
    outcome = Outcome(result=Result.PREEMPTED, message=message)
    return PodTermination(outcome=outcome, reported=False, disrupted=True, node=node)


def observe(
    job: GRPOJobRecord,
    children: Collection[JobRecord],
    pods: Collection[PodRecord],
    *,
    now: float,
    at: Observed,
    sightings: Sightings,
) -> Observation:
    """Sorts a GRPOJob's children into the current attempt and earlier ones; strangers' are left out.

    Labels are hints that anybody can set. A Job is this GRPOJob's if that is its controller; a pod of the current
    attempt counts only if its controller is the attempt's Job. Pods of attempts that are not to run only have to end,
    so that for them the labels do: somebody may have orphaned them, and the next attempt waits for what they hold.
    """
    attempt = job.status.attempt
    own_jobs = sorted((c for c in children if c.grpojob_uid == job.uid), key=lambda c: c.attempt)
    labelled = sorted((p for p in pods if p.grpojob_uid == job.uid), key=lambda p: (p.index, p.name))
    of_roles = [child for child in own_jobs if child.attempt == attempt]
    current = [child for child in of_roles if not runs_engines(child.name)]
    engines = next((c for c in of_roles if not c.deleting and runs_engines(c.name)), None)
    expected = job.status.job_uid
    controllers = {child.uid for child in current} | {expected}
    pods_left = any(pod.phase not in ENDED_PHASES for pod in labelled)
    of_attempt = [pod for pod in labelled if pod.attempt == attempt]
    child = next((c for c in current if not c.deleting and (expected is None or c.uid == expected)), None)
    own_pods = tuple(pod for pod in of_attempt if pod.controller_uid in controllers)
    stray = [pod for pod in of_attempt if pod.controller_uid not in controllers]
    engine_pods = tuple(pod for pod in stray if engines and pod.controller_uid == engines.uid)
    stray = [pod for pod in stray if pod not in engine_pods]
    orphaned = any(pod.controller_uid for pod in stray)
    if job.active:
        sighting = sightings.of(job.key, attempt, child, own_pods, at, expected=bool(expected) or orphaned)
    else:
        sighting = sightings.forget(job.key)
    return Observation(
        job=job,
        now=now,
        at=at,
        child=child,
        pods=own_pods,
        engines=engines,
        engine_pods=engine_pods,
        sighting=sighting,
        orphaned=orphaned,
        gang_left=pods_left or any(not c.ended for c in own_jobs),
        pods_left=pods_left,
        earlier_jobs=tuple(c for c in own_jobs if c.attempt < attempt and not c.deleting),
        earlier_pods=tuple(pod for pod in labelled if pod.attempt < attempt or (pod in stray and not job.active)),
    )
