"""The objects that an attempt consists of: the Indexed Job of its gang, that of its engines, the
checkpoint claim.

What reaches the API server is a pure function of the GRPOJob, its plan and the attempt. `grpo
render` prints the same. Each function returns one object as a dict; the pod itself is in
pod_spec.py, what attempts share in namespace_objects.py.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import (
    EarlierEnd,
    EngineAddresses,
    ExecutionPlan,
    JobIdentity,
    Rendezvous,
    TrainingPlan,
)
from grpo_api.report.revisions import Generations
from grpo_api.spec.immutability import WHILE_STOPPED
from grpo_api.status.status import AttemptEnd, GRPOJobStatus, ResumeSource
from grpo_api.text.contract import (
    API_VERSION,
    CHECKPOINT_MOUNT,
    CHECKPOINT_SCRATCH,
    KIND,
    PLAN_ANNOTATION,
    RESUME_MOUNT,
    RESUME_SCRATCH,
)
from grpo_kube.objects.resources import ObjectKey

from ..records.names import (
    ANNOTATION_SPEC,
    APP_ARMOR,
    LABEL_APP,
    LABEL_ATTEMPT,
    LABEL_COMPONENT,
    LABEL_INSTANCE,
    LABEL_JOB,
    LABEL_MANAGED_BY,
    LABEL_UID,
    MANAGER,
    checkpoint_claim,
    child_job,
    engine_addresses,
    engine_job,
    rank0_address,
    run_folder,
)
from ..records.records import GRPOJobRecord
from .pod_spec import PodDefaults, pod_spec
from .pod_volumes import Manifest
from .roles import Role, engine_role, replicas, roles

ENGINE_FAILURES = 20
"""How often each engine of an attempt is made again after a failure, the last times with pauses of
minutes; then the attempt goes on without it."""
IMAGES_NEED = (
    "; image volumes need Kubernetes 1.35, or 1.33 with the feature gate ImageVolume on "
    "servers and nodes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One gang start of a GRPOJob."""

    key: ObjectKey
    uid: str
    spec: GRPOJobSpec
    plan: ExecutionPlan
    number: int
    """From 1, over the job's whole life."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The GRPOJob's labels for its Job and pods; see names.inheritable_metadata."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """The GRPOJob's annotations for its Job and pods."""
    source: ResumeSource | None = None
    """The other job's checkpoints that the run begins with."""
    skipped: Sequence[Generations] = ()
    """What earlier attempts diverged on; see status.rollbacks."""
    avoided_nodes: Sequence[str] = ()
    """Nodes that its pods must not go to; see decide/restarts.py."""
    revisions: Mapping[str, str] = field(default_factory=dict)
    """Commits that earlier attempts found."""
    ends: Sequence[AttemptEnd] = ()
    """How earlier attempts ended."""


def attempt_of(job: GRPOJobRecord, spec: GRPOJobSpec, plan: ExecutionPlan, number: int) -> Attempt:
    """The attempt of a GRPOJob that has this number, with this plan of its spec."""
    attempt = Attempt(
        key=job.key,
        uid=job.uid,
        spec=spec,
        plan=plan,
        number=number,
        labels=job.labels,
        annotations=job.annotations,
    )
    return with_status(attempt, job.status)


def with_status(attempt: Attempt, status: GRPOJobStatus) -> Attempt:
    """The attempt with what its job's status has of earlier ones, and of where it begins."""
    return replace(
        attempt,
        source=status.resume_from,
        skipped=[rollback.skipped for rollback in status.rollbacks],
        avoided_nodes=status.avoided_nodes,
        revisions=status.revisions or {},
        ends=status.ends,
    )


