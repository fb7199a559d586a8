r"""Defines the strings of a spec that name something, and references to other objects of the job's
namespace.

Names are those of Kubernetes objects, labels, hub repositories and folders. Two engines evaluate
their patterns: Go's RE2 in the API server and Rust's in pydantic. The two differ in \s, \w and \d,
which are ASCII in one and Unicode in the other, so patterns list the characters instead.

References point to claims, to keys of Secrets and ConfigMaps, and to fields of the pod. They have
the shapes of core/v1, so that what users know from pods is right here, too.
"""

from typing import Annotated, Literal

from pydantic import Field

from .base import Model, Rule
from .quantity import PATTERN_HINT, Quantity

_DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL_KEY = (
    r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[a-zA-Z0-9]([-._a-zA-Z0-9]{0,61}[a-zA-Z0-9])?$"
)
LABEL_VALUE = "^([a-zA-Z0-9]([-._a-zA-Z0-9]*[a-zA-Z0-9])?)?$"

Name = Annotated[
    str, Field(min_length=1, max_length=253, pattern=rf"^{_DNS_LABEL}(\.{_DNS_LABEL})*$")
]
"""The name of a Kubernetes object."""

DNSLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=rf"^{_DNS_LABEL}$")]
"""The name of a container or of a pod's volume."""

LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=LABEL_KEY)]
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]
Annotations = Annotated[
    dict[LabelKey, Annotated[str, Field(max_length=4096)]], Field(max_length=32)
]

RESOURCE_NAME = (
    r"^(cpu|memory|ephemeral-storage|hugepages-[1-9][0-9]*[KMGT]i"
    r"|[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[a-zA-Z0-9]([-._a-zA-Z0-9]{0,61}[a-zA-Z0-9])?)$"
)
ResourceName = Annotated[str, Field(min_length=1, max_length=317, pattern=RESOURCE_NAME)]
RESOURCE_NAMES = "cpu, memory, ephemeral-storage, or such as hugepages-2Mi and rdma/hca"
"""What a ResourceName may be, for messages."""

GPUProduct = Annotated[
    str,
    Field(
        min_length=1,
        max_length=63,
        pattern=r"^[-._a-zA-Z0-9]+$",
        json_schema_extra={PATTERN_HINT: "write it as H100 or NVIDIA-L4, without blanks"},
    ),
]
"""A GPU by its `nvidia.com/gpu.product` label, a prefix of that, or a short name."""

Repository = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x20\x7f]+$")]
"""A Hugging Face hub id such as `openai/gsm8k`, or an absolute path in the pods."""
HUB_ID_OR_PATH = "^(/|[a-zA-Z0-9_]([-._a-zA-Z0-9]*/[a-zA-Z0-9_])?([-._a-zA-Z0-9]*[a-zA-Z0-9_])?$)"
"""What a Repository of a new job must match: no URL, no relative path, no slash at the end."""

Revision = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[-._/a-zA-Z0-9]+$")]
"""A commit, tag or branch on the hub."""

Image = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[\x21-\x7e]+$")]
"""A container image by its name, with a tag or a digest."""

Endpoint = Annotated[
    str,
    Field(
        max_length=512,
        pattern=r"^https?://(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9][-._a-zA-Z0-9]*)(:[0-9]{1,5})?(/[-._/a-zA-Z0-9]*)?$",
    ),
]
"""The URL of a service."""

PullPolicy = Literal["Always", "IfNotPresent", "Never"]

Path = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^/[^\x00-\x1f\x7f:]*$")]
"""An absolute path inside the pods."""

SubPath = Annotated[
    str, Field(min_length=1, max_length=512, pattern=r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$")
]
"""A path relative to a volume; `inside_rule` keeps it there."""


UPWARDS = r"(^|/)\.\.(/|$)"
"""A part `..` anywhere in a path."""


def inside_rule(field: str, optional: bool = False) -> Rule:
    """That the path in a field, by its name in the CRD, stays inside its volume."""
    cel = f"!self.{field}.matches(r'{UPWARDS}')"
    if optional:
        cel = f"!has(self.{field}) || {cel}"
    return Rule(cel, f"{field} must stay inside the volume: remove `..`")


SUB_PATH_RULE = inside_rule("subPath", optional=True)
"""For every model with a `subPath`."""

DataKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
"""A key of a Secret or a ConfigMap."""

VariableName = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=r"^([-_a-zA-Z]|\.[-_a-zA-Z0-9])[-._a-zA-Z0-9]*$"),
]
"""The name of an environment variable."""

RewardName = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-zA-Z_][-a-zA-Z0-9_]*$")
]
"""The name of a reward in metrics."""

ServiceURL = Annotated[
    str, Field(max_length=512, pattern=r"^https?://[-.:a-zA-Z0-9]+(/[-._/a-zA-Z0-9]*)?$")
]
"""The URL of a service, without user, query and fragment, where a secret would be seen."""


class VolumeClaim(Model):
    """An existing PersistentVolumeClaim of the job's namespace."""

    RULES = (SUB_PATH_RULE,)

    claim_name: Name
    """Name of the claim. Pods stay Pending while it doesn't exist."""
    sub_path: SubPath | None = None
    """Folder inside the volume to mount. Unset: the volume's root."""


class ImageVolume(Model):
    """Files of a container image, or of another OCI artifact, as core/v1's volume source
    `image`."""

    reference: Image
    """Name of the image, with a tag or a digest. The cluster needs Kubernetes 1.35, or 1.33 with
    the feature gate ImageVolume."""
    pull_policy: PullPolicy | None = None
    """When a node pulls it; with podTemplate.spec.imagePullSecrets. Unset: Always for the tag
    latest or none, else IfNotPresent."""


ONE_VOLUME = Rule(
    "!has(self.volume) || !has(self.image)",
    "set at most one of volume, image: both would be mounted on the same folder",
)
"""For every model that has its files from a claim or from an image."""


class ConfigMapFiles(Model):
    """A ConfigMap of the job's namespace, each key a file."""

    name: Name
    """Name of the ConfigMap."""


class LocalObjectReference(Model):
    """An object of the job's namespace, by its name."""

    name: Name
    """Name of the object."""


class OptionalReference(LocalObjectReference):
    """A Secret or a ConfigMap as a whole."""

    optional: bool | None = None
    """Start the pods even if it doesn't exist. Unset: they wait for it."""


class SecretKeySelector(OptionalReference):
    """One key of a Secret in the job's namespace."""

    key: DataKey
    """Key inside the Secret, such as `token`."""


class ConfigMapKeySelector(OptionalReference):
    """One key of a ConfigMap in the job's namespace."""

    key: DataKey
    """Key inside the ConfigMap."""


class ObjectFieldSelector(Model):
    """A field of the pod itself."""

    api_version: Literal["v1"] = "v1"
    """Version of the pod's schema. Unset: v1."""
    field_path: Annotated[
        str, Field(min_length=1, max_length=512, pattern=r"^(metadata|spec|status)\.[^\x00-\x1f]+$")
    ]
    """Such as `metadata.name`, `spec.nodeName` or `status.podIP`."""


class ResourceFieldSelector(Model):
    """A request or a limit of a container of the pod."""

    container_name: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Name of the container; volumes need it. Unset: the container itself."""
    resource: Annotated[str, Field(max_length=317, pattern=r"^(limits|requests)\.[-./a-zA-Z0-9]+$")]
    """Such as `limits.memory`."""
    divisor: Quantity | None = None
    """Unit in which the amount is given. Unset: 1."""
