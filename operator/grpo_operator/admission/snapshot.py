"""The cluster at one moment, as admission sees it: nodes, what runs on them, priorities and what namespaces may use."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .inventory import NodeFacts, PodFacts
from .quotas import QuotaFacts
from .resources import Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster at one moment. Immutable: a pass in a thread of its own may look at it for as long as it likes."""

    nodes: tuple[NodeFacts, ...] = ()
    gpu_pods: tuple[PodFacts, ...] = ()
    """Pods that hold GPUs, or belong to a GRPOJob."""
    other_use: Mapping[str, Amounts] = field(default_factory=dict)
    """What all other pods take, by node."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Value by name of PriorityClass; the cluster's default has the name ``. Empty: they are not known."""
    default_priority: str = ""
    """Name of the cluster's default PriorityClass; empty without one."""
    quotas: Mapping[str, tuple[QuotaFacts, ...]] = field(default_factory=dict)
    """By namespace; none for one whose quotas can't be seen."""
    service_accounts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names by namespace; none for one whose accounts can't be seen."""
    visible: bool = True
    """True if all namespaces' pods could be listed."""
    problem: str = ""
    """Why nodes could not be listed."""


class SnapshotSource(Protocol):
    """Where admission gets its snapshots; in the operator, mirrors of the cluster."""

    def take(self) -> Snapshot:
        """Return the cluster as it is known now; the same object while nothing has changed.

        Raises:
            ClusterError: a kind has not been listed yet, or its watch has been silent for too long.
        """
        ...