def training_plan(attempt: Attempt) -> TrainingPlan:
    """The plan that an attempt's pods receive: sections of the spec, the planner's choice."""
    namespace, name = attempt.key
    spec = attempt.spec
    identity = JobIdentity(namespace=namespace, name=name, uid=attempt.uid, attempt=attempt.number)
    address_of_rank0 = rank0_address(namespace, name, attempt.number)
    checkpoint_directory = _checkpoint_directory(attempt)
    resume_folder = _resume_folder(attempt)
    resume_store = attempt.source.store if attempt.source else None
    ends = [EarlierEnd(attempt=end.attempt, reason=end.reason) for end in attempt.ends]
    grace_seconds = spec.pod_template.spec.termination_grace_period_seconds
    return TrainingPlan(
        job=identity,
        rendezvous=Rendezvous(address=address_of_rank0),
        engines=_engines(attempt),
        model=spec.model,
        dataset=spec.dataset,
        rewards=spec.rewards,
        training=spec.training,
        generation=spec.generation,
        reference=spec.reference,
        adapter=spec.adapter,
        checkpoint=spec.checkpoint,
        guard=spec.guard,
        export=spec.export,
        tracking=spec.tracking,
        samples=spec.samples,
        checkpoint_directory=checkpoint_directory,
        resume_from=resume_folder,
        resume_store=resume_store,
        revisions=dict(attempt.revisions),
        skipped=list(attempt.skipped),
        rdma_devices=spec.resources.network_cards or None,
        ends=ends or None,
        grace_period_seconds=grace_seconds,
        execution=attempt.plan,
    )


def _engines(attempt: Attempt) -> EngineAddresses | None:
    """Where the attempt's engines are, if it has any in pods of their own."""
    count = replicas(attempt.plan)
    if not count:
        return None
    hosts = engine_addresses(*attempt.key, attempt.number, count)
    return EngineAddresses(hosts=hosts)


def _checkpoint_directory(attempt: Attempt) -> str | None:
    """The run's folder in the pods: on the shared volume, or on own disks before a store."""
    checkpoint = attempt.spec.checkpoint
    if not checkpoint.is_lasting:
        return None
    parent = CHECKPOINT_SCRATCH if checkpoint.store else CHECKPOINT_MOUNT
    folder = run_folder(attempt.key.name, attempt.uid)
    return f"{parent}/{folder}"


def _resume_folder(attempt: Attempt) -> str | None:
    """Where the pods find the other run's checkpoints."""
    wanted = attempt.spec.resume_from
    source = attempt.source
    if wanted and wanted.path:
        return f"{CHECKPOINT_MOUNT}/{wanted.path}"
    if wanted is None or source is None:
        return None
    parent = RESUME_SCRATCH if source.store else RESUME_MOUNT
    return f"{parent}/{source.folder}"


def plan_json(plan: TrainingPlan) -> str:
    """The plan as it travels in the annotation; the same bytes for the same plan."""
    return plan.model_dump_json(by_alias=True, exclude_none=True)


def labels(name: str, uid: str, attempt: int, component: str) -> dict[str, str]:
    """The labels by which the operator finds an attempt's Job and pods, and their role."""
    return {
        LABEL_APP: "grpo-trainer",
        LABEL_INSTANCE: name,
        LABEL_MANAGED_BY: MANAGER,
        LABEL_JOB: name,
        LABEL_UID: uid,
        LABEL_ATTEMPT: str(attempt),
        LABEL_COMPONENT: component,
    }


def pod_annotations(attempt: Attempt) -> dict[str, str]:
    """All annotations of an attempt's pods: the GRPOJob's, those of podTemplate, which win, and the
    plan. None of AppArmor's: they could lift a pod above the `restricted` standard."""
    plan = plan_json(training_plan(attempt))
    annotations = attempt.spec.pod_template.metadata.annotations
    template_annotations = {
        key: value for key, value in annotations.items() if not key.startswith(APP_ARMOR)
    }
    return {**attempt.annotations, **template_annotations, PLAN_ANNOTATION: plan}


