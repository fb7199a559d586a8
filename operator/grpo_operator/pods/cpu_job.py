"""Makes a Job that works for a GRPOJob before it holds GPUs: that of `grpo prefetch` and the
preflight.

Its pod is the training pod without GPUs and peers. It is made from the training pod, so that it has
the secrets, variables, mirrors and certificates that a download needs.
"""

from collections.abc import Mapping

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan, TrainingPlan
from grpo_api.pods.containers import ResourceRequirements
from grpo_api.pods.template import Affinity
from grpo_api.spec.run_policy import PlacementSpec, Toleration
from grpo_api.text.contract import PLAN_ANNOTATION
from grpo_api.text.units import GIB

from ..records.names import COMPONENT_TRAINER
from .manifests import Attempt, plan_json
from .pod_spec import GPU_TAINTS, PodDefaults, pod_spec
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
