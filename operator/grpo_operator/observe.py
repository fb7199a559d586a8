"""One GRPOJob and everything that belongs to it, at one moment: what the policies decide on.

Exists so that decisions see facts ("the gang runs", "this end is the cause"), not API objects. Pure: records and the
time in, Observation out. Called by reconcile; read by policies, status and admission.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from grpo_api.causes import Tier
from grpo_api.report import Outcome, Progress, Result
from grpo_api.status import ConditionType

from .errors import Reason
from .records import GRPOJobRecord, JobRecord, PodRecord, seconds
from .terminations import PodEnd, root_cause

NO_PODS: tuple[PodRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """The last successful pull of a running attempt's /progress."""

    progress: Progress
    at: float
    """Unix time of the pull."""


@dataclass(frozen=True)
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
    """Pods of earlier attempts."""
    pull: Pull | None = None
    """What rank 0 of the current attempt last said."""

    @cached_property
    def nodes(self) -> int:
        """Pods of the gang."""
        return self.job.status.plan.nodes if self.job.status.plan else 1

    @cached_property
    def bound(self) -> bool:
        """Whether every pod of the gang has a node."""
        return len(self.pods) >= self.nodes and all(pod.node for pod in self.pods)

    @cached_property
    def started(self) -> bool:
        """Whether every pod of the gang runs or has run."""
        return len(self.pods) >= self.nodes and all(
            pod.phase in ("Running", "Succeeded", "Failed") for pod in self.pods
        )

    @cached_property
    def ends(self) -> tuple[PodEnd, ...]:
        """The ends of the current attempt's pods, deletions and lost nodes among them."""
        ended = tuple(pod.end for pod in self.pods if pod.end)
        first = min((end.finished_at for end in ended if end.finished_at), default=None)
        return tuple(end for pod in self.pods if (end := _end(pod, first, bool(ended))))

    @cached_property
    def succeeded(self) -> Outcome | None:
        """Rank 0's word that training is done, or that of all ranks together."""
        done = [(pod, pod.end) for pod in self.pods if pod.end and pod.end.succeeded]
        if any(pod.index == 0 for pod, _ in done) or len(done) >= self.nodes:
            return min((end.outcome for _, end in done), key=lambda outcome: outcome.rank)
        return None

    @cached_property
    def cause(self) -> PodEnd | None:
        """The end to blame for the end of the attempt; None while nothing has ended badly."""
        return root_cause(self.ends)

    @cached_property
    def settled(self) -> bool:
        """Whether waiting longer can't change the cause."""
        return self.cause is not None and (self.cause.certain or len(self.ends) >= self.nodes)

    @property
    def elapsed(self) -> float:
        """Seconds that count for spec.activeDeadlineSeconds."""
        since = seconds(self.job.status.attempt_start_time)
        return self.job.status.active_seconds + (max(0.0, self.now - since) if since is not None else 0.0)

    def since(self, kind: ConditionType) -> float:
        """Seconds since the condition last changed; 0 when it was never written."""
        found = self.job.condition(kind)
        return self.now - (seconds(found.last_transition_time) or self.now) if found else 0.0


def _end(pod: PodRecord, first_failure: float | None, any_ended: bool) -> PodEnd | None:
    """A pod's end, or its deletion or lost node as one.

    A deletion that was asked for before any peer failed is a cause (somebody deleted the pod); a later one is the
    Job controller clearing up after the first failure. A lost node explains its peers' ends, but is none by itself:
    the node may come back.
    """
    asked_first = pod.deleted_at is not None and (first_failure is None or pod.deleted_at <= first_failure)
    if pod.end:
        if asked_first and not pod.end.disrupted and pod.end.tier >= Tier.HANG:
            return replace(pod.end, disrupted=True)
        return pod.end
    if asked_first:
        message = f"pod {pod.name} was deleted while it ran"
    elif pod.node_lost and any_ended:
        message = f"node {pod.node} of pod {pod.name} is not ready"
    else:
        return None
    outcome = Outcome(result=Result.PREEMPTED, message=message)
    return PodEnd(outcome, pod.deleted_at, reported=False, disrupted=True)


def observe(
    job: GRPOJobRecord,
    children: Collection[JobRecord],
    pods: Collection[PodRecord],
    now: float,
    pull: Pull | None = None,
) -> Observation:
    """Sorts a GRPOJob's children into the current attempt and earlier ones; strangers' are left out.

    Children of another GRPOJob of the same name carry its uid and are not this one's.
    """
    attempt = job.status.attempt
    own_jobs = sorted((c for c in children if c.grpojob_uid == job.uid), key=lambda c: c.attempt)
    own_pods = sorted((p for p in pods if p.grpojob_uid == job.uid), key=lambda p: (p.index, p.name))
    current = [child for child in own_jobs if child.attempt == attempt]
    expected = job.status.job_uid
    child = next((c for c in current if not c.deleting and (expected is None or c.uid == expected)), None)
    return Observation(
        job=job,
        now=now,
        child=child,
        pods=tuple(pod for pod in own_pods if pod.attempt == attempt),
        earlier_jobs=tuple(c for c in own_jobs if c.attempt < attempt and not c.deleting),
        earlier_pods=tuple(pod for pod in own_pods if pod.attempt < attempt),
        pull=pull if pull and pull.progress.attempt == attempt else None,
    )


def adapter_only(job: GRPOJobRecord) -> bool:
    """Whether the plan trains an adapter because nothing else fits, which the user must be told."""
    plan = job.status.plan
    return bool(plan and job.spec and plan.method == "LoRA" and job.spec.adapter.use == "IfNeeded")


def queued_by_kueue(job: GRPOJobRecord) -> bool:
    """Whether Kueue admits this job, so that its Job is created suspended."""
    return bool(job.spec and job.spec.placement.queue_name)


def waiting_in_line(job: GRPOJobRecord) -> bool:
    """Whether the job wants GPUs that the operator itself hands out, and has none."""
    wants = job.spec is not None and job.spec.placement.accelerator == "GPU" and not queued_by_kueue(job)
    held = job.active or job.finished or job.deleting
    return wants and not held and not (job.spec and job.spec.suspend) and not refused(job)


def refused(job: GRPOJobRecord) -> bool:
    """Whether the current spec was found unusable; it is looked at again when it changes."""
    found = job.condition(ConditionType.ADMITTED)
    if found is None or found.status == "True" or found.observed_generation != job.generation:
        return False
    return found.reason in (Reason.INVALID_SPEC, Reason.NOT_SUPPORTED, Reason.NO_IMAGE)
