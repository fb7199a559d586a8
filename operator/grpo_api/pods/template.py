"""`spec.podTemplate`: labels, annotations and the fields of core/v1's PodSpec that a user may set.

It has the shape of a pod template, so that everybody knows where a field stands (cert-manager does
the same). Fields of the training container alone, such as env or resources, are in the spec itself.
The operator adds to the affinity that a gang's pods keep to nodes of their own.
"""

import re
from typing import Annotated, Literal

from pydantic import Field

from ..text.base import MapList, Model, Rule
from ..text.contract import RESERVED_LABELS
from ..text.names import Annotations, LabelKey, Labels, LocalObjectReference, Name
from .containers import InitContainer
from .volumes import Volume

_VALUES_RULE = Rule(
    "(self.operator in ['Exists', 'DoesNotExist']) == (size(self.values) == 0)",
    "operators Exists and DoesNotExist take no values; every other operator needs them",
)
Value = Annotated[str, Field(max_length=253, pattern=r"^[-._a-zA-Z0-9]*$")]
"""A label's value, or the name of a node."""
Values = Annotated[list[Value], Field(max_length=64)]
Weight = Annotated[int, Field(ge=1, le=100)]


def is_whole(value: str) -> bool:
    """Whether a label's value is a whole number, as Gt and Lt need it."""
    return re.fullmatch("-?[0-9]+", value) is not None


class LabelSelectorRequirement(Model):
    """What one label must be."""

    RULES = (_VALUES_RULE,)

    key: LabelKey
    """The label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How it relates to `values`."""
    values: Values = []
    """For In and NotIn. Unset: none."""


class LabelSelector(Model):
    """Labels that objects must have."""

    match_labels: Labels = Field(default_factory=dict)
    """Labels with their values. Unset: any."""
    match_expressions: Annotated[list[LabelSelectorRequirement], Field(max_length=16)] = []
    """Further requirements. Unset: none."""


class PodAffinityTerm(Model):
    """Pods, and within what they count as near."""

    label_selector: LabelSelector | None = None
    """The pods. Unset: none."""
    topology_key: LabelKey
    """Label of nodes within whose value pods count as near, such as
    `topology.kubernetes.io/zone`."""
    namespaces: Annotated[list[Name], Field(max_length=16)] = []
    """Namespaces of the pods. Unset: the job's."""
    namespace_selector: LabelSelector | None = None
    """Further namespaces by their labels. Unset: none."""


class WeightedPodAffinityTerm(Model):
    """A preference for or against pods nearby."""

    weight: Weight
    """How much it counts, from 1 to 100."""
    pod_affinity_term: PodAffinityTerm
    """The pods."""


class PodAffinity(Model):
    """Pods to be near to, or far from."""

    required_during_scheduling_ignored_during_execution: Annotated[
        list[PodAffinityTerm], Field(max_length=8)
    ] = []
    """What must be so. The plan doesn't look at other pods' labels: the scheduler alone decides.
    Unset: none."""
    preferred_during_scheduling_ignored_during_execution: Annotated[
        list[WeightedPodAffinityTerm], Field(max_length=8)
    ] = []
    """What had better be so. Unset: none."""


class NodeSelectorRequirement(Model):
    """What one label or field of a node must be."""

    RULES = (
        _VALUES_RULE,
        Rule(
            (
                "!(self.operator in ['Gt', 'Lt']) || size(self.values) == 1 && "
                "self.values[0].matches('^-?[0-9]+$')"
            ),
            "operators Gt and Lt compare with exactly one whole number",
        ),
    )

    key: LabelKey
    """The label, or `metadata.name` among matchFields."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How it relates to `values`; Gt and Lt compare whole numbers."""
    values: Values = []
    """For In, NotIn, Gt and Lt. Unset: none."""


Requirements = Annotated[list[NodeSelectorRequirement], Field(max_length=16)]


class NodeSelectorTerm(Model):
    """Requirements that a node meets all of; without any, no node does."""

    match_expressions: Requirements = []
    """On labels. Unset: none."""
    match_fields: Requirements = []
    """On fields; Kubernetes knows `metadata.name`. Unset: none."""


class NodeSelector(Model):
    """Terms of which a node meets at least one."""

    node_selector_terms: Annotated[list[NodeSelectorTerm], Field(min_length=1, max_length=8)]
    """The terms."""


class PreferredSchedulingTerm(Model):
    """A preference for nodes."""

    weight: Weight
    """How much it counts, from 1 to 100."""
    preference: NodeSelectorTerm
    """The nodes."""


class NodeAffinity(Model):
    """Nodes to run on."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """Nodes that the job must run on; the plan counts only these. Unset: any node."""
    preferred_during_scheduling_ignored_during_execution: Annotated[
        list[PreferredSchedulingTerm], Field(max_length=8)
    ] = []
    """Nodes that the job had better run on. Unset: none."""


class Affinity(Model):
    """Where pods go, seen from nodes and from other pods."""

    node_affinity: NodeAffinity | None = None
    """Nodes to run on. Unset: any."""
    pod_affinity: PodAffinity | None = None
    """Pods to be near to. Unset: none."""
    pod_anti_affinity: PodAffinity | None = None
    """Pods to be far from, beside the gang's own. Unset: none."""


