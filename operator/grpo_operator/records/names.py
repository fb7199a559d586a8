"""Names, labels and addresses of everything that the operator creates, each written down once.

Names are how the operator finds its children again after a restart: they follow from the GRPOJob
and the attempt alone.
"""

import hashlib
from collections.abc import Iterable, Mapping

from grpo_api.spec.checkpoint import CheckpointSpec
from grpo_api.text.contract import (
    CLASS_PLURAL,
    ENGINE_SUFFIX,
    GROUP,
    LEADER_PLURAL,
    PLURAL,
    VERSION,
)
from grpo_api.text.names import VolumeClaim
from grpo_kube.objects.resources import Resource

MANAGER = "grpo-operator"
"""Name of this controller in labels, events and the User-Agent."""

FENCE = "of the GRPO operators only the one that leads may write this"
"""How the chart's policy refuses the write of an operator that does not lead."""

LABEL_JOB = f"{GROUP}/job-name"
"""Name of the GRPOJob, on its Jobs and pods: what the watches select by."""

LABEL_UID = f"{GROUP}/job-uid"
"""uid of the GRPOJob: a job deleted and created again under its name has children of its own."""

LABEL_ATTEMPT = f"{GROUP}/attempt"
"""Number of the attempt, from 1."""

LABEL_COMPONENT = f"{GROUP}/component"
"""What a shared object is for, COMPONENT_RENDEZVOUS or COMPONENT_ISOLATION; of a Job and its pods,
the role in their gang: COMPONENT_TRAINER or COMPONENT_ENGINE. Those of former versions have none,
and train."""

ANNOTATION_DIGEST = f"{GROUP}/preflight"
"""On the Job of a preflight: what of the spec it checks (pods.preflight_job.preflight_digest)."""

ANNOTATION_SPEC = f"{GROUP}/spec"
"""On the Jobs of an attempt: what of the spec they were made from (pods.spec_version)."""

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_APP = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
COMPONENT_RENDEZVOUS, COMPONENT_ISOLATION = "rendezvous", "isolation"
COMPONENT_TRAINER, COMPONENT_ENGINE = "trainer", "engine"
COMPONENT_PREFLIGHT = "preflight"

LABEL_INDEX = "batch.kubernetes.io/job-completion-index"
"""Set by the Job controller on pods of an Indexed Job: the node rank."""

LABEL_CONTROLLER = "batch.kubernetes.io/controller-uid"
"""Set by the Job controller on each pod that it makes: the Job's uid. It stays on a pod that
`--cascade=orphan` takes its owner from."""

LABEL_HOSTNAME = "kubernetes.io/hostname"

KUEUE = "kueue.x-k8s.io"
LABEL_WORKLOAD_PRIORITY = f"{KUEUE}/priority-class"
LABEL_PREBUILT = f"{KUEUE}/prebuilt-workload-name"
"""On a GRPOJob: its WorkloadPriorityClass, and, as an annotation too, the Workload that MultiKueue
made for it."""

LABEL_POD_SET = f"{KUEUE}/podset"
ANNOTATION_WORKLOAD = f"{KUEUE}/workload"
TOPOLOGY_GATE = f"{KUEUE}/topology"
ANNOTATIONS_TOPOLOGY = tuple(
    f"{KUEUE}/podset-{kind}-topology" for kind in ("required", "preferred", "unconstrained")
)
"""On a pod: its role, and by what Kueue finds, places and lets start those that have a place in a
topology; the annotations are those by which users ask for one."""

ANNOTATION_PLANNED = f"{GROUP}/planned"
ANNOTATION_PAUSED = f"{GROUP}/paused"
"""On a Workload: the plan that it was made for, and that its GRPOJob is suspended."""

NOT_INHERITED = ("kubectl.kubernetes.io/last-applied-configuration", "job-name", "controller-uid")
APP_ARMOR = "container.apparmor.security.beta.kubernetes.io/"
"""Prefix of annotations that set a container's AppArmor profile."""
NOT_INHERITED_PREFIXES = (f"{GROUP}/", f"{KUEUE}/", "batch.kubernetes.io/", APP_ARMOR)
"""Labels and annotations that mean something else on a Job or pod: kubectl's record of what was
applied, Kueue's, which are for the Workload, those of the Job controller, which the API server
refuses from others, AppArmor's, which could lift a pod above the `restricted` standard, and ours.
"""

RENDEZVOUS_SERVICE = "grpo-rendezvous"
"""The one headless Service of a namespace; pods of all jobs have their DNS names under it."""

ENGINE_SERVICE = "grpo-engines"
"""The headless Service of a namespace under which all engine pods have their DNS names."""

NETWORK_POLICY = "grpo-pods"
"""The NetworkPolicy of a namespace: what may reach the pods of its jobs."""


