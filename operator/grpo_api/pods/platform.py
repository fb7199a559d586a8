"""What only an administrator may give the pods of a job: devices of the network, the node's own
network and files, users and capabilities.

A GRPOJobClass holds it, and no job can. The pod security standard that its pods then need follows
from it, so that a namespace can be asked before a GPU is held.
"""

from enum import IntEnum
from typing import Annotated

from pydantic import Field

from ..text.base import MapList, Model, Rule, exactly_one
from ..text.names import LABEL_VALUE, UPWARDS, Name, Path
from .containers import ResourceRequirements, SeccompProfile, TrainerMount

VOLUME_PREFIX = "class-"
"""Volumes of a class have it in the pods, so that none has the name of a job's."""
BASELINE_CAPABILITIES = frozenset(
    {
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
        *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    }
)
"""Those that the `baseline` standard lets a container add
(https://kubernetes.io/docs/concepts/security/pod-security-standards/)."""


class PodSecurityLevel(IntEnum):
    """The pod security standards; a stricter one is smaller."""

    RESTRICTED = 0
    BASELINE = 1
    PRIVILEGED = 2

    def __str__(self) -> str:
        """As the label `pod-security.kubernetes.io/enforce` spells it."""
        return self.name.lower()


class PlatformCapabilities(Model):
    """Linux capabilities."""

    add: Annotated[
        list[Annotated[str, Field(min_length=2, max_length=64, pattern=r"^[A-Z][A-Z0-9_]*$")]],
        Field(max_length=16),
    ] = []
    """Such as IPC_LOCK. Unset: none."""


_ID = Annotated[int, Field(ge=0, le=2147483647)]


class PlatformSecurityContext(Model):
    """User, groups and rights of the pods."""

    RULES = (
        # Kubernetes has no ambient capabilities, and the container may not gain privileges.
        Rule(
            "size(self.capabilities.add) == 0 || (has(self.runAsUser) && self.runAsUser == 0)",
            "only root gets an added capability: set runAsUser to 0, or remove it; for IPC_LOCK "
            "let the nodes' container runtime set LimitMEMLOCK=infinity",
        ),
    )

    run_as_user: _ID | None = None
    """User id. Unset: that of all jobs."""
    run_as_group: _ID | None = None
    """Group id. Unset: that of all jobs."""
    fs_group: _ID | None = None
    """Group of the volumes. Unset: that of all jobs."""
    supplemental_groups: Annotated[list[_ID], Field(max_length=16)] = []
    """Further groups. Unset: none."""
    seccomp_profile: SeccompProfile | None = None
    """Filter of system calls. Unset: RuntimeDefault."""
    capabilities: PlatformCapabilities = Field(default_factory=PlatformCapabilities)
    """Linux capabilities of the training container. Unset: none."""


_VOLUME_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"


class PlatformVolume(TrainerMount):
    """A folder of the node, or a ConfigMap of the job's namespace, in the training container."""

    RULES = (
        *TrainerMount.RULES,
        exactly_one("hostPath", "configMap"),
        Rule(
            f"!has(self.hostPath) || !self.hostPath.matches(r'{UPWARDS}')",
            "hostPath must not contain `..`: write the folder that is meant",
        ),
    )

    name: Annotated[str, Field(min_length=1, max_length=50, pattern=_VOLUME_NAME)]
    """Name of the volume."""
    host_path: Path | None = None
    """Folder of the node, such as that of a NCCL plugin. Unset: see configMap."""
    config_map: Name | None = None
    """ConfigMap, such as the certificates of a proxy. Unset: see hostPath."""
    read_only: bool | None = None
    """Mount read-only. Unset: true."""


Price = Annotated[float, Field(ge=0, le=1e6)]
Product = Annotated[str, Field(min_length=1, max_length=63, pattern=LABEL_VALUE)]


class PlatformSpec(Model):
    """What no job can ask for itself."""

    RULES = (
        Rule(
            "[self.resources.requests, self.resources.limits].all(amounts, "
            "amounts.all(name, name.contains('/') || name.startsWith('hugepages-')))",
            "resources are extended ones, such as rdma/hca, and hugepages: cores and memory are "
            "the plan's",
        ),
        Rule(
            "self.volumes.all(a, self.volumes.filter(b, b.mountPath == a.mountPath).size() == 1)",
            "volumes must have different folders: two have the same mountPath",
        ),
    )

    resources: ResourceRequirements = Field(default_factory=ResourceRequirements)
    """Requests and limits of every pod of a gang, such as `limits: {rdma/hca: 1}`. Unset: none."""
    host_network: bool = False
    """Use the node's network. Then a node has room for one pod of all gangs, and no engines in pods
    of their own; NetworkPolicies don't apply. Unset: false."""
    security_context: PlatformSecurityContext = Field(default_factory=PlatformSecurityContext)
    """User, groups and rights. Unset: those of all jobs."""
    volumes: Annotated[list[PlatformVolume], Field(max_length=16), MapList("name")] = []
    """Folders of the node and ConfigMaps in the training container. Unset: none."""
    gpu_hour_prices: Annotated[dict[Product, Price], Field(max_length=64)] = Field(
        default_factory=dict
    )
    """Price of one GPU for an hour by product, instead of the nodes' and the operator's. Unset:
    those."""

    @property
    def pod_security_level(self) -> PodSecurityLevel:
        """The strictest standard that pods with all of this meet."""
        context = self.security_context
        capabilities = set(context.capabilities.add)
        profile = context.seccomp_profile
        if (
            self.host_network
            or any(volume.host_path for volume in self.volumes)
            or not capabilities <= BASELINE_CAPABILITIES
            or (profile and profile.type == "Unconfined")
        ):
            return PodSecurityLevel.PRIVILEGED
        if context.run_as_user == 0 or not capabilities <= {"NET_BIND_SERVICE"}:
            return PodSecurityLevel.BASELINE
        return PodSecurityLevel.RESTRICTED

    @property
    def of_cpu_pods(self) -> "PlatformSpec":
        """What a pod that only reads and checks needs of it: users, groups and certificates."""
        context = self.security_context.model_copy(update={"capabilities": PlatformCapabilities()})
        return PlatformSpec(
            security_context=context,
            volumes=[volume for volume in self.volumes if volume.config_map],
        )
