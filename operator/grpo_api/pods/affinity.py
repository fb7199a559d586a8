"""`podTemplate.spec.affinity` as in core/v1; the operator adds that a gang's pods keep to nodes of
their own."""

import re
from typing import Annotated, Literal

from pydantic import Field

from ..text.base import ATOMIC_LIST, Model, Rule
from ..text.names import LabelKey, Labels, Name

_VALUES_RULE = Rule(
    "self.operator in ['Exists', 'DoesNotExist'] ? size(self.values) == 0 : size(self.values) > 0",
    "operators Exists and DoesNotExist take no values; every other operator needs them",
    lambda own: (own.operator in ("Exists", "DoesNotExist")) == (not own.values),
)
Value = Annotated[str, Field(max_length=253, pattern=r"^[-._a-zA-Z0-9]*$")]
"""A label's value, or the name of a node."""
Values = Annotated[list[Value], Field(max_length=64, json_schema_extra=ATOMIC_LIST)]
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
    match_expressions: Annotated[
        list[LabelSelectorRequirement], Field(max_length=16, json_schema_extra=ATOMIC_LIST)
    ] = []
    """Further requirements. Unset: none."""


class PodAffinityTerm(Model):
    """Pods, and within what they count as near."""

    label_selector: LabelSelector | None = None
    """The pods. Unset: none."""
    topology_key: LabelKey
    """Label of nodes within whose value pods count as near, such as
    `topology.kubernetes.io/zone`."""
    namespaces: Annotated[list[Name], Field(max_length=16, json_schema_extra=ATOMIC_LIST)] = []
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
        list[PodAffinityTerm], Field(max_length=8, json_schema_extra=ATOMIC_LIST)
    ] = []
    """What must be so. The plan doesn't look at other pods' labels: the scheduler alone decides.
    Unset: none."""
    preferred_during_scheduling_ignored_during_execution: Annotated[
        list[WeightedPodAffinityTerm], Field(max_length=8, json_schema_extra=ATOMIC_LIST)
    ] = []
    """What had better be so. Unset: none."""


def _compares_with_one_number(requirement: "NodeSelectorRequirement") -> bool:
    if requirement.operator not in ("Gt", "Lt"):
        return True
    return len(requirement.values) == 1 and is_whole(requirement.values[0])


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
            _compares_with_one_number,
        ),
    )

    key: LabelKey
    """The label, or `metadata.name` among matchFields."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How it relates to `values`; Gt and Lt compare whole numbers."""
    values: Values = []
    """For In, NotIn, Gt and Lt. Unset: none."""


Requirements = Annotated[
    list[NodeSelectorRequirement], Field(max_length=16, json_schema_extra=ATOMIC_LIST)
]


class NodeSelectorTerm(Model):
    """Requirements that a node meets all of; without any, no node does."""

    match_expressions: Requirements = []
    """On labels. Unset: none."""
    match_fields: Requirements = []
    """On fields; Kubernetes knows `metadata.name`. Unset: none."""


class NodeSelector(Model):
    """Terms of which a node meets at least one."""

    node_selector_terms: Annotated[
        list[NodeSelectorTerm], Field(min_length=1, max_length=8, json_schema_extra=ATOMIC_LIST)
    ]
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
        list[PreferredSchedulingTerm], Field(max_length=8, json_schema_extra=ATOMIC_LIST)
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
