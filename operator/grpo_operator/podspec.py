"""The pod of a gang: one restricted container, the plan as a file, the spec's volumes, and a node of its own.

Apart from the Job around it because the pod is most of what there is to say. Pure: the same spec, the same pod.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from grpo_api.contract import (
    ALLOCATOR_ENV,
    CACHE_MOUNT,
    CACHE_VOLUME,
    CHECKPOINT_MOUNT,
    CHECKPOINT_VOLUME,
    CONTAINER,
    DATA_MOUNT,
    DATA_VOLUME,
    DATASET_TOKEN_ENV,
    EXPANDABLE_SEGMENTS,
    MODEL_MOUNT,
    MODEL_VOLUME,
    PLAN_ANNOTATION,
    PLAN_ENV,
    PLAN_PATH,
    PLAN_VOLUME,
    PROGRESS_PORT,
    RESUME_MOUNT,
    RESUME_VOLUME,
    REWARD_VOLUME_PREFIX,
    SCRATCH,
    SCRATCH_VOLUME,
    SHARED_MEMORY_VOLUME,
    THREADS_ENV,
    reward_mount,
    reward_token_env,
)
from grpo_api.job import GRPOJobSpec
from grpo_api.plan import ExecutionPlan
from grpo_api.pods.affinity import Affinity
from grpo_api.pods.containers import InitContainer
from grpo_api.quantity import parse_quantity
from grpo_api.references import ConfigMapFiles, SecretKeySelector, VolumeClaim
from grpo_api.status import ResumeSource

from .names import LABEL_ATTEMPT, LABEL_HOSTNAME, LABEL_UID, RENDEZVOUS_SERVICE, checkpoint_claim

Manifest = dict[str, Any]
USER = 1000
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc's thresholds in bytes, read when a process starts. With its own, which grow, a sharded start keeps more than
the whole model in host memory."""
HUB_SECONDS = "30"
"""Longest wait for the next bytes of the hub; the clients' own 10 s are short for a busy proxy."""
GPU_TAINTS = ("nvidia.com/gpu", "amd.com/gpu")
_FOLDER, _, _FILE = PLAN_PATH.rpartition("/")


def pod_spec(
    name: str,
    spec: GRPOJobSpec,
    plan: ExecutionPlan,
    own: dict[str, str],
    image: str,
    *,
    source: ResumeSource | None = None,
    avoided_nodes: Sequence[str] = (),
) -> Manifest:
    """The pod template's spec; it passes the `restricted` pod security standard."""
    volumes, mounts = _volumes(name, spec, source)
    settings = spec.pod_template.spec
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": RENDEZVOUS_SERVICE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.termination_grace_period_seconds,
        "securityContext": _pod_security(),
        "tolerations": _tolerations(spec, plan),
        "containers": [_container(spec, plan, image, mounts)],
        "volumes": volumes + [_given(volume) for volume in settings.volumes],
    }
    optional: Manifest = {
        "initContainers": [init_container(one) for one in settings.init_containers],
        "affinity": _affinity(settings.affinity, own if plan.nodes > 1 else {}, avoided_nodes),
        "nodeSelector": {**plan.node_selector, **spec.placement.node_selector},
        "priorityClassName": spec.placement.priority_class_name,
        "serviceAccountName": settings.service_account_name,
        "imagePullSecrets": [_given(secret) for secret in settings.image_pull_secrets],
        "runtimeClassName": settings.runtime_class_name,
        "schedulerName": settings.scheduler_name,
        "dnsPolicy": settings.dns_policy,
        "dnsConfig": _given(settings.dns_config),
    }
    return pod | {field: value for field, value in optional.items() if value}


def _given(part: BaseModel | None) -> Manifest:
    """What a user wrote in core/v1's shape; defaults are left out, for they are the API server's own."""
    return part.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True) if part else {}


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


