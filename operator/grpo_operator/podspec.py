"""The pod of a gang: one restricted container, the plan as a file, the spec's volumes, and a node of its own.

Exists apart from manifests.py because the pod is most of what there is to say. Pure; called by manifests.indexed_job.
"""

from typing import Any

from grpo_api.contract import (
    CHECKPOINT_MOUNT,
    DATA_MOUNT,
    DATASET_TOKEN_ENV,
    MODEL_MOUNT,
    PLAN_ANNOTATION,
    PLAN_ENV,
    PLAN_PATH,
    PROGRESS_PORT,
    SCRATCH,
    reward_mount,
    reward_token_env,
)
from grpo_api.job import GRPOJobSpec
from grpo_api.model import ConfigMapFiles, SecretKey, VolumeClaim
from grpo_api.plan import ExecutionPlan
from grpo_api.running import EnvVar, Toleration

from .names import CONTAINER, LABEL_ATTEMPT, LABEL_HOSTNAME, LABEL_UID, RENDEZVOUS_SERVICE, checkpoint_claim

Manifest = dict[str, Any]
USER = 1000
GPU_TAINTS = ("nvidia.com/gpu", "amd.com/gpu")
_FOLDER, _, _FILE = PLAN_PATH.rpartition("/")


def pod_spec(name: str, spec: GRPOJobSpec, plan: ExecutionPlan, own: dict[str, str], image: str) -> Manifest:
    """The pod template's spec; it passes the `restricted` pod security standard."""
    volumes, mounts = _volumes(name, spec)
    overrides = spec.pod_overrides
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": RENDEZVOUS_SERVICE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": overrides.termination_grace_period_seconds,
        "securityContext": _pod_security(),
        "tolerations": _tolerations(spec, plan),
        "containers": [_container(spec, plan, image, mounts)],
        "volumes": volumes,
    }
    if plan.nodes > 1:
        pod["affinity"] = _own_node(own)
    optional: Manifest = {
        "nodeSelector": {**plan.node_selector, **spec.placement.node_selector},
        "priorityClassName": spec.placement.priority_class_name,
        "serviceAccountName": overrides.service_account_name,
        "imagePullSecrets": [{"name": secret} for secret in overrides.image_pull_secrets],
        "runtimeClassName": overrides.runtime_class_name,
        "schedulerName": overrides.scheduler_name,
    }
    return pod | {field: value for field, value in optional.items() if value}


def _pod_security() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # a recursive chown of a volume full of checkpoints takes longer than the start of the gang
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _own_node(own: dict[str, str]) -> Manifest:
    """Keeps the gang's pods apart. A topology spread would allow two on a node when nodes are few."""
    selector = {"matchLabels": {label: own[label] for label in (LABEL_UID, LABEL_ATTEMPT)}}
    term = {"labelSelector": selector, "topologyKey": LABEL_HOSTNAME}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _tolerations(spec: GRPOJobSpec, plan: ExecutionPlan) -> list[Manifest]:
    given = [_toleration(one) for one in spec.placement.tolerations]
    if plan.accelerator == "CPU":
        return given
    return given + [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in GPU_TAINTS]


def _toleration(one: Toleration) -> Manifest:
    return one.model_dump(mode="json", by_alias=True, exclude_none=True)


