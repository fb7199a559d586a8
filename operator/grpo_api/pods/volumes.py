"""`podTemplate.spec.volumes`: a name, and exactly one kind of what the `restricted` pod security standard allows."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from ..base import Model, Rule, exactly_one
from ..contract import RESERVED_VOLUMES, REWARD_VOLUME_PREFIX
from ..names import DNSLabel
from .volume_sources import (
    ClaimVolume,
    ConfigMapVolume,
    CSIVolume,
    DownwardVolume,
    EmptyDirVolume,
    EphemeralVolume,
    ProjectedVolume,
    SecretVolume,
)

KINDS = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
_REJECTED = ("hostPath", "nfs")

Rejected = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
"""A kind that has a field only so that its rejection gives the reason."""


def _is_allowed_by_the_standard(volume: "Volume") -> bool:
    return volume.host_path is None and volume.nfs is None


def _has_a_name_of_its_own(volume: "Volume") -> bool:
    return not (volume.name in RESERVED_VOLUMES or volume.name.startswith(REWARD_VOLUME_PREFIX))


class Volume(Model):
    """A volume of the pods."""

    RULES = (
        # a kind that is rejected anyway counts too, so that only one of the two rules reports it
        exactly_one(*KINDS, *_REJECTED, message=f"set exactly one of {', '.join(KINDS)}"),
        Rule(
            "!has(self.hostPath) && !has(self.nfs)",
            "hostPath and nfs go beyond the `restricted` pod security standard: use a persistentVolumeClaim or csi",
            _is_allowed_by_the_standard,
        ),
        Rule(
            f"!(self.name in {list(RESERVED_VOLUMES)}) && !self.name.startsWith('{REWARD_VOLUME_PREFIX}')",
            f"{', '.join(RESERVED_VOLUMES)} and {REWARD_VOLUME_PREFIX}* are the operator's own volumes: "
            "use another name",
            _has_a_name_of_its_own,
        ),
    )

    name: DNSLabel
    """Name by which volumeMounts refer to it."""
    config_map: ConfigMapVolume | None = None
    """Keys of a ConfigMap as files. Unset: another kind."""
    csi: CSIVolume | None = None
    """A volume that a CSI driver makes with the pod. Unset: another kind."""
    downward_api: DownwardVolume | None = Field(default=None, alias="downwardAPI")
    """Fields of the pod as files. Unset: another kind."""
    empty_dir: EmptyDirVolume | None = None
    """An empty folder that goes with the pod. Unset: another kind."""
    ephemeral: EphemeralVolume | None = None
    """A claim that is made and deleted with each pod. Unset: another kind."""
    persistent_volume_claim: ClaimVolume | None = None
    """An existing claim. Unset: another kind."""
    projected: ProjectedVolume | None = None
    """Several sources in one folder. Unset: another kind."""
    secret: SecretVolume | None = None
    """Keys of a Secret as files. Unset: another kind."""
    host_path: Rejected | None = None
    """Rejected: a folder of the node goes beyond the `restricted` standard. Unset: as it must be."""
    nfs: Rejected | None = None
    """Rejected: goes beyond the `restricted` standard; make a PersistentVolume of it. Unset: as it must be."""