def _affinity(given: Affinity | None, own: dict[str, str], avoided_nodes: Sequence[str]) -> Manifest:
    """The user's affinity, that the gang's pods keep apart where there are several, and nodes that they keep away from.

    A topology spread would allow two on a node when nodes are few.
    """
    affinity = _given(given)
    if own:
        selector = {"matchLabels": {label: own[label] for label in (LABEL_UID, LABEL_ATTEMPT)}}
        apart = affinity.setdefault("podAntiAffinity", {})
        apart.setdefault("requiredDuringSchedulingIgnoredDuringExecution", []).append(
            {"labelSelector": selector, "topologyKey": LABEL_HOSTNAME}
        )
    if avoided_nodes:
        _keep_away(affinity.setdefault("nodeAffinity", {}), avoided_nodes)
    return affinity


def _keep_away(affinity: Manifest, nodes: Sequence[str]) -> None:
    """Adds to every term of the required node affinity that it is none of these nodes."""
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.setdefault("nodeSelectorTerms", [{"matchFields": []}])
    for term in terms:
        # a term without requirements selects no node, and must not begin to
        if term:
            # a requirement on the name takes one value only
            names = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
            term["matchFields"] = [*term.get("matchFields", []), *names]


def _tolerations(spec: GRPOJobSpec, plan: ExecutionPlan) -> list[Manifest]:
    given = [_given(toleration) for toleration in spec.placement.tolerations]
    if plan.accelerator == "CPU":
        return given
    return given + [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in GPU_TAINTS]


def _container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _container(spec: GRPOJobSpec, plan: ExecutionPlan, image: str, mounts: list[Manifest]) -> Manifest:
    container: Manifest = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": spec.command or ["python", "-m", "grpo_trainer"],
        "env": _environment(spec, plan),
        "ports": [{"name": "progress", "containerPort": PROGRESS_PORT}],
        "resources": _resources(spec, plan),
        "securityContext": _container_security(),
        # without an outcome the end of the log says more than nothing
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts + [_given(mount) for mount in spec.volume_mounts],
    }
    if spec.env_from:
        container["envFrom"] = [_given(source) for source in spec.env_from]
    return container


def init_container(one: InitContainer) -> Manifest:
    """A user's init container; the rights that it doesn't name are the training container's."""
    rights = _given(one.security_context)
    security = _container_security() | rights
    security["capabilities"] = {"drop": ["ALL"]} | rights.get("capabilities", {})
    container = _given(one) | {"imagePullPolicy": one.image_pull_policy, "securityContext": security}
    if resources := one.resources.manifest({}):
        container["resources"] = resources
    return container


def _resources(spec: GRPOJobSpec, plan: ExecutionPlan) -> Manifest:
    """Requests and limits of one pod. A predicted memory is a request without a limit: it may be low."""
    resources = spec.container_resources(plan.processes_per_node, plan.host_memory_bytes)
    if plan.gpus_per_node:
        for kind in ("requests", "limits"):
            resources[kind] = {**resources.get(kind, {}), plan.gpu_resource: str(plan.gpus_per_node)}
    return resources