def _cel_reserved(field: str) -> str:
    """CEL: none of the map's keys is reserved."""
    tests = " || ".join(map(_cel_key_matches, RESERVED_LABELS))
    return f"!self.{field}.exists(key, {tests})"


def _cel_key_matches(reserved: str) -> str:
    """CEL: the key is this reserved one, or has this reserved prefix, which ends with a slash."""
    return f"key.startsWith('{reserved}')" if reserved.endswith("/") else f"key == '{reserved}'"


PullSecrets = Annotated[list[LocalObjectReference], Field(max_length=16), MapList("name")]
"""Pull secrets of the job's namespace."""


class PodMetadata(Model):
    """Labels and annotations of the pods."""

    RULES = (
        Rule(
            f"{_cel_reserved('labels')} && {_cel_reserved('annotations')}",
            (
                f"{', '.join(RESERVED_LABELS)} belong to the operator and the Job controller: use "
                "another name"
            ),
        ),
    )

    labels: Labels = Field(default_factory=dict)
    """Further labels of the pods. Unset: none."""
    annotations: Annotations = Field(default_factory=dict)
    """Further annotations of the pods. Unset: none."""


class DNSOption(Model):
    """A line `options` of resolv.conf."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Such as `ndots`."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Such as `2`. Unset: none."""


class DNSConfig(Model):
    """Further settings of resolv.conf."""

    nameservers: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=45)]], Field(max_length=3)
    ] = []
    """Addresses of name servers. Unset: the cluster's only."""
    searches: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=253)]], Field(max_length=32)
    ] = []
    """Further search domains. Unset: the cluster's only."""
    options: Annotated[list[DNSOption], Field(max_length=16)] = []
    """Options. Unset: the cluster's only."""


class PodSpec(Model):
    """Settings of the pods; tolerations, node selector and priority are in spec.placement."""

    RULES = (
        Rule(
            "!(has(self.hostNetwork) && self.hostNetwork) && !(has(self.hostPID) && self.hostPID) "
            "&& !(has(self.hostIPC) && self.hostIPC)",
            (
                "hostNetwork, hostPID and hostIPC go beyond the `restricted` pod security "
                "standard: remove them"
            ),
        ),
        Rule(
            "self.initContainers.all(one, "
            "one.volumeMounts.all(mount, self.volumes.exists(volume, volume.name == mount.name)))",
            (
                "initContainers can mount only what podTemplate.spec.volumes names: add the volume "
                "there"
            ),
        ),
        Rule(
            "!has(self.dnsPolicy) || self.dnsPolicy != 'None' "
            "|| (has(self.dnsConfig) && size(self.dnsConfig.nameservers) > 0)",
            "dnsPolicy None needs dnsConfig.nameservers",
        ),
    )

    service_account_name: Name | None = None
    """Service account; its token is never mounted. Unset: the namespace's default."""
    image_pull_secrets: PullSecrets = []
    """Pull secrets, beside those of all jobs, which the operator was installed with. Unset, and
    there are none of all jobs: the service account's."""
    runtime_class_name: Name | None = None
    """RuntimeClass, such as `nvidia`. Unset: the cluster's default."""
    scheduler_name: Name | None = None
    """Scheduler. Unset: the cluster's default."""
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=86400)] = 60
    """Time between SIGTERM and SIGKILL, in which a checkpoint may be written. Unset: 60 s."""
    affinity: Affinity | None = None
    """Nodes and pods to be near to or far from. Unset: only that a gang's pods have nodes of their
    own."""
    dns_policy: Literal["ClusterFirst", "None"] | None = None
    """ClusterFirst, or None with name servers of your own that know the cluster: rank 0 is found by
    its name. Unset: ClusterFirst."""
    dns_config: DNSConfig | None = None
    """Further settings of resolv.conf. Unset: none."""
    volumes: Annotated[list[Volume], Field(max_length=16), MapList("name")] = []
    """Further volumes; spec.volumeMounts shows them to the trainer. Unset: none."""
    init_containers: Annotated[list[InitContainer], Field(max_length=8), MapList("name")] = []
    """Containers that run before the trainer, in this order, or beside it. Unset: none."""
    host_network: bool | None = None
    """Rejected when true: goes beyond the `restricted` standard. Unset: false."""
    host_pid: bool | None = Field(default=None, alias="hostPID")
    """Rejected when true: goes beyond the `restricted` standard. Unset: false."""
    host_ipc: bool | None = Field(default=None, alias="hostIPC")
    """Rejected when true: goes beyond the `restricted` standard. Unset: false."""

    @property
    def volume_names(self) -> set[str]:
        """Names of the user's volumes."""
        return {volume.name for volume in self.volumes}


class PodTemplate(Model):
    """Labels, annotations and settings of the pods."""

    metadata: PodMetadata = Field(default_factory=PodMetadata)
    """Labels and annotations. Unset: the operator's."""
    spec: PodSpec = Field(default_factory=PodSpec)
    """Settings of the pods. Unset: the operator's."""
