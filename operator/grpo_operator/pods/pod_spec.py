"""Makes the pod of a gang: one restricted container that mounts the plan as a file, with a node of
its own.

Where a job sets no image, user or pull secrets, the installation's defaults apply. The operator and
the commands that make pods themselves read them from the same flags, so a command shows and starts
what the operator would. Pure: the same spec gives the same pod. The Job around it is made in
manifests.py.
"""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.pods.containers import InitContainer
from grpo_api.pods.platform import PlatformSecurityContext
from grpo_api.pods.template import Affinity
from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_api.spec.tracking import token_of
from grpo_api.status.status import ResumeSource
from grpo_api.text.contract import (
    ALLOCATOR_ENV,
    CACHE_MOUNT,
    CHECKPOINT_STORE_ENV,
    CONTAINER,
    DATASET_TOKEN_ENV,
    ENGINE_PORT,
    EXPANDABLE_SEGMENTS,
    EXPORT_TOKEN_ENV,
    IMAGE_ENV,
    PLAN_ENV,
    PLAN_PATH,
    PROGRESS_PORT,
    RESUME_STORE_ENV,
    RETURN_FREED_MEMORY,
    SCRATCH,
    THREADS_ENV,
    reward_token_env,
    tracking_token_env,
)
from grpo_api.text.names import SecretKeySelector
from grpo_api.text.quantity import parse_quantity

from ..records.names import (
    ENGINE_SERVICE,
    LABEL_ATTEMPT,
    LABEL_COMPONENT,
    LABEL_HOSTNAME,
    LABEL_UID,
    RENDEZVOUS_SERVICE,
)
from .pod_volumes import Manifest, platform_volumes, pod_volumes
from .roles import Role

USER = 1000
MAX_USER = 2**31 - 1
"""The largest id that the API server takes."""
NO_USER = "none"
_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
USER_HELP = f"user and group of the pods, or {NO_USER}: the platform or the image gives one"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDefaults:
    """What the operator is installed with for the pods of all jobs."""

    image: str = ""
    """Image of jobs without spec.image; empty: they are rejected."""
    user: int | None = USER
    """Id of the pods' user and group, and of their volumes' group; None: no id is asked for, and
    the platform gives one, as OpenShift does, or the image."""
    pull_secrets: tuple[str, ...] = ()
    """Names of pull secrets, in each job's namespace, beside those that the job names."""
    preflight: bool = False
    """True if a pod checks each job on GPUs whose spec.preflight is Auto."""
    architectures: tuple[str, ...] = ()
    """Architectures of CPUs that the image is built for; empty: not known."""


def add_arguments(parser: ArgumentParser, image: str) -> None:
    """Adds the flags; `image` is the default one."""
    parser.add_argument("--trainer-image", default=image, help="image of jobs without spec.image")
    user_help = f"{USER_HELP}; default: {USER}"
    parser.add_argument("--pod-user", type=pod_user, default=USER, metavar="ID", help=user_help)
    parser.add_argument(
        "--pod-pull-secret",
        action="append",
        type=pull_secret,
        default=[],
        metavar="NAME",
        help="pull secret of all training pods, in each job's namespace (may be repeated)",
    )


def defaults_from_flags(options: Namespace) -> PodDefaults:
    """What the flags say."""
    secrets = tuple(dict.fromkeys(options.pod_pull_secret))
    return PodDefaults(image=options.trainer_image, user=options.pod_user, pull_secrets=secrets)


def pod_user(text: str) -> int | None:
    """A user's id, or none, from a flag."""
    if text == NO_USER:
        return None
    user = int(text) if text.isdecimal() else 0
    if not 0 < user <= MAX_USER:
        raise ArgumentTypeError(
            f"{text!r} is neither {NO_USER} nor a user's id from 1 to {MAX_USER}; root is refused"
        )
    return user


def pull_secret(text: str) -> str:
    """The name of a Secret, from a flag."""
    if not re.fullmatch(_NAME, text):
        raise ArgumentTypeError(
            f"{text!r} is no name of a Secret: lower-case letters, digits, - and ., at most 253"
        )
    return text


