"""What only the operator can say about a spec, before anything is created.

A schema can't know the operator's settings or how big a plan becomes. Spec in, problems out, each a
(reason, sentence).

Among them are claims that no node can ever mount: shared by many nodes, of a StorageClass that has
disks. Such a claim stays Pending for ever, and so does the gang, with GPUs that no other job may
have. The provisioner says so in an event of the claim alone, minutes later.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from grpo_api.effective_spec import gpus_problem
from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.checkpoint import VolumeClaimTemplate
from grpo_api.spec.generation import MAX_SERVER_JOB_NAME
from grpo_api.text.contract import LABEL_QUEUE
from grpo_kube.objects.json_reader import JsonObject

from ..pods.manifests import attempt_of, pod_annotations
from ..pods.roles import replicas
from ..records.reasons import Reason
from ..records.records import GRPOJobRecord

Problem = tuple[Reason, str]
_QUEUE_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
MAX_PLAN_BYTES = 200 * 1024
"""All annotations of an object may hold 256 KiB."""


def spec_problem(spec: GRPOJobSpec, default_image: str) -> Problem | None:
    """Why this operator can't run the spec."""
    if spec.image or default_image:
        return None
    message = (
        "spec.image: unset, and the operator was installed without a training image; set either"
    )
    return Reason.NO_IMAGE, message


def queue_problem(job: GRPOJobRecord) -> Problem | None:
    """Why the job's queue label is invalid or contradicts its spec; None if it doesn't."""
    label = job.kueue.queue
    path = f"metadata.labels[{LABEL_QUEUE}]"
    spec = job.valid_spec
    if not label:
        return None
    if spec.placement.queue_name != label:
        return Reason.INVALID_SPEC, (
            f"{path}: {label!r} is another queue than spec.placement.queueName "
            f"{spec.placement.queue_name!r}; allowed "
            "is one LocalQueue: remove one of the two, or make them equal"
        )
    if not re.fullmatch(_QUEUE_NAME, label):
        return Reason.INVALID_SPEC, (
            f"{path}: {label!r} is no name of a LocalQueue; allowed are lower-case letters, "
            "digits, - and .: give the label the name of one"
        )
    if spec.placement.provisioning == "CreatePods":
        return Reason.INVALID_SPEC, (
            f"{path}: {label!r} can't go with spec.placement.provisioning CreatePods, by which the "
            "operator admits the job without Kueue; allowed is one of the two: remove the label, "
            "or set provisioning to WhenFree"
        )
    return None


def plan_problem(job: GRPOJobRecord, plan: ExecutionPlan) -> Problem | None:
    """Why this operator can't run the plan of the job's spec."""
    job_class = job.content.job_class
    if job_class and (problem := gpus_problem(job_class, plan)):
        return Reason.REFUSED_BY_JOB_CLASS, problem
    if replicas(plan) and (problem := _engines_problem(job)):
        message = f"{problem}, or set spec.generation.engine to Colocated or Transformers"
        return Reason.NOT_SUPPORTED, message
    # The plan travels in the pods' annotations, and the API server refuses an object with more than
    # 256 KiB of these.
    next_attempt = attempt_of(job, job.valid_spec, plan, job.status.attempt + 1)
    annotations = pod_annotations(next_attempt)
    size = sum(len(f"{key}{value}".encode()) for key, value in annotations.items())
    if size > MAX_PLAN_BYTES:
        message = (
            f"spec: {size} bytes of settings and annotations; the pods' annotations hold "
            f"{MAX_PLAN_BYTES}; shorten metadata.annotations, or move long patterns into a reward "
            "function of a ConfigMap"
        )
        return Reason.NOT_SUPPORTED, message
    return None


def _engines_problem(job: GRPOJobRecord) -> str:
    """Why the job can't have engines in pods of their own, and what to change; empty when it can.

    The schema knows this of engine Servers; with Auto the plan may choose it.
    """
    if job.valid_spec.platform.host_network:
        return "spec.jobClassName: pods on the node's network can't share a node with engines'"
    if len(job.name) > MAX_SERVER_JOB_NAME:
        return (
            "metadata.name: the plan has engines in pods of their own, whose names hold "
            f"{MAX_SERVER_JOB_NAME} characters of it, and it has {len(job.name)}; shorten it"
        )
    return ""


DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


class StorageClass(NamedTuple):
    """A StorageClass, as far as it decides where its volumes can be mounted."""

    name: str
    provisioner: str
    is_default: bool


class Disk(NamedTuple):
    """Volumes that one node mounts at a time, and what the same provider has for several."""

    product: str
    shared: str


