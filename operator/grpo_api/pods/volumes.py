"""Defines `podTemplate.spec.volumes`: each volume has a name and exactly one source.

The sources are those of core/v1 that the `restricted` pod security standard allows.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from ..text.base import Model, Rule, exactly_one
from ..text.contract import RESERVED_VOLUMES, REWARD_VOLUME_PREFIX
from ..text.names import (
    Annotations,
    DataKey,
    DNSLabel,
    Labels,
    LocalObjectReference,
    Name,
    ObjectFieldSelector,
    ResourceFieldSelector,
    SubPath,
    inside_rule,
)
from ..text.quantity import ByteQuantity

Mode = Annotated[int, Field(ge=0, le=0o777)]
"""Permission bits; YAML reads 0440 as octal."""
FILE_RULE = inside_rule("path")
"""For every file of a volume."""


class KeyToPath(Model):
    """A key as a file."""

    RULES = (FILE_RULE,)

    key: DataKey
    """The key."""
    path: SubPath
    """File below the mount."""
    mode: Mode | None = None
    """Permission bits. Unset: `defaultMode`."""


Items = Annotated[list[KeyToPath], Field(max_length=32)]


class ConfigMapVolume(Model):
    """Keys of a ConfigMap as files."""

    name: Name
    """Name of the ConfigMap."""
    items: Items = []
    """Keys to show. Unset: all, each under its own name."""
    default_mode: Mode | None = None
    """Permission bits. Unset: 0644."""
    optional: bool | None = None
    """Start the pods even if it doesn't exist. Unset: they wait for it."""


class SecretVolume(Model):
    """Keys of a Secret as files."""

    secret_name: Name
    """Name of the Secret."""
    items: Items = []
    """Keys to show. Unset: all, each under its own name."""
    default_mode: Mode | None = None
    """Permission bits. Unset: 0644."""
    optional: bool | None = None
    """Start the pods even if it doesn't exist. Unset: they wait for it."""


class SecretProjection(Model):
    """A Secret among projected sources."""

    name: Name
    """Name of the Secret."""
    items: Items = []
    """Keys to show. Unset: all, each under its own name."""
    optional: bool | None = None
    """Start the pods even if it doesn't exist. Unset: they wait for it."""


class ConfigMapProjection(SecretProjection):
    """A ConfigMap among projected sources."""

    name: Name
    """Name of the ConfigMap."""


class DownwardFile(Model):
    """A field of the pod as a file."""

    RULES = (
        FILE_RULE,
        exactly_one("fieldRef", "resourceFieldRef"),
    )

    path: SubPath
    """File below the mount."""
    field_ref: ObjectFieldSelector | None = None
    """A field of the pod. Unset: `resourceFieldRef` must be set."""
    resource_field_ref: ResourceFieldSelector | None = None
    """A request or limit of a container. Unset: `fieldRef` must be set."""
    mode: Mode | None = None
    """Permission bits. Unset: `defaultMode`."""


class DownwardProjection(Model):
    """Fields of the pod among projected sources."""

    items: Annotated[list[DownwardFile], Field(min_length=1, max_length=32)]
    """The files."""


class DownwardVolume(DownwardProjection):
    """Fields of the pod as files."""

    default_mode: Mode | None = None
    """Permission bits. Unset: 0644."""


class EmptyDirVolume(Model):
    """An empty folder that goes with the pod."""

    medium: (
        Annotated[str, Field(max_length=32, pattern=r"^(Memory|HugePages(-[1-9][0-9]*[KMGT]i)?)?$")]
        | None
    ) = None
    """Memory, HugePages or HugePages-<size>. Unset: the node's disk."""
    size_limit: ByteQuantity | None = None
    """The pod is evicted beyond it. Unset: no limit."""


class ClaimVolume(Model):
    """An existing PersistentVolumeClaim."""

    claim_name: Name
    """Name of the claim."""
    read_only: bool | None = None
    """Make every mount of it read-only. Unset: false."""


