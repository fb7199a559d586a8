"""Defines what a spec may set of containers: init containers, volume mounts, resources and
environment variables.

Names and shapes are those of core/v1. These limits are added:

- `podTemplate.spec.initContainers` run before the trainer or beside it, within the `restricted` pod
  security standard.
- `volumeMounts` must not use the folders that the trainer uses itself.
- `resources` must not name GPUs, because the plan decides their number.
- `spec.env` and `spec.envFrom` must not set the variables that the trainer depends on, nor values
  that can't work.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ..text.base import MapList, Model, Rule, exactly_one
from ..text.contract import (
    ALLOCATOR_ENV,
    CONTAINER,
    ENV_PREFIX,
    EXPANDABLE_SEGMENTS,
    EXPANDABLE_SEGMENTS_PATTERN,
    RANK_ENV,
    RESERVED_MOUNTS,
)
from ..text.names import (
    SUB_PATH_RULE,
    UPWARDS,
    ConfigMapKeySelector,
    DNSLabel,
    Image,
    ObjectFieldSelector,
    OptionalReference,
    Path,
    PullPolicy,
    ResourceFieldSelector,
    ResourceName,
    SecretKeySelector,
    SubPath,
    VariableName,
)
from ..text.quantity import Quantity

_SLASH = r"/(\.?/)*"
"""One slash, however it is spelt: `//` and `/./` lead to the same folder."""


def _path_pattern(path: PurePosixPath) -> str:
    """A regular expression for all spellings of an absolute path, without what may follow it; the
    root is empty."""
    return "".join(_SLASH + re.escape(part) for part in path.parts[1:])


def _shadowing_pattern(reserved: tuple[str, ...]) -> str:
    """A regular expression for the paths in, on and above the reserved folders.

    An expression and not a function, because CEL can neither normalise a path nor compare lists
    within its cost.
    """
    folders = [PurePosixPath(path) for path in reserved]
    above = sorted({parent for folder in folders for parent in folder.parents})
    inside = "|".join(map(_path_pattern, folders))
    return f"^(({inside})(/.*)?|({'|'.join(map(_path_pattern, above))})({_SLASH}\\.?)?)$"


SHADOWING = _shadowing_pattern(RESERVED_MOUNTS)


class VolumeMount(Model):
    """A volume of podTemplate.spec.volumes in a container."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        SUB_PATH_RULE,
        Rule(
            f"!self.mountPath.matches(r'{UPWARDS}')",
            "mountPath must not contain `..`: write the folder that is meant",
        ),
    )

    name: DNSLabel
    """Name of the volume."""
    mount_path: Path
    """Folder in the container."""
    sub_path: SubPath | None = None
    """Folder inside the volume. Unset: the volume's root."""
    read_only: bool | None = None
    """Mount read-only. Unset: false."""


class TrainerMount(VolumeMount):
    """A volume of podTemplate.spec.volumes in the training container."""

    RULES = (
        *VolumeMount.RULES,
        Rule(
            f"!self.mountPath.matches(r'{SHADOWING}')",
            f"mountPath must lie outside of {', '.join(RESERVED_MOUNTS)}, and not above them: "
            "the operator and the kernel mount there themselves",
        ),
    )


_NETWORK_CARD = re.compile(
    r"^rdma/|/(.*[-_.])?(rdma|efa|hca|roce|ib|mlnx[a-z]*|hostdev|sriov|nics?)([-_.0-9].*)?$"
)
"""Device plugins name their cards as an administrator likes. Known are the names of Mellanox's
shared plugin (rdma/…), of NVIDIA's network operator (nvidia.com/hostdev, …/mlnxnics), of SR-IOV's,
of AWS (vpc.amazonaws.com/efa) and of GKE (networking.gke.io.networks/rdma-0)."""
EPHEMERAL_STORAGE = "ephemeral-storage"
"""The resource that is the disk of a pod's node."""
_GPU = r"^(nvidia\.com/(gpu|mig-)|amd\.com/gpu|gpu\.intel\.com/)"
"""Not all of nvidia.com/: the network operator names its cards there too."""
_CEL_GPU = f"name.matches(r'{_GPU}')"
_CEL_REQUEST, _CEL_LIMIT = (
    "quantity(string(self.requests[name]))",
    "quantity(string(self.limits[name]))",
)
_CEL_AT_LEAST_MIB = "compareTo(quantity('1Mi')) >= 0"
_CEL_INDIVISIBLE = "(name.contains('/') || name.startsWith('hugepages-'))"
"""The scheduler hands the resource out by the piece and never more often than it is there."""

