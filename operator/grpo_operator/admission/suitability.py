"""Which nodes suit a job's pods, whatever is free on them; worked out once for all jobs that ask the same of nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_api.job import GRPOJobSpec

from .inventory import Cards, NodeFacts, cards, left_out
from .node_fit import extra_amounts, reports_disk, short_of_disk, unfit
from .resources import Amounts

Sight = tuple[NodeFacts, tuple[Cards, ...]]
"""A node and the GPUs on it that can be used."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Suitable:
    """The nodes for all specs that ask the same of them; compared by identity."""

    nodes: tuple[Sight, ...]
    short_of_disk: tuple[Sight, ...]
    """Nodes that would do, but for the room on their disks."""
    warnings: tuple[str, ...]
    """A sentence for each GPU node that is left out, or known in part only."""
    extra: Amounts
    """What a pod takes of its node besides GPUs, memory and cores."""
    reports_disk: bool
    """True if GPU nodes say how much ephemeral storage they have."""


class Suitability:
    """Answers for the nodes of one moment."""

    def __init__(self, nodes: tuple[NodeFacts, ...]) -> None:
        """Read each node's GPUs; nodes without any are left out."""
        self.nodes = nodes
        self._sights: list[tuple[NodeFacts, tuple[Cards, ...], list[str]]] = []
        for node in nodes:
            usable, warnings = cards(node)
            if usable or warnings:
                self._sights.append((node, tuple(usable), warnings))
        self._known: dict[str, Suitable] = {}
        self._reports_disk = reports_disk(node for node, _, _ in self._sights)

    def of(self, spec: GRPOJobSpec, avoided: Sequence[str] = (), *, disk: bool = True) -> Suitable:
        """The nodes for a spec, without those that its pods are kept away from.

        `disk`: whether the pods write what training does.
        """
        extra = extra_amounts(spec, reports_disk=self._reports_disk and disk)
        affinity = spec.pod_template.spec.affinity
        placement = spec.placement.model_dump_json(include={"node_selector", "tolerations"})
        # All that the answer depends on: jobs that ask the same of nodes share one, and its identity keys other caches.
        key = f"{placement}{affinity.model_dump_json() if affinity else ''}{sorted(extra.items())}{sorted(avoided)}"
        if key not in self._known:
            self._known[key] = self._suitable(spec, extra, avoided)
        return self._known[key]

    def _suitable(self, spec: GRPOJobSpec, extra: Amounts, avoided: Sequence[str]) -> Suitable:
        nodes: list[Sight] = []
        short: list[Sight] = []
        warnings: list[str] = []
        for node, found, remarks in self._sights:
            broken = "two attempts in a row ended on it" if node.name in avoided else ""
            if why := broken or left_out(node, spec.placement) or unfit(node, spec, extra):
                warnings.append(f"node {node.name}: left out, {why}")
            elif why := short_of_disk(node, spec, extra):
                warnings.append(f"node {node.name}: left out, {why}")
                short.append((node, found))
            else:
                warnings += remarks
                nodes.append((node, found))
        return Suitable(
            nodes=tuple(nodes), short_of_disk=tuple(short), warnings=tuple(warnings), extra=extra,
            reports_disk=self._reports_disk,
        )  # fmt: skip