_EBS = Disk("Amazon EBS", "Amazon EFS or FSx for Lustre")
_PERSISTENT_DISK = Disk("Google Persistent Disk", "Filestore")
_AZURE_DISK = Disk("Azure Disk", "Azure Files")
_CINDER = Disk("OpenStack Cinder", "OpenStack Manila")
_LOCAL = Disk("a disk of one node", "an NFS or CephFS class")
DISKS: Mapping[str, Disk] = {
    "ebs.csi.aws.com": _EBS,
    "ebs.csi.eks.amazonaws.com": _EBS,
    "kubernetes.io/aws-ebs": _EBS,
    "pd.csi.storage.gke.io": _PERSISTENT_DISK,
    "kubernetes.io/gce-pd": _PERSISTENT_DISK,
    "disk.csi.azure.com": _AZURE_DISK,
    "kubernetes.io/azure-disk": _AZURE_DISK,
    "cinder.csi.openstack.org": _CINDER,
    "kubernetes.io/cinder": _CINDER,
    "dobs.csi.digitalocean.com": Disk("DigitalOcean Volumes", "an NFS class"),
    "csi.hetzner.cloud": Disk("Hetzner Volumes", "an NFS class"),
    "linodebs.csi.linode.com": Disk("Linode Block Storage", "an NFS class"),
    "topolvm.io": _LOCAL,
    "openebs.io/local": _LOCAL,
    "local.csi.openebs.io": _LOCAL,
    "rancher.io/local-path": _LOCAL,
}
"""By provisioner, those whose volumes with a file system are ReadWriteOnce alone, by their own
documentation. Rancher's can be set up to share a folder: then make the claim by hand."""


def storage_class(item: object) -> StorageClass:
    """Read a StorageClass object.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    is_default = meta.part("annotations").text(DEFAULT_CLASS) == "true"
    provisioner = whole.text("provisioner")
    return StorageClass(meta.required_text("name"), provisioner, is_default)


def provisioners(classes: list[StorageClass]) -> dict[str, tuple[str, str]]:
    """Map the class names that claims use to the class and its provisioner; the key `` is the
    cluster's default class.

    Of several defaults the API server takes the newest, which is not known here: then no class
    counts as the default.
    """
    by_name = {job_class.name: (job_class.name, job_class.provisioner) for job_class in classes}
    defaults = [job_class for job_class in classes if job_class.is_default]
    if len(defaults) == 1:
        by_name[""] = by_name[defaults[0].name]
    return by_name


def shared_claim(job: GRPOJobRecord) -> VolumeClaimTemplate | None:
    """The claim for several nodes that the operator is to create; None for no such claim.

    After the first attempt the claim is there, whatever has become of its class.
    """
    template = job.spec.checkpoint.volume_claim_template if job.spec else None
    if template is None or job.status.attempt:
        return None
    return template if template.access_mode == "ReadWriteMany" else None


def storage_problem(job: GRPOJobRecord, classes: Mapping[str, tuple[str, str]]) -> Problem | None:
    """Why the operator's claim can't be mounted; None where it can, as far as is known."""
    template = shared_claim(job)
    if template is None:
        return None
    name, provisioner = classes.get(template.storage_class_name or "", ("", ""))
    disk = DISKS.get(provisioner)
    if disk is None:
        return None
    available = _shared_classes(classes)
    one_node = "accessMode to ReadWriteOnce, which keeps the gang on one node"
    message = (
        f"spec.checkpoint.volumeClaimTemplate.accessMode: ReadWriteMany, but StorageClass {name} "
        f"({provisioner}: {disk.product}) has volumes for one node at a time. Set storageClassName "
        f"to a class of a shared file system, such as {disk.shared}{available}, or {one_node}, or "
        "use checkpoint.store"
    )
    return Reason.STORAGE_NOT_SHARED, message


def _shared_classes(classes: Mapping[str, tuple[str, str]]) -> str:
    """Names the classes whose volumes may be shared, as far as is known."""
    names = sorted({name for name, made_by in classes.values() if made_by not in DISKS})
    return f" (this cluster has {', '.join(names)})" if names else ""


def unbindable_claim(item: object, classes: Mapping[str, tuple[str, str]]) -> str:
    """Return why a PersistentVolumeClaim of the user never gets a volume; an empty text if it may.

    A claim that names a volume waits for that volume, and one without a class for a volume that
    somebody creates. A disk without a file system may be attached to several nodes.
    """
    whole = JsonObject(item)
    spec = whole.part("spec")
    name, provisioner = classes.get(spec.text("storageClassName") or "-", ("", ""))
    disk = DISKS.get(provisioner)
    is_bound = whole.part("status").text("phase") == "Bound" or bool(spec.text("volumeName"))
    is_shared_disk = "ReadWriteMany" in spec.strings("accessModes")
    if disk is None or is_bound or not is_shared_disk or spec.text("volumeMode") == "Block":
        return ""
    claim = whole.part("metadata").text("name")
    return (
        f"PersistentVolumeClaim {claim} is ReadWriteMany, but StorageClass {name} has volumes for "
        f"one node at a time ({disk.product}). Create it again, of a class such as {disk.shared}"
        f"{_shared_classes(classes)}, or as ReadWriteOnce for a gang on one node"
    )
