"""Makes the Job of a preflight, whose pod checks a GRPOJob before its first attempt, and that of
`grpo prefetch`.

Both work for a GRPOJob before it holds GPUs. Their pods are the training pod without GPUs and
peers. They are made from the training pod, so that they have the secrets, variables, mirrors and
certificates that a download needs.

Nothing may take a preflight's pod for one of an attempt, so it has no label with the uid or the
attempt. So neither the gang, the account of GPUs nor Kueue's Workload counts it. ResourceQuotas do.
"""

import hashlib
from collections.abc import Collection, Mapping

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan, TrainingPlan
from grpo_api.pods.containers import ResourceRequirements
from grpo_api.pods.platform import PlatformSpec
from grpo_api.pods.template import Affinity
from grpo_api.spec.run_policy import PlacementSpec, Toleration
from grpo_api.text.contract import CACHE_VOLUME, CHECKPOINT_VOLUME, PLAN_ANNOTATION
from grpo_api.text.units import GIB

from ..records.names import (
    ANNOTATION_DIGEST,
    COMPONENT_PREFLIGHT,
    COMPONENT_TRAINER,
    LABEL_APP,
    LABEL_COMPONENT,
    LABEL_INSTANCE,
    LABEL_JOB,
    LABEL_MANAGED_BY,
    MANAGER,
    checkpoint_volume,
    preflight_name,
)
from ..records.records import GRPOJobRecord
from .manifests import Attempt, attempt_of, owner_reference, plan_json, training_plan
from .pod_spec import ARCHITECTURE_LABEL, GPU_TAINTS, PodDefaults, pod_spec
from .pod_volumes import Manifest
from .roles import Role

CPU_PLAN = ExecutionPlan(
    strategy="None",
    method="Full",
    accelerator="CPU",
    micro_batch=1,
    gradient_accumulation=1,
    steps_per_generation=1,
    dtype="float32",
    host_memory_bytes=2 * GIB,
    save_every_steps=1,
    reason="trains nothing",
)
"""The trainer's entry points are given a plan; of this one only the memory counts."""


def cpu_spec(spec: GRPOJobSpec, command: list[str]) -> GRPOJobSpec:
    """Return the spec with another command and without what only training needs: GPUs and peers.

    Its nodes stay the job's, for elsewhere it may reach neither the hub nor the claim; so it is let
    onto those of GPUs.
    """
    template = spec.pod_template.spec
    affinity = (
        Affinity(node_affinity=template.affinity.node_affinity) if template.affinity else None
    )
    # A RuntimeClass of GPUs may refuse a pod without any.
    pod = template.model_copy(update={"affinity": affinity, "runtime_class_name": None})
    to_gpus = [Toleration(key=key, operator="Exists", effect="NoSchedule") for key in GPU_TAINTS]
    placement = PlacementSpec(
        accelerator="CPU",
        node_selector=spec.placement.node_selector,
        tolerations=[*spec.placement.tolerations, *to_gpus],
        priority_class_name=spec.placement.priority_class_name,
    )
    changes = {
        "command": command,
        "placement": placement,
        "resources": ResourceRequirements(),
        "pod_template": spec.pod_template.model_copy(update={"spec": pod}),
    }
    return spec.model_copy(update=changes).on_platform(spec.platform.of_cpu_pods)


def cpu_job(
    name: str,
    attempt: Attempt,
    plan: TrainingPlan,
    *,
    labels: Mapping[str, str],
    policy: Manifest,
    pods: PodDefaults,
) -> Manifest:
    """The Job of this name, whose program reads `plan`.

    `attempt` has the spec that cpu_spec returns; `policy` are further fields of the Job's spec.
    """
    namespace, job_name = attempt.key
    role = Role(component=COMPONENT_TRAINER, spec=attempt.spec, plan=CPU_PLAN)
    pod = pod_spec(job_name, role, {}, pods, source=attempt.source)
    # Nothing listens there, and PodMonitors would report it as down.
    del pod["containers"][0]["ports"]
    template = attempt.spec.pod_template.metadata
    pod_metadata = {
        "labels": {**attempt.labels, **template.labels, **labels},
        "annotations": {
            **attempt.annotations,
            **template.annotations,
            PLAN_ANNOTATION: plan_json(plan),
        },
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
        "spec": {**policy, "template": {"metadata": pod_metadata, "spec": pod}},
    }


IGNORE_DISRUPTIONS: Manifest = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}
"""Rule of a podFailurePolicy: a drained node says nothing of the program."""