class CSIVolume(Model):
    """A volume that a CSI driver makes with the pod."""

    driver: Name
    """Name of the driver."""
    read_only: bool | None = None
    """Make every mount of it read-only. Unset: false."""
    fs_type: Annotated[str, Field(max_length=32)] | None = None
    """File system. Unset: the driver's."""
    volume_attributes: Annotated[
        dict[
            Annotated[str, Field(min_length=1, max_length=253)],
            Annotated[str, Field(max_length=1024)],
        ],
        Field(max_length=32),
    ] = Field(default_factory=dict)
    """Settings of the driver. Unset: none."""
    node_publish_secret_ref: LocalObjectReference | None = None
    """Secret for the driver. Unset: none."""


class ClaimRequests(Model):
    """What a claim asks for."""

    storage: ByteQuantity
    """Size such as `100Gi`."""


class ClaimResources(Model):
    """Size of a claim."""

    requests: ClaimRequests
    """What it asks for."""


AccessMode = Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]


class EphemeralClaimSpec(Model):
    """A claim that goes with the pod."""

    access_modes: Annotated[list[AccessMode], Field(min_length=1, max_length=4)]
    """Usually ReadWriteOnce: each pod has its own."""
    storage_class_name: Name | None = None
    """StorageClass. Unset: the cluster's default."""
    volume_mode: Literal["Filesystem"] = "Filesystem"
    """Only Filesystem. Unset: Filesystem."""
    resources: ClaimResources
    """Its size."""


class ClaimMetadata(Model):
    """Labels and annotations of a claim."""

    labels: Labels = Field(default_factory=dict)
    """Labels. Unset: none."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations. Unset: none."""


class EphemeralClaimTemplate(Model):
    """The claim that each pod gets."""

    metadata: ClaimMetadata = Field(default_factory=ClaimMetadata)
    """Its labels and annotations. Unset: none."""
    spec: EphemeralClaimSpec
    """The claim."""


class EphemeralVolume(Model):
    """A claim that is made and deleted with each pod."""

    volume_claim_template: EphemeralClaimTemplate
    """The claim."""


class ProjectedSource(Model):
    """One source of a projected volume. Tokens of service accounts are left out: the pods get no
    API credentials."""

    RULES = (exactly_one("configMap", "secret", "downwardAPI"),)

    config_map: ConfigMapProjection | None = None
    """Keys of a ConfigMap. Unset: another source."""
    secret: SecretProjection | None = None
    """Keys of a Secret. Unset: another source."""
    downward_api: DownwardProjection | None = Field(default=None, alias="downwardAPI")
    """Fields of the pod. Unset: another source."""


class ProjectedVolume(Model):
    """Several sources in one folder."""

    sources: Annotated[list[ProjectedSource], Field(min_length=1, max_length=8)]
    """The sources."""
    default_mode: Mode | None = None
    """Permission bits. Unset: 0644."""


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

Rejected = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]
"""A kind that has a field only so that its rejection gives the reason."""


class Volume(Model):
    """A volume of the pods."""

    RULES = (
        # a kind that is rejected anyway counts too, so that only one of the two rules reports it
        exactly_one(*KINDS, *_REJECTED, message=f"set exactly one of {', '.join(KINDS)}"),
        Rule(
            "!has(self.hostPath) && !has(self.nfs)",
            (
                "hostPath and nfs go beyond the `restricted` pod security standard: use a "
                "persistentVolumeClaim or csi"
            ),
        ),
        Rule(
            (
                f"!(self.name in {list(RESERVED_VOLUMES)}) && "
                f"!self.name.startsWith('{REWARD_VOLUME_PREFIX}')"
            ),
            f"{', '.join(RESERVED_VOLUMES)} and {REWARD_VOLUME_PREFIX}* are the operator's own "
            "volumes: use another name",
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
    """Rejected: a folder of the node goes beyond the `restricted` standard. Unset: as it must
    be."""
    nfs: Rejected | None = None
    """Rejected: goes beyond the `restricted` standard; make a PersistentVolume of it. Unset: as it
    must be."""
