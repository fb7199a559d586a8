"""`podTemplate.spec.initContainers`: what runs before the trainer, or beside it, within the `restricted` standard."""

from typing import Annotated, Literal

from pydantic import Field

from ..base import ATOMIC_LIST, Model, Rule, map_list, unique
from ..contract import CONTAINER
from ..names import DNSLabel, Image, Path, PullPolicy
from .environment import EnvFromSource, EnvVar
from .mounts import VolumeMount
from .resources import ResourceRequirements

_STANDARD = "the `restricted` pod security standard"
Arguments = Annotated[
    list[Annotated[str, Field(max_length=16384)]], Field(max_length=64, json_schema_extra=ATOMIC_LIST)
]
Capabilities = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=16, json_schema_extra=ATOMIC_LIST)
]
Environment = Annotated[list[EnvVar], Field(max_length=64, json_schema_extra=map_list("name")), unique("name")]
EnvironmentSources = Annotated[list[EnvFromSource], Field(max_length=16, json_schema_extra=ATOMIC_LIST)]


def _adds_allowed_capabilities(capabilities: "CapabilitySet") -> bool:
    return all(name == "NET_BIND_SERVICE" for name in capabilities.add)


def _drops_all_capabilities(capabilities: "CapabilitySet") -> bool:
    return not capabilities.drop or "ALL" in capabilities.drop


class CapabilitySet(Model):
    """Linux capabilities."""

    RULES = (
        Rule(
            "self.add.all(name, name == 'NET_BIND_SERVICE')",
            f"{_STANDARD} lets a container add NET_BIND_SERVICE only: remove the others",
            _adds_allowed_capabilities,
        ),
        Rule(
            "size(self.drop) == 0 || 'ALL' in self.drop",
            f"{_STANDARD} drops ALL capabilities: set drop to [ALL], or leave it out",
            _drops_all_capabilities,
        ),
    )

    add: Capabilities = []
    """NET_BIND_SERVICE, or none. Unset: none."""
    drop: Capabilities = []
    """Must name ALL. Unset: [ALL]."""


def _is_confined(profile: "Profile") -> bool:
    return profile.type in ("RuntimeDefault", "Localhost")


def _names_a_local_file_for_localhost(profile: "Profile") -> bool:
    return (profile.type == "Localhost") == (profile.localhost_profile is not None)


class Profile(Model):
    """A seccomp or AppArmor profile."""

    RULES = (
        Rule(
            "self.type in ['RuntimeDefault', 'Localhost']",
            f"{_STANDARD} allows RuntimeDefault and Localhost",
            _is_confined,
        ),
        Rule(
            "(self.type == 'Localhost') == has(self.localhostProfile)",
            "type Localhost needs localhostProfile, and no other type takes it",
            _names_a_local_file_for_localhost,
        ),
    )

    type: Literal["RuntimeDefault", "Localhost", "Unconfined"]
    """RuntimeDefault, or Localhost for a file of the node."""
    localhost_profile: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """The file, for Localhost. Unset: none."""


def _is_unprivileged(context: "SecurityContext") -> bool:
    return not (context.privileged or context.allow_privilege_escalation)


def _is_not_root(context: "SecurityContext") -> bool:
    return context.run_as_non_root is not False and context.run_as_user != 0


def _masks_proc(context: "SecurityContext") -> bool:
    return context.proc_mount in (None, "Default")


class SecurityContext(Model):
    """A container's rights; what is not set is as in the training container."""

    RULES = (
        Rule(
            "!(has(self.privileged) && self.privileged) "
            "&& !(has(self.allowPrivilegeEscalation) && self.allowPrivilegeEscalation)",
            f"{_STANDARD} allows neither privileged nor allowPrivilegeEscalation: set them to false",
            _is_unprivileged,
        ),
        Rule(
            "(!has(self.runAsNonRoot) || self.runAsNonRoot) && (!has(self.runAsUser) || self.runAsUser > 0)",
            f"{_STANDARD} allows no root user: remove runAsNonRoot, and set runAsUser above 0",
            _is_not_root,
        ),
        Rule(
            "!has(self.procMount) || self.procMount == 'Default'",
            f"{_STANDARD} allows procMount Default only: remove it",
            _masks_proc,
        ),
    )

    run_as_user: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """User id, not 0. Unset: the pod's, which is 1000 unless the operator was installed with another."""
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
    seccomp_profile: Profile | None = None
    """Filter of system calls. Unset: RuntimeDefault."""
    app_armor_profile: Profile | None = None
    """AppArmor profile. Unset: the node's default."""
    proc_mount: Literal["Default", "Unmasked"] | None = None
    """Default. Unset: Default."""


class InitContainer(Model):
    """A container that ends before the trainer starts; with restartPolicy Always it runs beside it (a sidecar)."""

    RULES = (
        Rule(
            f"self.name != '{CONTAINER}'",
            f"{CONTAINER} is the training container: use another name",
            lambda own: own.name != CONTAINER,
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
    """Requests and limits; the pod takes what is more, this or the trainer's, and a sidecar's on top. Unset: none."""
    volume_mounts: Annotated[
        list[VolumeMount], Field(max_length=32, json_schema_extra=map_list("mountPath")), unique("mount_path")
    ] = []
    """Volumes of podTemplate.spec.volumes. Unset: none."""
    security_context: SecurityContext = Field(default_factory=SecurityContext)
    """Its rights. Unset: those of the training container."""
    restart_policy: Literal["Always"] | None = None
    """Always: a sidecar that runs beside the trainer. Unset: it must end before the trainer starts."""
