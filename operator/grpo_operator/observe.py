"""One GRPOJob and everything that belongs to it, at one moment: what the policies decide on.

Decisions see facts ("the gang runs", "this termination is the cause"), not API objects. Records and the time in,
Observation out.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from grpo_api.causes import Tier
from grpo_api.report import Outcome, Progress, Result
from grpo_api.status import ConditionType

from .records import ENDED_PHASES, GRPOJobRecord, JobRecord, PodRecord
from .terminations import PodTermination, root_cause
from .times import seconds

NO_PODS: tuple[PodRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """The last successful pull of a running attempt's /progress."""

    progress: Progress
    at: float
    """Unix time of the pull."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The world as one GRPOJob sees it. All times are unix seconds."""

    job: GRPOJobRecord
    now: float
    child: JobRecord | None = None
    """The Job of the current attempt, if it is this GRPOJob's own and (once known) the one that was started."""
    pods: tuple[PodRecord, ...] = NO_PODS
    """Pods of the current attempt, by index, then name."""
    earlier_jobs: tuple[JobRecord, ...] = ()
    """This GRPOJob's Jobs of earlier attempts, oldest first."""
    earlier_pods: tuple[PodRecord, ...] = NO_PODS
    """Pods that carry an earlier attempt's labels."""
    orphaned: bool = False
    """Whether pods of the current attempt are there without their Job: it was deleted, maybe before it was known."""
    pull: Pull | None = None
    """What rank 0 of the current attempt last said."""

    @cached_property
    def bound(self) -> bool:
        """Whether every pod of the gang has a node."""
        return len(self.pods) >= self.job.nodes and all(pod.node for pod in self.pods)

    @cached_property
    def started(self) -> bool:
        """Whether every pod of the gang runs or has run."""
        return len(self.pods) >= self.job.nodes and all(pod.phase in ("Running", *ENDED_PHASES) for pod in self.pods)

    @cached_property
    def terminations(self) -> tuple[PodTermination, ...]:
        """How the current attempt's pods ended, deletions and lost nodes among them."""
        ended = [pod.termination for pod in self.pods if pod.termination]
        first = min((one.finished_at for one in ended if one.finished_at), default=None)
        return tuple(found for pod in self.pods if (found := _termination(pod, first, bool(ended))))

    @cached_property
    def succeeded(self) -> Outcome | None:
        """Rank 0's word that training is done, or that of all ranks together."""
        done = [(pod, pod.termination) for pod in self.pods if pod.termination and pod.termination.succeeded]
        if any(pod.index == 0 for pod, _ in done) or len(done) >= self.job.nodes:
            return min((found.outcome for _, found in done), key=lambda outcome: outcome.rank)
        return None

    @cached_property
    def cause(self) -> PodTermination | None:
        """The end to blame for the end of the attempt; None while nothing has ended badly."""
        return root_cause(self.terminations)

    @cached_property
    def settled(self) -> bool:
        """Whether waiting longer can't change the cause."""
        return self.cause is not None and (self.cause.certain or len(self.terminations) >= self.job.nodes)

    @property
    def elapsed(self) -> float:
        """Seconds that count for spec.activeDeadlineSeconds."""
        since = seconds(self.job.status.attempt_start_time)
        return self.job.status.active_seconds + (max(0.0, self.now - since) if since is not None else 0.0)

    def since(self, kind: ConditionType) -> float:
        """Seconds since the condition last changed; 0 when it was never written."""
        found = self.job.condition(kind)
        return self.now - (seconds(found.last_transition_time) or self.now) if found else 0.0


def _termination(pod: PodRecord, first_failure: float | None, any_ended: bool) -> PodTermination | None:
    """A pod's end, or its deletion or lost node as one.

    A deletion that was asked for before any peer failed is a cause (somebody deleted the pod); a later one is the
    Job controller clearing up after the first failure. A lost node explains its peers' ends, but is none by itself:
    the node may come back.
    """
    asked_first = pod.deleted_at is not None and (first_failure is None or pod.deleted_at <= first_failure)
    known = pod.termination
    if known:
        blamed = asked_first and not known.disrupted and known.tier >= Tier.HANG
        return replace(known, disrupted=True) if blamed else known
    if asked_first:
        message = f"pod {pod.name} was deleted while it ran"
    elif pod.node_lost and any_ended:
        message = f"node {pod.node} of pod {pod.name} is not ready"
    else:
        return None
    outcome = Outcome(result=Result.PREEMPTED, message=message)
    return PodTermination(outcome=outcome, finished_at=pod.deleted_at, reported=False, disrupted=True)


def observe(
    job: GRPOJobRecord,
    children: Collection[JobRecord],
    pods: Collection[PodRecord],
    now: float,
    pull: Pull | None = None,
) -> Observation:
    """Sorts a GRPOJob's children into the current attempt and earlier ones; strangers' are left out.

    Labels are hints that anybody can set. A Job is this GRPOJob's if that is its controller; a pod of the current
    attempt counts only if its controller is the attempt's Job. Pods of earlier attempts only have to end, so that for
    them the labels do: somebody may have orphaned them.
    """
    attempt = job.status.attempt
    own_jobs = sorted((c for c in children if c.grpojob_uid == job.uid), key=lambda c: c.attempt)
    labelled = sorted((p for p in pods if p.grpojob_uid == job.uid), key=lambda p: (p.index, p.name))
    current = [child for child in own_jobs if child.attempt == attempt]
    expected = job.status.job_uid
    controllers = {child.uid for child in current} | {expected}
    of_attempt = [pod for pod in labelled if pod.attempt == attempt]
    child = next((c for c in current if not c.deleting and (expected is None or c.uid == expected)), None)
    return Observation(
        job=job,
        now=now,
        child=child,
        pods=tuple(pod for pod in of_attempt if pod.controller_uid in controllers),
        orphaned=any(pod.controller_uid and pod.controller_uid not in controllers for pod in of_attempt),
        earlier_jobs=tuple(c for c in own_jobs if c.attempt < attempt and not c.deleting),
        earlier_pods=tuple(pod for pod in labelled if pod.attempt < attempt),
        pull=pull if pull and pull.progress.attempt == attempt else None,
    )