HUB_SECONDS = "30"
"""Longest wait for the next bytes of the hub; the clients' own 10 s are short for a busy proxy."""
HOST_DNS = "ClusterFirstWithHostNet"
"""The DNS policy by which a pod on the node's network finds rank 0 by its name."""
GPU_TAINTS = ("nvidia.com/gpu", "amd.com/gpu")
ARCHITECTURE_LABEL = "kubernetes.io/arch"


def pod_spec(
    name: str,
    role: Role,
    pod_labels: dict[str, str],
    pods: PodDefaults,
    *,
    source: ResumeSource | None = None,
    avoided: Sequence[str] = (),
) -> Manifest:
    """The pod template's spec for a role; but for what a class gives it, it passes the `restricted`
    pod security standard.

    `pod_labels` are the labels of the pods, `avoided` nodes that they must not go to.
    """
    spec = role.spec
    plan = role.plan
    image = spec.image or pods.image
    subdomain = RENDEZVOUS_SERVICE
    if role.is_engines:
        subdomain = ENGINE_SERVICE
        source = None
    volumes, mounts = pod_volumes(name, spec, source)
    platform = spec.platform
    class_volumes, class_mounts = platform_volumes(platform)
    mounts += class_mounts
    container = _container(role, image, mounts, source)
    settings = spec.pod_template.spec
    user_volumes = [_user_fields(volume) for volume in settings.volumes]
    init_containers = [init_container(container, image) for container in settings.init_containers]
    # engines may share a node, and a single pod has no peer to keep away from
    keeps_apart = plan.nodes > 1 and not role.is_engines
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": subdomain,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.termination_grace_period_seconds,
        "securityContext": _pod_security(pods.user, platform.security_context),
        "tolerations": _tolerations(spec, plan),
        "containers": [container],
        "volumes": volumes + class_volumes + user_volumes,
    }
    optional: Manifest = {
        "initContainers": init_containers,
        "affinity": _affinity(settings.affinity, pod_labels if keeps_apart else {}, avoided),
        "nodeSelector": {**plan.node_selector, **spec.placement.node_selector},
        "priorityClassName": spec.placement.priority_class_name,
        "serviceAccountName": settings.service_account_name,
        "imagePullSecrets": _pull_secrets(spec, pods),
        "runtimeClassName": settings.runtime_class_name,
        "schedulerName": settings.scheduler_name,
        "hostNetwork": platform.host_network,
        "dnsPolicy": _dns_policy(spec),
        "dnsConfig": _user_fields(settings.dns_config),
    }
    return pod | {field: value for field, value in optional.items() if value}


def _dns_policy(spec: GRPOJobSpec) -> str | None:
    policy = spec.pod_template.spec.dns_policy
    # There, Kubernetes takes ClusterFirst for the node's own, which knows no pods.
    is_on_host = spec.platform.host_network and policy != "None"
    return HOST_DNS if is_on_host else policy


def _user_fields(part: BaseModel | None) -> Manifest:
    """What a user wrote in core/v1's shape, without defaults: they are the API server's."""
    if part is None:
        return {}
    return part.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)


def _pod_security(user: int | None, platform: PlatformSecurityContext) -> Manifest:
    ids = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    platform_fields = _user_fields(platform)
    platform_fields.pop("capabilities", None)
    return {
        "runAsNonRoot": platform.run_as_user != 0,
        **ids,
        # a recursive chown of a volume full of checkpoints takes longer than the start of the gang
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        **platform_fields,
    }


def _pull_secrets(spec: GRPOJobSpec, pods: PodDefaults) -> list[Manifest]:
    """The job's own, and the others of all jobs: the kubelet tries each that there is."""
    job_secrets = [_user_fields(secret) for secret in spec.pod_template.spec.image_pull_secrets]
    default_secrets = [{"name": name} for name in pods.pull_secrets]
    return job_secrets + [secret for secret in default_secrets if secret not in job_secrets]


