"""Defines the typed records that the operator keeps of watched objects, with the few fields that
decisions need.

Whole objects cost tens of kilobytes each and invite decisions on fields that were never reviewed.
There are records of objects that attempts share, too: the Services and the NetworkPolicy of a
namespace, and the claim of a job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_api.effective_spec import class_limits
from grpo_api.job import GRPOJobSpec
from grpo_api.plan.hang_timeouts import hang_timeout_seconds
from grpo_api.report.preflight import PreflightReport
from grpo_api.spec.run_policy import RestartsSpec
from grpo_api.status.status import Condition, ConditionType, GRPOJobStatus
from grpo_api.text.contract import MANAGED_BY, MULTIKUEUE
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Reported

from .packed_job import JobContent, is_under_way, unpack_fields, unpack_job
from .reasons import RELEASES, Reason
from .terminations import PodTermination, unpack_termination
from .workloads import ChildRecord, KueueMetadata, ObjectRecord

CREATION_REASONS = ("ContainerCreating", "PodInitializing")
"""The kubelet's reasons for a container that waits as it should."""
ENDED_PHASES = ("Succeeded", "Failed")
"""Phases of a pod that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOJobRecord(ObjectRecord):
    """One GRPOJob. Its spec and status are typed while it lives, and packed after that."""

    generation: int
    created: float
    orphans_pods: bool
    """True if it is deleted with `--cascade=orphan`: its Jobs and pods are to stay."""
    labels: Mapping[str, str]
    """Those that its Job and pods get too, as `annotations`."""
    annotations: Mapping[str, str]
    managed_by: str
    """spec.managedBy, also of a spec that can't be parsed; empty when unset."""
    kueue: KueueMetadata
    """What its labels and annotations say to Kueue."""
    phase: str
    """status.phase; empty before it was written."""
    observed_generation: int
    """status.observedGeneration."""
    is_finished: bool
    """True if its status says that it has succeeded or failed."""
    completed: float
    """status.completionTime in unix seconds; 0 before."""
    typed: JobContent | None
    """None for a job that has ended."""
    packed: bytes
    """Spec and status as the API server has them."""
    keeps_place: bool = False
    """True if the operator itself admitted the attempt, before the job had a queue name."""

    @property
    def content(self) -> JobContent:
        """The typed spec and status."""
        return self.typed or unpack_job(self.packed)

    @property
    def spec(self) -> GRPOJobSpec | None:
        """The typed spec, with the job's class; None if the types reject it."""
        return self.content.spec

    @property
    def valid_spec(self) -> GRPOJobSpec:
        """The typed spec of a job that is planned: the queue refuses one whose spec is invalid.

        Raises:
            ValueError: the types reject it.
        """
        if self.spec is None:
            raise ValueError(f"{self.key} has no valid spec")
        return self.spec

    @property
    def class_problem(self) -> tuple[Reason, str] | None:
        """Why the job can't have its class."""
        return self.content.class_problem

    @property
    def problems(self) -> tuple[str, ...]:
        """Why its types reject the spec."""
        return self.content.problems

    @property
    def status(self) -> GRPOJobStatus:
        """The typed status."""
        return self.content.status

    @property
    def raw_status(self) -> dict[str, Any]:
        """The status as the API server has it."""
        return unpack_fields(self.packed)[1]

    def avoiding(self, nodes: Sequence[str]) -> "GRPOJobRecord":
        """The same job, kept away from these nodes."""
        status = self.status.model_copy(update={"avoided_nodes": list(nodes)})
        return replace(self, typed=replace(self.content, status=status))

    @property
    def is_ours(self) -> bool:
        """True if this operator, and no other controller, brings the job about."""
        return self.managed_by in ("", MANAGED_BY)

    @property
    def is_dispatched(self) -> bool:
        """True if Kueue sends the job to another cluster, whose operator brings it about."""
        return self.managed_by == MULTIKUEUE

    @property
    def queue_name(self) -> str | None:
        """Kueue's LocalQueue, when Kueue admits this job."""
        if self.kueue.queue:
            return self.kueue.queue
        return self.spec.placement.queue_name if self.spec else None

    @property
    def is_competing(self) -> bool:
        """True if the job wants GPUs that the operator itself hands out."""
        return (
            self.spec is not None
            and self.spec.placement.accelerator == "GPU"
            and (self.keeps_place or not self.queue_name)
        )

    @property
    def may_hold_place(self) -> bool:
        """True if an attempt may keep GPUs, or Kueue's quota, from others."""
        return self.spec is None or self.is_competing or bool(self.queue_name)

    @property
    def is_suspended(self) -> bool:
        """True if the user has paused the job."""
        return self.spec is not None and self.spec.suspend

    @property
    def resume_job(self) -> str | None:
        """spec.resumeFrom.grpoJob."""
        if self.spec is None or self.spec.resume_from is None:
            return None
        return self.spec.resume_from.grpo_job

    @property
    def is_resume_resolved(self) -> bool:
        """True if the status names the checkpoints of spec.resumeFrom.grpoJob, and no others."""
        source = self.status.resume_from
        return self.resume_job == (source.grpo_job if source else None)

    @property
    def active_deadline(self) -> int | None:
        """spec.activeDeadlineSeconds; of a spec that can't be read the limit of its class, which a
        change of the spec must not take away."""
        if self.spec:
            return self.spec.active_deadline_seconds
        job_class = self.status.job_class
        return class_limits(job_class).active_deadline_seconds if job_class else None

    @property
    def time_to_live(self) -> int | None:
        """spec.ttlSecondsAfterFinished."""
        return self.spec.ttl_seconds_after_finished if self.spec else None

    @property
    def restart_limit(self) -> int:
        """spec.restarts.limit; a job whose spec can't be read is not restarted."""
        return self.spec.restarts.limit if self.spec else 0

    @property
    def uncounted_limit(self) -> int:
        """spec.restarts.uncountedLimit."""
        return (self.spec.restarts if self.spec else RestartsSpec()).uncounted_limit

    @property
    def should_create_pods(self) -> bool:
        """True if spec.placement.provisioning has pods created although nothing is free."""
        return self.spec is not None and self.spec.placement.provisioning == "CreatePods"

    @property
    def start_timeout(self) -> float:
        """spec.restarts.startTimeoutSeconds."""
        return (self.spec.restarts if self.spec else RestartsSpec()).start_timeout_seconds

    def hang_allowance(self, stage: str) -> float | None:
        """Seconds without progress in a stage after which the operator ends an attempt: twice the
        trainer's own limit and its grace, for a rank 0 whose watchdog can't act first; None without
        a plan."""
        if self.spec is None or self.status.plan is None:
            return None
        grace = self.spec.pod_template.spec.termination_grace_period_seconds
        return 2.0 * hang_timeout_seconds(stage, self.spec.guard, self.status.plan) + grace

    @property
    def nodes(self) -> int:
        """Pods of the gang; 1 while there is no plan."""
        return self.status.plan.nodes if self.status.plan else 1

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of that type, if it has been written."""
        return self.status.condition(kind)

    def is_true(self, kind: ConditionType) -> bool:
        """True if the condition is True."""
        return self.status.is_true(kind)

    @property
    def is_active(self) -> bool:
        """True if the attempt that status.attempt counts was admitted and has not ended."""
        if self.is_finished or self.deleting or not self.is_ours:
            return False
        return is_under_way(self.status)

    @property
    def is_released(self) -> bool:
        """True if its gang gave its place back, having never trained."""
        admitted = self.condition(ConditionType.ADMITTED)
        if admitted is None or admitted.status != "False":
            return False
        return admitted.reason in RELEASES

    @property
    def is_waiting_for_admission(self) -> bool:
        """True if the job waits for GPUs that the operator hands out. One that was refused does: it
        may have been by an older operator, or by one that had no default image."""
        if self.is_finished or self.deleting or not self.is_ours or not self.is_resume_resolved:
            return False
        return self.is_competing and not self.is_active and not self.is_suspended


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(ChildRecord):
    """The Indexed Job of an attempt. `grpojob_uid`: its controller's, empty for a stranger's."""

    grpojob_uid: str
    attempt: int
    created: float  # unix seconds, by the API server's clock
    ended: str
    """Reason of its Complete or Failed condition; empty while neither is True."""
    ended_at: Reported | None
    """When that became so, after all of its pods had ended."""
    spent: str
    """Indices whose retries are used up, as the Job controller says it: `1,3-5`."""
    digest: str = ""
    """Of a preflight: names.ANNOTATION_DIGEST."""
    suspended: bool = False
    """True if somebody has suspended it, so that it makes no pods."""
    spec_version: str = ""
    """Of an attempt: names.ANNOTATION_SPEC; empty if a former operator made it."""
    workload: str = ""
    """The Workload by which Kueue admitted its pods; empty where the operator admitted them."""

    @property
    def may_make_pods(self) -> bool:
        """True until it has ended or is being deleted, for however long a finalizer keeps it."""
        return not (self.ended or self.deleting)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord(ChildRecord):
    """One pod of an attempt."""

    grpojob_uid: str
    controller_uid: str
    """uid of the Job that owns it; empty for an orphan, and for a pod made by hand."""
    made_by_job: bool
    """True if a Job made it, also where that Job is deleted and the pod is an orphan."""
    attempt: int
    engine: bool
    """True if its label says that it is an engine's; of a current attempt, its controller does."""
    index: int
    node: str
    ip: str
    phase: str
    waiting: str
    """Why its container waits, such as `ImagePullBackOff: …`; empty when it doesn't."""
    start_stage: str
    """Mounting or PullingImage while the kubelet prepares its containers; else empty."""
    init_container: str
    """The init container that runs; empty when none does."""
    unschedulable: str
    """The scheduler's message; empty when it is bound, or not tried yet."""
    node_lost: bool
    """Its container should run, but the node controller has marked it not ready."""
    disruption: str
    """Why the cluster ends it, such as `PreemptionByScheduler: …`; empty while it does not."""
    bound_at: Reported | None
    """When the scheduler gave it its node."""
    end: bytes | None
    """Its termination, packed; None while it has not ended."""
    others_run: bool
    """True if a container that a webhook injected still runs."""
    report: PreflightReport | None = None
    """What it reported, if it is a preflight's."""

    @property
    def termination(self) -> PodTermination | None:
        """How it ended; None while it has not."""
        return unpack_termination(self.end) if self.end else None

    @property
    def is_stuck(self) -> bool:
        """True if its container waits for more than its image's first pull and its sandbox."""
        return bool(self.waiting) and not self.waiting.startswith(CREATION_REASONS)

    @property
    def lost_node_message(self) -> str:
        """That its node has fallen silent; empty if it has not."""
        return f"node {self.node} of pod {self.name} is not ready" if self.node_lost else ""

    @property
    def is_orphan(self) -> bool:
        """True if a Job made the pod, and it lost that Job as its owner."""
        return self.made_by_job and not self.controller_uid

    @property
    def is_live(self) -> bool:
        """True while the pod has not ended and is not being deleted."""
        return self.phase not in ENDED_PHASES and not self.deleting


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRecord(ChildRecord):
    """A Service or NetworkPolicy of all GRPOJobs of a namespace: its job_key has no name."""

    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    """Of a Service the fields that attempts need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord:
    """A PersistentVolumeClaim. `grpojob_uid` is its controller's, empty without one."""

    key: ObjectKey
    grpojob_uid: str
    deleting: bool
    labels: Mapping[str, str]