def _container(spec: GRPOJobSpec, plan: ExecutionPlan, image: str, mounts: list[Manifest]) -> Manifest:
    return {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": ["python", "-m", "grpo_trainer"],
        "env": _environment(spec),
        "ports": [{"name": "progress", "containerPort": PROGRESS_PORT}],
        "resources": _resources(spec, plan),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # without an outcome the end of the log says more than nothing
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _resources(spec: GRPOJobSpec, plan: ExecutionPlan) -> Manifest:
    """Requests of one pod. A memory limit is set only where the user declares the memory: a prediction may be low."""
    placement = spec.placement
    requests = {"cpu": placement.cpu_request(plan.processes_per_node)}
    limits: dict[str, str] = {}
    memory = placement.memory or (str(plan.host_memory_bytes) if plan.host_memory_bytes else None)
    if memory:
        requests["memory"] = memory
    if placement.memory:
        limits["memory"] = placement.memory
    if plan.gpus_per_node:
        limits[plan.gpu_resource] = str(plan.gpus_per_node)
        requests[plan.gpu_resource] = str(plan.gpus_per_node)
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _environment(spec: GRPOJobSpec) -> list[Manifest]:
    """The user's variables come last, so that they win."""
    env: list[Manifest] = [
        {"name": PLAN_ENV, "value": PLAN_PATH},
        {"name": "HOME", "value": SCRATCH},
        {"name": "USER", "value": "grpo"},
        {"name": "HF_HOME", "value": f"{SCRATCH}/huggingface"},
        {"name": "TORCHINDUCTOR_CACHE_DIR", "value": f"{SCRATCH}/torchinductor"},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    env += _secret("HF_TOKEN", spec.model.token_secret) + _secret(DATASET_TOKEN_ENV, spec.dataset.token_secret)
    for position, reward in enumerate(spec.rewards):
        if reward.http:
            env += _secret(reward_token_env(position), reward.http.token_secret)
    given = [_variable(variable) for variable in spec.env]
    taken = {variable["name"] for variable in given}
    return [variable for variable in env if variable["name"] not in taken] + given


def _secret(name: str, secret: SecretKey | None) -> list[Manifest]:
    if secret is None:
        return []
    return [{"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}]


def _variable(variable: EnvVar) -> Manifest:
    if variable.secret:
        return _secret(variable.name, variable.secret)[0]
    return {"name": variable.name, "value": variable.value or ""}


def _volumes(name: str, spec: GRPOJobSpec) -> tuple[list[Manifest], list[Manifest]]:
    """The pod's volumes and the container's mounts of them."""
    shared: Manifest = {"medium": "Memory"}
    if spec.pod_overrides.shared_memory:
        shared["sizeLimit"] = spec.pod_overrides.shared_memory
    plan = {"items": [{"path": _FILE, "fieldRef": {"fieldPath": f"metadata.annotations['{PLAN_ANNOTATION}']"}}]}
    volumes: list[Manifest] = [
        {"name": "plan", "downwardAPI": plan},
        {"name": "scratch", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": shared},
    ]
    mounts: list[Manifest] = [
        {"name": "plan", "mountPath": _FOLDER, "readOnly": True},
        {"name": "scratch", "mountPath": SCRATCH},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for volume, mount in _spec_volumes(name, spec):
        volumes.append(volume)
        mounts.append(mount)
    return volumes, mounts


def _spec_volumes(name: str, spec: GRPOJobSpec) -> list[tuple[Manifest, Manifest]]:
    found = [_claim("model", spec.model.volume, MODEL_MOUNT)]
    if spec.dataset.files:
        found += [_claim("data", spec.dataset.files.volume, DATA_MOUNT)]
        found += [_files("data", spec.dataset.files.config_map, DATA_MOUNT)]
    checkpoints = spec.checkpoint.volume
    if spec.checkpoint.volume_claim_template:
        checkpoints = VolumeClaim(claim_name=checkpoint_claim(name))
    found += [_claim("checkpoints", checkpoints, CHECKPOINT_MOUNT, read_only=False)]
    for position, reward in enumerate(spec.rewards):
        volume, path = f"reward-{position}", reward_mount(position)
        found += [_claim(volume, reward.model.volume if reward.model else None, path)]
        found += [_files(volume, reward.python.config_map if reward.python else None, path)]
    for position, extra in enumerate(spec.pod_overrides.volumes):
        claim = VolumeClaim(claim_name=extra.claim_name, sub_path=extra.sub_path)
        found += [_claim(f"extra-{position}", claim, extra.mount_path, read_only=extra.read_only)]
    return [pair for pair in found if pair]


def _claim(name: str, claim: VolumeClaim | None, path: str, read_only: bool = True) -> tuple[Manifest, Manifest] | None:
    """A claim and its mount. The volume itself stays writable: a claim mounted twice must agree on that."""
    if claim is None:
        return None
    mount: Manifest = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    if claim.sub_path:
        mount["subPath"] = claim.sub_path
    return {"name": name, "persistentVolumeClaim": {"claimName": claim.claim_name}}, mount


def _files(name: str, files: ConfigMapFiles | None, path: str) -> tuple[Manifest, Manifest] | None:
    if files is None:
        return None
    return {"name": name, "configMap": {"name": files.name}}, {"name": name, "mountPath": path, "readOnly": True}
