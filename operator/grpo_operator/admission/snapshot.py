"""Defines Snapshot, the cluster at one moment as admission sees it.

It holds the nodes, what runs on them, priorities, and what namespaces may use. ResourceQuotas are
kept as the API server describes them, with the rule which of them count a gang's pods.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_kube.objects.json_reader import JsonObject

from ..records.job_class import JobClasses
from .inventory import Amounts, NodeFacts, PodFacts, amounts

Scope = tuple[str, str, tuple[str, ...]]
"""Scope, operator and values of a ResourceQuota's selector."""
LastingFacts = tuple[tuple[NodeFacts, ...], tuple[object, ...]]
"""What of the cluster does not change with each pod that comes or goes: nodes, and what jobs
name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaFacts:
    """A ResourceQuota: what it allows, what is used, and which pods it counts."""

    namespace: str
    name: str
    hard: Amounts
    used: Amounts
    scopes: tuple[Scope, ...] = ()
    """A pod is counted that meets all."""


def quota_facts(item: object) -> QuotaFacts:
    """The facts of a ResourceQuota object.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    spec = whole.part("spec")
    status = whole.part("status")
    scopes: list[Scope] = [(name, "Exists", ()) for name in spec.strings("scopes")]
    for expression in spec.part("scopeSelector").parts("matchExpressions"):
        name = expression.text("scopeName")
        values = tuple(expression.strings("values"))
        scopes.append((name, expression.text("operator"), values))
    hard = amounts(status.part("hard"))  # what is in force; spec.hard may be newer
    used = amounts(status.part("used"))
    return QuotaFacts(
        namespace=meta.required_text("namespace"),
        name=meta.required_text("name"),
        hard=hard,
        used=used,
        scopes=tuple(scopes),
    )


def is_in_scope(quota: QuotaFacts, priority_class: str) -> bool:
    """True if the quota counts a gang's pods, whose PriorityClass is this (empty: none)."""
    return all(
        _meets(name, operator, values, priority_class) for name, operator, values in quota.scopes
    )


def _meets(scope: str, operator: str, values: tuple[str, ...], priority_class: str) -> bool:
    """Our pods request cores, so they are no best effort, and have no deadline of their own."""
    # the fourth operator of the API is DoesNotExist
    if scope == "PriorityClass":
        has_class = bool(priority_class)
        answers = {
            "In": priority_class in values,
            "NotIn": priority_class not in values,
            "Exists": has_class,
        }
        return answers.get(operator, not has_class)
    return scope in ("NotTerminating", "NotBestEffort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster at one moment. Immutable, since a cycle reads it in its own thread."""

    nodes: tuple[NodeFacts, ...] = ()
    gpu_pods: tuple[PodFacts, ...] = ()
    """Pods that hold GPUs, or belong to a GRPOJob."""
    other_use: Mapping[str, Amounts] = field(default_factory=dict)
    """What all other pods take, by node."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Value by name of PriorityClass, `` for the default. Empty: they are not known."""
    default_priority: str = ""
    """Name of the cluster's default PriorityClass; empty without one."""
    quotas: Mapping[str, tuple[QuotaFacts, ...]] = field(default_factory=dict)
    """By namespace; none for one whose quotas can't be seen."""
    storage_classes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name and provisioner of StorageClasses by name; the cluster's default has the name ``."""
    job_classes: JobClasses = field(default_factory=JobClasses)
    """GRPOJobClasses, and the pod security standards of namespaces."""
    service_accounts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names by namespace; none for one whose accounts can't be seen."""
    visible: bool = True
    """True if all namespaces' pods could be listed."""
    problem: str = ""
    """Why nodes could not be listed."""

    @property
    def lasting_facts(self) -> LastingFacts:
        """All but pods and quotas, to be compared with those of another moment."""
        classes = (self.storage_classes, self.job_classes, self.priorities)
        return self.nodes, (*classes, self.service_accounts)