def owner_reference(name: str, uid: str) -> Manifest:
    """Makes the garbage collector delete the object with its GRPOJob."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def indexed_job(attempt: Attempt, pods: PodDefaults) -> Manifest:
    """The gang of one attempt: one pod per node, all or none, no retries of its own.

    No podFailurePolicy and no podReplacementPolicy: with the latter a clean exit on SIGTERM counts
    as success.
    """
    trainers = roles(attempt.spec, attempt.plan)[0]
    name = child_job(attempt.key.name, attempt.number)
    body = _job(attempt, trainers, name, pods)
    body["spec"]["backoffLimit"] = 0
    return body


def engines_job(attempt: Attempt, pods: PodDefaults) -> Manifest | None:
    """The engines of one attempt, if it has any in pods of their own: each is made again by its
    index.

    Without maxFailedIndexes the Job goes on with the others when one has used up its retries. An
    engine that ends with exit code 0 would pass for done: it never does.
    """
    role = engine_role(attempt.spec, attempt.plan)
    if role is None:
        return None
    name = engine_job(attempt.key.name, attempt.number)
    body = _job(attempt, role, name, pods)
    body["spec"]["backoffLimitPerIndex"] = ENGINE_FAILURES
    return body


def _job(attempt: Attempt, role: Role, name: str, pods: PodDefaults) -> Manifest:
    """The Indexed Job of one role, without what becomes of its failures."""
    namespace, job_name = attempt.key
    operator_labels = labels(job_name, attempt.uid, attempt.number, role.component)
    template_labels = attempt.spec.pod_template.metadata.labels
    pod = pod_spec(
        job_name, role, operator_labels, pods, source=attempt.source, avoided=attempt.avoided_nodes
    )
    pod_metadata = {
        "labels": {**attempt.labels, **template_labels, **operator_labels},
        "annotations": pod_annotations(attempt),
    }
    job_metadata = {
        "name": name,
        "namespace": namespace,
        "labels": {**attempt.labels, **operator_labels},
        "annotations": {
            **attempt.annotations,
            ANNOTATION_SPEC: spec_version(attempt.spec),
        },
        "ownerReferences": [owner_reference(job_name, attempt.uid)],
    }
    nodes = role.plan.nodes
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "template": {"metadata": pod_metadata, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": job_metadata, "spec": job}


def images_need(spec: GRPOJobSpec) -> str:
    """What to know of image volumes where the spec has one: a server that doesn't know them says
    only that a volume is without a type."""
    reward_images = [reward.model.image for reward in spec.rewards if reward.model]
    has_image = any([spec.model.image, *reward_images])
    return IMAGES_NEED if has_image else ""


def checkpoint_volume_claim(key: ObjectKey, uid: str, spec: GRPOJobSpec) -> Manifest | None:
    """The claim of spec.checkpoint.volumeClaimTemplate; with `retain` it outlives the GRPOJob."""
    template = spec.checkpoint.volume_claim_template
    if template is None:
        return None
    metadata: Manifest = {
        "name": checkpoint_claim(key.name),
        "namespace": key.namespace,
        "labels": {LABEL_MANAGED_BY: MANAGER, LABEL_JOB: key.name, LABEL_UID: uid},
    }
    if not template.retain:
        metadata["ownerReferences"] = [owner_reference(key.name, uid)]
    claim: Manifest = {
        "accessModes": [template.access_mode],
        "resources": {"requests": {"storage": template.size}},
    }
    if template.storage_class_name:
        claim["storageClassName"] = template.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": claim,
    }


def has_changed(version: str, spec: GRPOJobSpec) -> bool:
    """True if one of those fields differs from that version; False without one, which is a former
    operator's."""
    # Former operators put the generation and a point before the hash.
    digest = version.rpartition(".")[2]
    return bool(digest) and digest != spec_version(spec)


def spec_version(spec: GRPOJobSpec) -> str:
    """Return a hash of the fields that change only while no gang runs.

    A user who changes how a job runs suspends it for that. An operator that did not look meanwhile
    sees only that the spec is another than the one that the attempt's Job was made from.
    """
    fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    fields_changed_stopped = {name: fields.get(name) for name in WHILE_STOPPED}
    # The queue's name may be that of a label, which changes at any time.
    fields_changed_stopped["placement"] = {**fields.get("placement", {}), "queueName": None}
    fields_changed_stopped["model.cache"] = fields.get("model", {}).get("cache")
    text = json.dumps(fields_changed_stopped, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