COMMAND = ["python", "-m", "grpo_trainer.preflight"]
RESOURCES = ResourceRequirements(
    requests={"cpu": "1", "memory": "2Gi"}, limits={"cpu": "2", "memory": "4Gi"}
)
"""A quota refuses pods that leave out what it counts, such as limits of cores."""
_POLICY: Manifest = {
    # It exits with 0 whatever it finds: a failure is one of the node, or a fault of the program.
    "backoffLimit": 2,
    "podFailurePolicy": {"rules": [IGNORE_DISRUPTIONS]},
    # With the pull of an image of 15 GB at 10 MB/s.
    "activeDeadlineSeconds": 1800,
    # The operator deletes it as soon as its report is in the status.
    "ttlSecondsAfterFinished": 3600,
}
_UNCHECKED = {
    "suspend",
    "retry",
    "restarts",
    "preflight",
    "guard",
    "active_deadline_seconds",
    "ttl_seconds_after_finished",
}
"""Fields of the spec of which nothing is checked."""


def preflight_digest(spec: GRPOJobSpec, image: str) -> str:
    """Return the sha256 of the image and of all of the spec that a preflight depends on; and of
    what a class gives its pod, such as the certificates of a proxy."""
    checked_spec = cpu_spec(spec, COMMAND)
    parts = [image, checked_spec.model_dump_json(exclude=_UNCHECKED, exclude_defaults=True)]
    if checked_spec.platform != PlatformSpec():
        parts.append(checked_spec.platform.model_dump_json(exclude_defaults=True))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def preflight_job(
    job: GRPOJobRecord,
    spec: GRPOJobSpec,
    plan: ExecutionPlan | None,
    pods: PodDefaults,
    unbound: Collection[str] = (),
) -> Manifest:
    """The Job that checks a GRPOJob by this plan of it, if there is one.

    `unbound` are claims without a volume yet. The scheduler would choose their volume's node or
    zone for this pod, where the gang may find no GPUs. So they are not mounted.
    """
    attempt = attempt_of(job, spec, plan or CPU_PLAN, job.status.attempt + 1)
    checked_plan = training_plan(attempt)
    checkpoint_claim = checkpoint_volume(job.name, spec.checkpoint)
    if checkpoint_claim and checkpoint_claim.claim_name in unbound:
        checked_plan = checked_plan.model_copy(update={"checkpoint_directory": None})
    pod_settings = spec.pod_template.spec
    # They prepare what is checked. Their own requests may fit only nodes with GPUs; with none, a
    # quota of cores or memory would refuse the pod.
    init_containers = [
        container.model_copy(update={"resources": RESOURCES})
        for container in pod_settings.init_containers
    ]
    settings = pod_settings.model_copy(update={"init_containers": init_containers})
    template = spec.pod_template.model_copy(update={"spec": settings})
    own_spec = cpu_spec(spec.model_copy(update={"pod_template": template}), COMMAND)
    placement = own_spec.placement
    if spec.image is None and len(pods.architectures) == 1:
        # Nodes without GPUs may have other CPUs, on which the image is never pulled: the job would
        # wait for ever for what its own pods don't meet.
        selector = {ARCHITECTURE_LABEL: pods.architectures[0], **placement.node_selector}
        placement = placement.model_copy(update={"node_selector": selector})
    own_spec = own_spec.model_copy(update={"resources": RESOURCES, "placement": placement})
    own_attempt = attempt_of(job, own_spec, CPU_PLAN, attempt.number)
    labels = {
        # as the gang's: policies by which a cluster lets the trainer out select by it
        LABEL_APP: "grpo-trainer",
        LABEL_INSTANCE: job.name,
        LABEL_MANAGED_BY: MANAGER,
        LABEL_JOB: job.name,
        LABEL_COMPONENT: COMPONENT_PREFLIGHT,
    }
    body = cpu_job(
        preflight_name(job.name),
        own_attempt,
        checked_plan,
        labels=labels,
        policy=_POLICY,
        pods=pods,
    )
    body["metadata"]["ownerReferences"] = [owner_reference(job.name, job.uid)]
    body["metadata"]["annotations"] = {
        ANNOTATION_DIGEST: preflight_digest(spec, spec.image or pods.image)
    }
    volumes = body["spec"]["template"]["spec"]["volumes"]
    body["spec"]["template"]["spec"]["volumes"] = [
        _without_claim(volume, unbound) for volume in volumes
    ]
    return body


def unread_claim_message(body: Manifest, unbound: Collection[str]) -> str:
    """Why a preflight can't read what the Job's pod mounts; an empty text if it can.

    A volume that is made of a snapshot, or is the disk of one node, has its files before a claim is
    bound to it. An empty folder in its place would pass for the user's mistake.
    """
    for volume in body["spec"]["template"]["spec"]["volumes"]:
        name = volume.get("persistentVolumeClaim", {}).get("claimName")
        if name in unbound and volume["name"] not in (CHECKPOINT_VOLUME, CACHE_VOLUME):
            return f"claim {name} has no volume until a pod uses it, so its files can't be checked"
    return ""


def _without_claim(volume: Manifest, unbound: Collection[str]) -> Manifest:
    """The volume; an empty folder of the same name instead of an unbound claim."""
    claim = volume.get("persistentVolumeClaim")
    if claim and claim["claimName"] in unbound:
        return {"name": volume["name"], "emptyDir": {}}
    return volume
