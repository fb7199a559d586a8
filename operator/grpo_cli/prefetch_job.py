"""The Job that fills a job's cache of the hub: the training pod without GPUs, checkpoints and peers.

It is made of the job's pod, so that what a fetch needs of that (secrets, variables, mirrors, certificates) is there.
Pure: the same spec, the same Job.
"""

from typing import Any

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.pods.affinity import Affinity
from grpo_api.pods.containers import ResourceRequirements
from grpo_api.report.report import EXIT_CODES, Result
from grpo_api.spec.checkpoint import CheckpointSpec
from grpo_api.spec.run_policy import PlacementSpec, Toleration
from grpo_api.text.contract import CONTAINER, PLAN_ANNOTATION
from grpo_api.text.quantity import GIB
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.pods.manifests import Attempt, plan_json, training_plan
from grpo_operator.pods.pod_spec import GPU_TAINTS, PodDefaults, pod_spec
from grpo_operator.pods.roles import Role
from grpo_operator.records.names import COMPONENT_TRAINER, LABEL_APP, LABEL_INSTANCE

KEEP_SECONDS = 86_400
"""How long a finished Job stays, for its log."""
COMMAND = ["python", "-m", "grpo_trainer.prefetch"]
FETCHES = ExecutionPlan(
    strategy="None",
    method="Full",
    accelerator="CPU",
    micro_batch=1,
    gradient_accumulation=1,
    steps_per_generation=1,
    dtype="float32",
    host_memory_bytes=2 * GIB,
    save_every_steps=1,
    reason="fetches, and trains nothing",
)
"""The trainer's entry points are given a plan; of this one only the memory counts."""


def prefetch_name(job: str) -> str:
    """Name of the Job; a GRPOJob's own end with a number."""
    return f"{job}-prefetch"


def wanted(spec: GRPOJobSpec) -> list[str]:
    """What the job will fetch of the hub, by name; folders are there already."""
    named = [spec.model.name]
    named += [reward.model.name for reward in spec.rewards if reward.model]
    if spec.dataset.name:
        named.append(spec.dataset.name)
    return [name for name in named if not name.startswith("/")]


def prefetch_job(key: ObjectKey, spec: GRPOJobSpec, pods: PodDefaults) -> dict[str, Any]:
    """The Job for a GRPOJob; `pods` is what its pod has by default."""
    fetching = _fetching(spec)
    attempt = Attempt(key=key, uid=prefetch_name(key.name), spec=fetching, plan=FETCHES, number=1)
    role = Role(component=COMPONENT_TRAINER, spec=fetching, plan=FETCHES)
    labels = {LABEL_APP: "grpo-prefetch", LABEL_INSTANCE: key.name}
    plan = {PLAN_ANNOTATION: plan_json(training_plan(attempt))}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": prefetch_name(key.name), "namespace": key.namespace, "labels": labels},
        "spec": {
            "backoffLimit": spec.restarts.limit,
            "podFailurePolicy": {"rules": _FAILURES},
            "ttlSecondsAfterFinished": KEEP_SECONDS,
            "template": {
                "metadata": {"labels": labels, "annotations": plan},
                "spec": pod_spec(key.name, role, {}, pods),
            },
        },
    }


def _fetching(spec: GRPOJobSpec) -> GRPOJobSpec:
    """The spec without what only training needs: GPUs, checkpoints, peers, what runs before it or beside.

    Its nodes stay the job's, for elsewhere it may reach neither the hub nor the claim; so it is let onto those of GPUs.
    """
    template = spec.pod_template.spec
    affinity = Affinity(node_affinity=template.affinity.node_affinity) if template.affinity else None
    pod = template.model_copy(update={"affinity": affinity, "runtime_class_name": None, "init_containers": []})
    to_gpus = [Toleration(key=key, operator="Exists", effect="NoSchedule") for key in GPU_TAINTS]
    placement = PlacementSpec(
        accelerator="CPU",
        node_selector=spec.placement.node_selector,
        tolerations=[*spec.placement.tolerations, *to_gpus],
    )
    changes = {
        "command": COMMAND,
        "placement": placement,
        "checkpoint": CheckpointSpec(),
        "resume_from": None,
        "resources": ResourceRequirements(),
        "pod_template": spec.pod_template.model_copy(update={"spec": pod}),
    }
    return spec.model_copy(update=changes)


_FAILURES = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [EXIT_CODES[Result.BAD_INPUT]]},
    },
]
"""What the hub refuses it would refuse again; a drained node says nothing of it."""
