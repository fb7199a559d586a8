"""The cluster at one moment, as admission sees it: nodes, what runs on them, priorities."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .inventory import NodeFacts, PodFacts
from .resources import Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster at one moment."""

    nodes: tuple[NodeFacts, ...] = ()
    gpu_pods: tuple[PodFacts, ...] = ()
    """Pods that hold GPUs, or belong to a GRPOJob."""
    other_use: Mapping[str, Amounts] = field(default_factory=dict)
    """What all other pods take, by node."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Value by name of PriorityClass; the cluster's default has the name ``."""
    visible: bool = True
    """Whether all namespaces' pods could be listed."""
    problem: str = ""
    """Why nodes could not be listed."""


class SnapshotSource(Protocol):
    """Where admission gets its snapshots; in the operator, LISTs."""

    async def take(self) -> Snapshot:
        """The cluster now, or a moment ago."""
        ...

    def expire(self) -> None:
        """Something was freed: the next one is taken anew."""
        ...