def _affinity(
    user_affinity: Affinity | None, pod_labels: dict[str, str], avoided_nodes: Sequence[str]
) -> Manifest:
    """The user's affinity, the gang's pods kept apart, and nodes to keep away from."""
    affinity = _user_fields(user_affinity)
    if pod_labels:  # a topology spread would allow two on a node when nodes are few
        gang_labels = (LABEL_UID, LABEL_ATTEMPT, LABEL_COMPONENT)
        selector = {"matchLabels": {label: pod_labels[label] for label in gang_labels}}
        anti_affinity = affinity.setdefault("podAntiAffinity", {})
        terms = anti_affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", [])
        terms.append({"labelSelector": selector, "topologyKey": LABEL_HOSTNAME})
    if avoided_nodes:
        node_affinity = affinity.setdefault("nodeAffinity", {})
        require_node_names(node_affinity, "NotIn", avoided_nodes)
    return affinity


def require_node_names(affinity: Manifest, operator: str, nodes: Sequence[str]) -> None:
    """Require in every term of the node affinity that the name is (In) or isn't (NotIn) these."""
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.setdefault("nodeSelectorTerms", [{"matchFields": []}])
    for term in terms:
        # a term without requirements selects no node, and must not begin to
        if term:
            # a requirement on the name takes one value only
            names = [
                {"key": "metadata.name", "operator": operator, "values": [node]} for node in nodes
            ]
            term["matchFields"] = [*term.get("matchFields", []), *names]


def _tolerations(spec: GRPOJobSpec, plan: ExecutionPlan) -> list[Manifest]:
    tolerations = [_user_fields(toleration) for toleration in spec.placement.tolerations]
    if plan.accelerator == "CPU":
        return tolerations
    gpu_tolerations = [
        {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in GPU_TAINTS
    ]
    return tolerations + gpu_tolerations


def _container_security(added: Sequence[str] = ()) -> Manifest:
    capabilities = {"drop": ["ALL"]} | ({"add": list(added)} if added else {})
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": capabilities,
    }


def _container(
    role: Role, image: str, mounts: list[Manifest], source: ResumeSource | None
) -> Manifest:
    spec = role.spec
    plan = role.plan
    user_mounts = [_user_fields(mount) for mount in spec.volume_mounts]
    capabilities = spec.platform.security_context.capabilities
    container: Manifest = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": spec.command or ["python", "-m", "grpo_trainer"],
        "env": _environment(spec, plan, image),
        "ports": _ports(role),
        "resources": _resources(spec, plan),
        "securityContext": _container_security(capabilities.add),
        # without an outcome the end of the log says more than nothing
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts + user_mounts,
    }
    if role.is_engines:
        container["readinessProbe"] = {
            "httpGet": {"path": "/healthz", "port": ENGINE_PORT},
            "periodSeconds": 5,
        }
    resume_store = source.store if source else None
    env_from = [
        *_store_settings(CHECKPOINT_STORE_ENV, spec.checkpoint.store),
        *_store_settings(RESUME_STORE_ENV, resume_store),
        *map(_user_fields, spec.env_from),
    ]
    if env_from:
        container["envFrom"] = env_from
    return container


def _ports(role: Role) -> list[Manifest]:
    progress = {"name": "progress", "containerPort": PROGRESS_PORT}
    if role.is_engines:
        return [{"name": "engine", "containerPort": ENGINE_PORT}, progress]
    return [progress]


def init_container(user_container: InitContainer, image: str) -> Manifest:
    """A user's init container; image and rights default to the training container's."""
    rights = _user_fields(user_container.security_context)
    security = _container_security() | rights
    user_capabilities = rights.get("capabilities", {})
    security["capabilities"] = {"drop": ["ALL"]} | user_capabilities
    container: Manifest = {"image": image} | _user_fields(user_container)
    container["imagePullPolicy"] = user_container.image_pull_policy
    container["securityContext"] = security
    if resources := user_container.resources.manifest({}):
        container["resources"] = resources
    return container