def inheritable_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """The labels or annotations of a GRPOJob that its Jobs and pods get, too."""
    return {
        key: value
        for key, value in (metadata or {}).items()
        if key not in NOT_INHERITED and not key.startswith(NOT_INHERITED_PREFIXES)
    }


def child_job(name: str, attempt: int) -> str:
    """Name of the Indexed Job of one attempt."""
    return f"{name}-{attempt}"


def engine_job(name: str, attempt: int) -> str:
    """Name of the Indexed Job of an attempt's engines; an attempt's own ends with a number."""
    return f"{child_job(name, attempt)}{ENGINE_SUFFIX}"


def attempt_of_job(job: str, name: str) -> int:
    """The attempt whose Job has this name, or whose engines' Job; 0 for other Jobs of the
    GRPOJob."""
    number = job.removeprefix(f"{name}-").removesuffix(ENGINE_SUFFIX)
    return int(number) if number.isdecimal() else 0


def grpojob_of_job(job: str) -> str:
    """Name of the GRPOJob of which an attempt has a Job of this name; empty for other Jobs."""
    name, _, number = job.removesuffix(ENGINE_SUFFIX).rpartition("-")
    return name if number.isdecimal() else ""


def preflight_name(name: str) -> str:
    """Name of the Job that checks a GRPOJob before its first attempt."""
    return f"{name}-preflight"


def workload_name(name: str, uid: str) -> str:
    """Name of a GRPOJob's Workload, at most 63 characters; the uid distinguishes jobs of one
    name."""
    digest = hashlib.sha256(uid.encode()).hexdigest()
    return f"grpojob-{name[:49]}-{digest[:5]}"


def is_engines_job(job: str) -> bool:
    """True if a Job of an attempt is that of its engines, by its name."""
    return job.endswith(ENGINE_SUFFIX)


def attempt_selector(uid: str, attempt: int) -> str:
    """Label selector of a GRPOJob's training pods of one attempt."""
    return f"{LABEL_UID}={uid},{LABEL_ATTEMPT}={attempt},{LABEL_COMPONENT}!={COMPONENT_ENGINE}"


def engine_selector(uid: str, attempt: int) -> str:
    """Label selector of the attempt's engine pods."""
    return f"{LABEL_UID}={uid},{LABEL_ATTEMPT}={attempt},{LABEL_COMPONENT}={COMPONENT_ENGINE}"


def orphan_selector(uid: str, attempt: int, jobs: Iterable[str]) -> str:
    """Label selector of the pods of the attempt's Jobs, but for Jobs with these uids."""
    made_by = f"{LABEL_CONTROLLER},{LABEL_CONTROLLER} notin ({','.join(jobs)})"
    return f"{LABEL_UID}={uid},{LABEL_ATTEMPT}={attempt},{made_by}"


def rank0_address(namespace: str, name: str, attempt: int) -> str:
    """DNS name of the pod with rank 0; resolvable before it is ready.

    The Job controller sets the hostname `<job>-<index>`; the Service's name is the subdomain.
    """
    return f"{child_job(name, attempt)}-0.{RENDEZVOUS_SERVICE}.{namespace}.svc"


def engine_addresses(namespace: str, name: str, attempt: int, replicas: int) -> list[str]:
    """DNS names of an attempt's engine pods, by index; resolvable before they are ready."""
    job = engine_job(name, attempt)
    return [f"{job}-{index}.{ENGINE_SERVICE}.{namespace}.svc" for index in range(replicas)]


def checkpoint_claim(name: str) -> str:
    """Name of the claim that is made from spec.checkpoint.volumeClaimTemplate."""
    return f"{name}-checkpoints"


def checkpoint_volume(name: str, checkpoint: CheckpointSpec) -> VolumeClaim | None:
    """The claim of a job's checkpoints, its own or the spec's; None if they don't last."""
    if checkpoint.volume_claim_template:
        return VolumeClaim(claim_name=checkpoint_claim(name))
    return checkpoint.volume


def run_folder(name: str, uid: str) -> str:
    """Folder of a job's checkpoints on its volume; a job made again has another one."""
    return f"{name}-{uid}"


GRPOJOBS = Resource(f"/apis/{GROUP}/{VERSION}", PLURAL)
JOB_CLASSES = Resource(f"/apis/{GROUP}/{VERSION}", CLASS_PLURAL)
LEADERS = Resource(f"/apis/{GROUP}/{VERSION}", LEADER_PLURAL)
WORKLOADS = Resource(f"/apis/{KUEUE}/v1beta2", "workloads")
RESOURCE_FLAVORS = Resource(WORKLOADS.base, "resourceflavors")
WORKLOAD_PRIORITIES = Resource(WORKLOADS.base, "workloadpriorityclasses")