ResourceList = Annotated[dict[ResourceName, Quantity], Field(max_length=16)]
"""Amounts by resource: cpu, memory, ephemeral-storage, hugepages-<size>, or an extended resource
such as rdma/hca."""


class ResourceRequirements(Model):
    """What a container requests of its node, and what it may use at most."""

    RULES = (
        Rule(
            f"!self.requests.exists(name, {_CEL_GPU}) && !self.limits.exists(name, {_CEL_GPU})",
            "GPUs are requested by the plan, within placement.gpus: remove them here",
        ),
        Rule(
            (
                "self.requests.all(name, !(name in self.limits) || "
                f"{_CEL_REQUEST}.compareTo({_CEL_LIMIT}) <= 0)"
            ),
            "a request must not exceed its limit: raise the limit or lower the request",
        ),
        Rule(
            f"self.requests.all(name, !{_CEL_INDIVISIBLE} || "
            f"(name in self.limits && {_CEL_REQUEST}.compareTo({_CEL_LIMIT}) == 0))",
            (
                "extended resources and hugepages are not shared: their request must equal their "
                "limit, or be left out"
            ),
        ),
        Rule(
            (
                "self.limits.all(name, !name.contains('/') || "
                "string(self.limits[name]).matches('^[0-9]+$'))"
            ),
            "extended resources are counted in whole pieces, such as 1",
        ),
        Rule(
            f"self.requests.all(name, name != 'memory' || {_CEL_REQUEST}.{_CEL_AT_LEAST_MIB}) && "
            f"self.limits.all(name, name != 'memory' || {_CEL_LIMIT}.{_CEL_AT_LEAST_MIB})",
            "memory below 1Mi lacks its unit: a plain number counts bytes, so write 2Gi for 2",
        ),
    )

    requests: ResourceList = Field(default_factory=dict)
    """What the scheduler sets aside. Unset: the limits; of cpu, memory and ephemeral-storage what
    the plan needs."""
    limits: ResourceList = Field(default_factory=dict)
    """What the container may use at most; past its memory it is killed. Unset: no limit."""

    @property
    def completed_requests(self) -> dict[str, str]:
        """The requests as the API server completes them: a limit alone is also the request."""
        return {**self.limits, **self.requests}

    @property
    def network_cards(self) -> list[str]:
        """Extended resources of network cards that a pod requests, such as rdma/hca, by name."""
        return sorted(name for name in self.completed_requests if _NETWORK_CARD.search(name))

    def with_amounts(self, other: "ResourceRequirements") -> "ResourceRequirements":
        """These with the other's, which wins."""
        requests, limits = self.requests | other.requests, self.limits | other.limits
        return ResourceRequirements(requests=requests, limits=limits)

    def manifest(self, defaults: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """The container's resources in a pod; `defaults` are requests that are not named here."""
        requests = {**defaults, **self.completed_requests}
        amounts_by_kind = {"requests": requests, "limits": dict(self.limits)}
        return {kind: amounts for kind, amounts in amounts_by_kind.items() if amounts}


SOURCES = ("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef")
_RESERVED = f"{ENV_PREFIX}* and {', '.join(RANK_ENV)} are set by the operator and the trainer"


class EnvVarSource(Model):
    """Where the value of a variable comes from."""

    RULES = (exactly_one(*SOURCES),)

    secret_key_ref: SecretKeySelector | None = None
    """A key of a Secret. Unset: another source."""
    config_map_key_ref: ConfigMapKeySelector | None = None
    """A key of a ConfigMap. Unset: another source."""
    field_ref: ObjectFieldSelector | None = None
    """A field of the pod. Unset: another source."""
    resource_field_ref: ResourceFieldSelector | None = None
    """A request or limit of the container. Unset: another source."""


class EnvVar(Model):
    """An environment variable of a container."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule("!has(self.value) || !has(self.valueFrom)", "set at most one of value and valueFrom"),
        Rule(
            f"!(self.name.startsWith('{ENV_PREFIX}') || self.name in {list(RANK_ENV)})",
            f"{_RESERVED}: remove it",
        ),
    )

    name: VariableName
    """Name of the variable. Of the operator's own, HOME, HF_HOME and the like may be replaced."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Its value; `$(NAME)` of an earlier variable is filled in. Unset: from `valueFrom`, or
    empty."""
    value_from: EnvVarSource | None = None
    """Take the value from elsewhere. Unset: `value`."""


class TrainerEnvVar(EnvVar):
    """An environment variable of the training container."""

    RULES = (
        *EnvVar.RULES,
        Rule(
            f"!(self.name in {list(ALLOCATOR_ENV)}) || !has(self.value) || "
            f"!self.value.matches(r'{EXPANDABLE_SEGMENTS_PATTERN}') || "
            f"(self.name == '{ALLOCATOR_ENV[0]}' && self.value.contains('{EXPANDABLE_SEGMENTS}'))",
            f"vLLM sees expandable segments only in {ALLOCATOR_ENV[0]}, spelt "
            f"{EXPANDABLE_SEGMENTS}, and an engine that sleeps fails with those that it does not "
            f"see: write them so, or remove {ALLOCATOR_ENV[1]}, since the operator sets them on "
            "GPUs",
            at_creation=True,
        ),
    )


class EnvFromSource(Model):
    """A Secret or a ConfigMap, each of whose keys becomes a variable. Variables that are named
    singly win."""

    RULES = (
        exactly_one("configMapRef", "secretRef"),
        Rule(
            f"!has(self.prefix) || !self.prefix.startsWith('{ENV_PREFIX}')",
            f"{_RESERVED}: use another prefix",
        ),
    )

    prefix: Annotated[str, Field(max_length=128, pattern=r"^[-._a-zA-Z0-9]*$")] | None = None
    """Put in front of every key. Unset: the keys as they are."""
    config_map_ref: OptionalReference | None = None
    """The ConfigMap. Unset: `secretRef` must be set."""
    secret_ref: OptionalReference | None = None
    """The Secret. Unset: `configMapRef` must be set."""


Environment = Annotated[list[EnvVar], Field(max_length=64), MapList("name")]
TrainerEnvironment = Annotated[list[TrainerEnvVar], Field(max_length=64), MapList("name")]
EnvironmentSources = Annotated[list[EnvFromSource], Field(max_length=16)]


_STANDARD = "the `restricted` pod security standard"
Arguments = Annotated[list[Annotated[str, Field(max_length=16384)]], Field(max_length=64)]
Capabilities = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=16)
]


class CapabilitySet(Model):
    """Linux capabilities."""

    RULES = (
        Rule(
            "self.add.all(name, name == 'NET_BIND_SERVICE')",
            f"{_STANDARD} lets a container add NET_BIND_SERVICE only: remove the others",
        ),
        Rule(
            "size(self.drop) == 0 || 'ALL' in self.drop",
            f"{_STANDARD} drops ALL capabilities: set drop to [ALL], or leave it out",
        ),
    )

    add: Capabilities = []
    """NET_BIND_SERVICE, or none. Unset: none."""
    drop: Capabilities = []
    """Must name ALL. Unset: [ALL]."""


class SeccompProfile(Model):
    """Filter of system calls."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "(self.type == 'Localhost') == has(self.localhostProfile)",
            "type Localhost needs localhostProfile, and no other type takes it",
        ),
    )

    type: Literal["RuntimeDefault", "Localhost", "Unconfined"]
    """RuntimeDefault, Localhost for a file of the node, or Unconfined."""
    localhost_profile: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """The file, for Localhost. Unset: none."""