def _environment(spec: GRPOJobSpec, plan: ExecutionPlan) -> list[Manifest]:
    """The user's variables come last, so that they win."""
    given = [_given(variable) for variable in spec.env]
    taken = {variable["name"] for variable in given}
    env: list[Manifest] = [
        *({"name": name, "value": value} for name, value in RETURN_FREED_MEMORY.items()),
        {"name": PLAN_ENV, "value": PLAN_PATH},
        {"name": "HOME", "value": SCRATCH},
        {"name": "USER", "value": "grpo"},
        {"name": "HF_HOME", "value": f"{SCRATCH}/huggingface"},
        {"name": "HF_HUB_DISABLE_TELEMETRY", "value": "1"},
        {"name": "HF_HUB_DOWNLOAD_TIMEOUT", "value": HUB_SECONDS},
        {"name": "HF_HUB_ETAG_TIMEOUT", "value": HUB_SECONDS},
        {"name": "TORCHINDUCTOR_CACHE_DIR", "value": f"{SCRATCH}/torchinductor"},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    if spec.model.cache:
        # not HF_HOME as a whole: code that a repository ships is run from the pod's own copy
        env += [{"name": f"HF_{kind}_CACHE", "value": f"{CACHE_MOUNT}/{kind.lower()}"} for kind in ("HUB", "DATASETS")]
    env += _secret("HF_TOKEN", spec.model.token_secret_ref)
    env += _secret(DATASET_TOKEN_ENV, spec.dataset.token_secret_ref)
    for position, reward in enumerate(spec.rewards):
        if reward.http:
            env += _secret(reward_token_env(position), reward.http.token_secret_ref)
    if plan.accelerator == "GPU" and taken.isdisjoint(ALLOCATOR_ENV):
        env.append({"name": ALLOCATOR_ENV[0], "value": EXPANDABLE_SEGMENTS})
    if cores := spec.resources.requested.get("cpu"):
        threads = max(1, int(parse_quantity(cores) / plan.processes_per_node))
        env.append({"name": THREADS_ENV, "value": str(threads)})
    return [variable for variable in env if variable["name"] not in taken] + given


def _secret(name: str, secret: SecretKeySelector | None) -> list[Manifest]:
    return [{"name": name, "valueFrom": {"secretKeyRef": _given(secret)}}] if secret else []


def _volumes(name: str, spec: GRPOJobSpec, source: ResumeSource | None) -> tuple[list[Manifest], list[Manifest]]:
    """The pod's volumes and the container's mounts of them."""
    shared: Manifest = {"medium": "Memory"}
    if spec.shared_memory:
        shared["sizeLimit"] = spec.shared_memory
    plan = {"items": [{"path": _FILE, "fieldRef": {"fieldPath": f"metadata.annotations['{PLAN_ANNOTATION}']"}}]}
    volumes: list[Manifest] = [
        {"name": PLAN_VOLUME, "downwardAPI": plan},
        {"name": SCRATCH_VOLUME, "emptyDir": {}},
        {"name": SHARED_MEMORY_VOLUME, "emptyDir": shared},
    ]
    mounts: list[Manifest] = [
        {"name": PLAN_VOLUME, "mountPath": _FOLDER, "readOnly": True},
        {"name": SCRATCH_VOLUME, "mountPath": SCRATCH},
        {"name": SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"},
    ]
    for volume, mount in _spec_volumes(name, spec, source):
        volumes.append(volume)
        mounts.append(mount)
    return volumes, mounts


def _spec_volumes(name: str, spec: GRPOJobSpec, source: ResumeSource | None) -> list[tuple[Manifest, Manifest]]:
    found = [_claim(MODEL_VOLUME, spec.model.volume, MODEL_MOUNT)]
    found += [_claim(CACHE_VOLUME, spec.model.cache, CACHE_MOUNT, read_only=False)]
    if spec.dataset.files:
        found += [_claim(DATA_VOLUME, spec.dataset.files.volume, DATA_MOUNT)]
        found += [_files(DATA_VOLUME, spec.dataset.files.config_map, DATA_MOUNT)]
    checkpoints = spec.checkpoint.volume
    if spec.checkpoint.volume_claim_template:
        checkpoints = VolumeClaim(claim_name=checkpoint_claim(name))
    found += [_claim(CHECKPOINT_VOLUME, checkpoints, CHECKPOINT_MOUNT, read_only=False)]
    if source:
        # also where it is the job's own claim: nothing may be written into another's folder
        theirs = VolumeClaim(claim_name=source.claim_name, sub_path=source.sub_path)
        found += [_claim(RESUME_VOLUME, theirs, RESUME_MOUNT)]
    for position, reward in enumerate(spec.rewards):
        volume, path = f"{REWARD_VOLUME_PREFIX}{position}", reward_mount(position)
        found += [_claim(volume, reward.model.volume if reward.model else None, path)]
        found += [_files(volume, reward.python.config_map if reward.python else None, path)]
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