def _resources(spec: GRPOJobSpec, plan: ExecutionPlan) -> Manifest:
    """Requests and limits of one pod, GPUs included."""
    resources = spec.container_resources(plan)
    if plan.gpus_per_node:
        gpus = {plan.gpu_resource: str(plan.gpus_per_node)}
        for kind in ("requests", "limits"):
            without_gpus = resources.get(kind, {})
            resources[kind] = without_gpus | gpus
    return resources


def _environment(spec: GRPOJobSpec, plan: ExecutionPlan, image: str) -> list[Manifest]:
    """The user's variables come last, so that they win."""
    user_env = [_user_fields(variable) for variable in spec.env]
    user_names = {variable["name"] for variable in user_env}
    env: list[Manifest] = [
        *({"name": name, "value": value} for name, value in RETURN_FREED_MEMORY.items()),
        {"name": PLAN_ENV, "value": PLAN_PATH},
        {"name": IMAGE_ENV, "value": image},
        {"name": "HOME", "value": SCRATCH},
        {"name": "USER", "value": "grpo"},
        {"name": "HF_HOME", "value": f"{SCRATCH}/huggingface"},
        {"name": "HF_HUB_DISABLE_TELEMETRY", "value": "1"},
        # what the cache of hf_xet holds would be on the disk twice
        {"name": "HF_XET_CHUNK_CACHE_SIZE_BYTES", "value": "0"},
        {"name": "HF_HUB_DOWNLOAD_TIMEOUT", "value": HUB_SECONDS},
        {"name": "HF_HUB_ETAG_TIMEOUT", "value": HUB_SECONDS},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    if spec.model.cache:
        # not HF_HOME as a whole: code that a repository ships is run from the pod's own copy
        env.append({"name": "HF_HUB_CACHE", "value": f"{CACHE_MOUNT}/hub"})
        env.append({"name": "HF_DATASETS_CACHE", "value": f"{CACHE_MOUNT}/datasets"})
    env += _secret("HF_TOKEN", spec.model.token_secret_ref)
    env += _secret(DATASET_TOKEN_ENV, spec.dataset.token_secret_ref)
    if spec.export and spec.export.hub:
        env += _secret(EXPORT_TOKEN_ENV, spec.export.hub.token_secret_ref)
    for position, reward in enumerate(spec.rewards):
        if reward.http:
            name = reward_token_env(position)
            env += _secret(name, reward.http.token_secret_ref)
    env += _tracking_tokens(spec)
    if plan.accelerator == "GPU" and user_names.isdisjoint(ALLOCATOR_ENV):
        env.append({"name": ALLOCATOR_ENV[0], "value": EXPANDABLE_SEGMENTS})
    if cores := spec.resources.completed_requests.get("cpu"):
        cores_per_process = parse_quantity(cores) / plan.processes_per_node
        threads = max(1, int(cores_per_process))
        env.append({"name": THREADS_ENV, "value": str(threads)})
    return [variable for variable in env if variable["name"] not in user_names] + user_env


def _tracking_tokens(spec: GRPOJobSpec) -> list[Manifest]:
    """The trackers' tokens. They are optional: a run goes on without its tracker."""
    env: list[Manifest] = []
    trackers = spec.tracking.trackers if spec.tracking else ()
    for name, tracker in trackers:
        secret = token_of(tracker)
        if secret:
            optional = _user_fields(secret) | {"optional": True}
            source = {"secretKeyRef": optional}
            env.append({"name": tracking_token_env(name), "valueFrom": source})
    return env


def _store_settings(prefix: str, store: ObjectStoreSpec | None) -> list[Manifest]:
    """The keys of the store's secret, under names that no other client in the container reads."""
    if store is None or store.credentials_secret_ref is None:
        return []
    secret = _user_fields(store.credentials_secret_ref)
    return [{"prefix": prefix, "secretRef": secret}]


def _secret(name: str, secret: SecretKeySelector | None) -> list[Manifest]:
    if secret is None:
        return []
    return [{"name": name, "valueFrom": {"secretKeyRef": _user_fields(secret)}}]