class ConfinedProfile(SeccompProfile):
    """A seccomp or AppArmor profile that a job may choose."""

    RULES = (
        Rule(
            "self.type in ['RuntimeDefault', 'Localhost']",
            f"{_STANDARD} allows RuntimeDefault and Localhost",
        ),
        *SeccompProfile.RULES,
    )

    type: Literal["RuntimeDefault", "Localhost", "Unconfined"]
    """RuntimeDefault, or Localhost for a file of the node."""


class SecurityContext(Model):
    """A container's rights; what is not set is as in the training container."""

    RULES = (
        Rule(
            "!(has(self.privileged) && self.privileged) "
            "&& !(has(self.allowPrivilegeEscalation) && self.allowPrivilegeEscalation)",
            (
                f"{_STANDARD} allows neither privileged nor allowPrivilegeEscalation: set them to "
                "false"
            ),
        ),
        Rule(
            (
                "(!has(self.runAsNonRoot) || self.runAsNonRoot) && (!has(self.runAsUser) || "
                "self.runAsUser > 0)"
            ),
            f"{_STANDARD} allows no root user: remove runAsNonRoot, and set runAsUser above 0",
        ),
        Rule(
            "!has(self.procMount) || self.procMount == 'Default'",
            f"{_STANDARD} allows procMount Default only: remove it",
        ),
    )

    run_as_user: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """User id, not 0. Unset: the pod's, which is 1000 unless the operator was installed with
    another."""
    run_as_group: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """Group id. Unset: the pod's."""
    run_as_non_root: bool | None = None
    """true. Unset: true."""
    privileged: bool | None = None
    """false. Unset: false."""
    allow_privilege_escalation: bool | None = None
    """false. Unset: false."""
    read_only_root_filesystem: bool | None = None
    """Whether the image's files can't be changed. Unset: true."""
    capabilities: CapabilitySet | None = None
    """Linux capabilities. Unset: none."""
    seccomp_profile: ConfinedProfile | None = None
    """Filter of system calls. Unset: RuntimeDefault."""
    app_armor_profile: ConfinedProfile | None = None
    """AppArmor profile. Unset: the node's default."""
    proc_mount: Literal["Default", "Unmasked"] | None = None
    """Default. Unset: Default."""


