"""Finds claims for which nothing makes a volume that their pods can mount.

One is shared by many nodes, of a StorageClass that has disks. Another is of a class that is not
there. Such a claim stays Pending for ever, and so does the gang, with GPUs that no other job may
have. The provisioner says so in an event of the claim alone, minutes later.
"""

from collections.abc import Mapping
from typing import NamedTuple

from grpo_api.spec.checkpoint import VolumeClaimTemplate
from grpo_kube.objects.json_reader import JsonObject

from ..records.reasons import Reason
from ..records.records import GRPOJobRecord
from .spec_checks import Problem

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
_RBD = Disk("Ceph RBD", "CephFS")
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
    "rbd.csi.ceph.com": _RBD,
    "rook-ceph.rbd.csi.ceph.com": _RBD,
    "openshift-storage.rbd.csi.ceph.com": _RBD,
    "blockvolume.csi.oraclecloud.com": Disk("OCI Block Volume", "OCI File Storage"),
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
    return _existing({name for name, made_by in classes.values() if made_by not in DISKS})


def _existing(names: set[str]) -> str:
    return f" (this cluster has {', '.join(sorted(names))})" if names else ""


def unbindable_claim(item: object, classes: Mapping[str, tuple[str, str]]) -> Problem | None:
    """Return why nothing makes a volume for a PersistentVolumeClaim; None if it may get one.

    A claim that names a volume waits for that volume, and one without a class for a volume that
    somebody creates. A disk without a file system may be attached to several nodes.
    """
    whole = JsonObject(item)
    spec = whole.part("spec")
    if whole.part("status").text("phase") == "Bound" or spec.text("volumeName"):
        return None
    claim = f"PersistentVolumeClaim {whole.part('metadata').text('name')}"
    class_name = spec.text("storageClassName")
    if class_name and classes and class_name not in classes:
        all_names = {name for name, _ in classes.values()}
        return Reason.STORAGE_CLASS_NOT_FOUND, (
            f"{claim} has no volume, and there is no StorageClass {class_name} that makes one"
            f"{_existing(all_names)}. Create that class, or the claim again of another"
        )
    name, provisioner = classes.get(class_name or "-", ("", ""))
    disk = DISKS.get(provisioner)
    is_shared_disk = "ReadWriteMany" in spec.strings("accessModes")
    if disk is None or not is_shared_disk or spec.text("volumeMode") == "Block":
        return None
    return Reason.STORAGE_NOT_SHARED, (
        f"{claim} is ReadWriteMany, but StorageClass {name} has volumes for "
        f"one node at a time ({disk.product}). Create it again, of a class such as {disk.shared}"
        f"{_shared_classes(classes)}, or as ReadWriteOnce for a gang on one node"
    )