class InitContainer(Model):
    """A container that ends before the trainer starts; with restartPolicy Always it runs beside it
    (a sidecar)."""

    RULES = (
        Rule(
            f"self.name != '{CONTAINER}'",
            f"{CONTAINER} is the training container: use another name",
        ),
    )

    name: DNSLabel
    """Name of the container."""
    image: Image | None = None
    """Its image. Unset: the training image."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """When the image is pulled. Unset: IfNotPresent."""
    command: Arguments = []
    """Program and arguments. Unset: the image's."""
    args: Arguments = []
    """Further arguments. Unset: the image's."""
    working_dir: Path | None = None
    """Folder to start in. Unset: the image's."""
    env: Environment = []
    """Environment variables. Unset: none."""
    env_from: EnvironmentSources = []
    """Secrets and ConfigMaps whose keys become variables. Unset: none."""
    resources: ResourceRequirements = Field(default_factory=ResourceRequirements)
    """Requests and limits; the pod takes what is more, this or the trainer's, and a sidecar's on
    top. Unset: none."""
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=32), MapList("mountPath")] = []
    """Volumes of podTemplate.spec.volumes. Unset: none."""
    security_context: SecurityContext = Field(default_factory=SecurityContext)
    """Its rights. Unset: those of the training container."""
    restart_policy: Literal["Always"] | None = None
    """Always: a sidecar that runs beside the trainer. Unset: it must end before the trainer
    starts."""
