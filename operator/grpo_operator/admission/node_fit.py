"""Finds the nodes that suit a job's pods in everything but GPUs, memory and cores.

The planner counts GPUs, memory and cores. The user's node affinity and resources such as RDMA cards
are checked here, before a node counts, and regardless of what is free on it. The result is computed
once for all jobs that ask the same of nodes. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.pods.containers import EPHEMERAL_STORAGE
from grpo_api.pods.template import NodeSelectorRequirement, NodeSelectorTerm, is_whole
from grpo_kube.objects.json_reader import JsonObject
from grpo_planner.memory.disk import disk_request, less_disk_message
from grpo_planner.result.formatting import gib

from ..pods.pod_spec import init_container
from .inventory import NODE_PORT, Amounts, Cards, NodeFacts, cards, left_out, pod_requests

CPU, MEMORY = "cpu", "memory"
_COUNTED_BY_PLANNER = (CPU, MEMORY)


def pod_amounts(spec: GRPOJobSpec, plan: ExecutionPlan) -> Amounts:
    """What one pod of a plan takes of its node; the same numbers as in its requests."""
    without_gpus = _requests(spec, spec.container_resources(plan))
    return {**without_gpus, plan.gpu_resource: float(plan.gpus_per_node)}


def pod_limits(spec: GRPOJobSpec, plan: ExecutionPlan) -> Amounts:
    """What one pod of a plan may use at most, as far as it says so, without GPUs."""
    return _amounts(spec, spec.container_resources(plan), "limits")


def amount_message(name: str, amount: float) -> str:
    """An amount of a resource as people write it: `4.1 GiB of ephemeral-storage`, `2 rdma/hca`."""
    is_in_bytes = name in (MEMORY, EPHEMERAL_STORAGE) or name.startswith("hugepages-")
    if is_in_bytes:
        return f"{gib(amount)} of {name}"
    return f"{amount:g} {name}"


def extra_amounts(spec: GRPOJobSpec, *, reports_disk: bool = False) -> Amounts:
    """What one pod takes of its node, whatever the plan, besides what the planner counts.

    `reports_disk`: whether nodes say how much ephemeral storage they have.
    """
    disk = disk_request(spec, reported=reports_disk)
    disk_amount = {EPHEMERAL_STORAGE: str(disk)} if disk else {}
    requests = _requests(spec, spec.resources.manifest(disk_amount))
    return {name: value for name, value in requests.items() if name not in _COUNTED_BY_PLANNER}


def _requests(spec: GRPOJobSpec, trainer: Mapping[str, Any]) -> Amounts:
    """What one pod takes of its node, given the training container's resources."""
    node_port = {NODE_PORT: 1.0} if spec.platform.host_network else {}
    return _amounts(spec, trainer) | node_port


def _amounts(spec: GRPOJobSpec, trainer: Mapping[str, Any], kind: str = "requests") -> Amounts:
    """Requests of the whole pod, or its limits, given the training container's resources."""
    containers = [{"resources": trainer}]
    init_containers = [
        init_container(container, image="") for container in spec.pod_template.spec.init_containers
    ]
    pod = JsonObject({"containers": containers, "initContainers": init_containers})
    return pod_requests(pod, kind)


def has_disk_report(nodes: Iterable[NodeFacts]) -> bool:
    """True if any of the nodes reports its ephemeral storage; a kubelet may be set not to."""
    return any(EPHEMERAL_STORAGE in node.offers for node in nodes)


def unfit(node: NodeFacts, spec: GRPOJobSpec, extra: Amounts) -> str:
    """Why the job's pods can never run on the node, whatever its disk, empty when they can."""
    # What an image of the user's own is built for is not known.
    if spec.image is None and (why := _foreign_architecture(node)):
        return why
    for name, value in extra.items():
        offered = node.offers.get(name, 0.0)
        if offered < value and name != EPHEMERAL_STORAGE:
            offer, request = amount_message(name, offered), amount_message(name, value)
            return f"it offers {offer}, and a pod requests {request}"
    affinity = spec.pod_template.spec.affinity
    wanted = affinity.node_affinity if affinity else None
    required = wanted.required_during_scheduling_ignored_during_execution if wanted else None
    if required is None:
        return ""
    # Terms are alternatives, the requirements in one of them are not (core/v1, NodeSelector).
    if any(_meets(node, term) for term in required.node_selector_terms):
        return ""
    return "no term of podTemplate.spec.affinity.nodeAffinity selects it"


def _foreign_architecture(node: NodeFacts) -> str:
    """Why the trainer's image can't run on the node's CPU; empty if it can, or if that is
    unknown."""
    if not node.architecture or node.architecture in node.image_architectures:
        return ""
    return (
        f"its CPU is {node.architecture}, and the trainer's image is built for "
        f"{', '.join(node.image_architectures)}: set spec.image to an image for it, or build the "
        "trainer's for it, too, and name it in the chart's trainerImage.architectures"
    )


def short_of_disk(node: NodeFacts, spec: GRPOJobSpec, extra: Amounts) -> str:
    """Why the node's disk can never take what a pod writes, empty when it can."""
    offered = node.offers.get(EPHEMERAL_STORAGE, 0.0)
    wanted = extra.get(EPHEMERAL_STORAGE, 0.0)
    if offered >= wanted:
        return ""
    offer = f"it offers {gib(offered)} of {EPHEMERAL_STORAGE}"
    way_out = _way_out(spec)
    return f"{offer}, and a pod requests {gib(wanted)}{way_out}"


def _way_out(spec: GRPOJobSpec) -> str:
    """How the pods would request less of their nodes' disks."""
    if EPHEMERAL_STORAGE in spec.resources.completed_requests:
        return f": lower spec.resources.requests.{EPHEMERAL_STORAGE}"
    way_out = less_disk_message(spec).replace(", or ", ": ", 1)
    if spec.checkpoint.store:
        way_out += (
            f", or set spec.resources.requests.{EPHEMERAL_STORAGE} to less, since ZeRO splits "
            "checkpoints over nodes"
        )
    return way_out


def is_short_of(node: NodeFacts, allocated_resources: Amounts, extra: Amounts) -> bool:
    """True if too little of the extra resources is free on the node now."""
    for name, value in extra.items():
        free = node.offers.get(name, 0.0) - allocated_resources.get(name, 0.0)
        if free < value:
            return True
    return False


def _meets(node: NodeFacts, term: NodeSelectorTerm) -> bool:
    """True if the node meets all of a term; an empty term selects no node."""
    # the only field that the API allows in matchFields
    fields = {"metadata.name": node.name}
    answers = [
        _is_met(expression, node.labels.get(expression.key))
        for expression in term.match_expressions
    ]
    answers += [_is_met(field, fields.get(field.key)) for field in term.match_fields]
    return bool(answers) and all(answers)


def _is_met(requirement: NodeSelectorRequirement, value: str | None) -> bool:
    values = requirement.values
    match requirement.operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return _is_beyond(value, values, above=True)
        case "Lt":
            return _is_beyond(value, values, above=False)


def _is_beyond(value: str | None, bounds: list[str], above: bool) -> bool:
    """Gt and Lt; a label that is not a whole number compares as false, as in the scheduler."""
    if value is None or not is_whole(value):
        return False
    number = int(value)
    bound = int(bounds[0])
    return number > bound if above else number < bound


NodeGPUs = tuple[NodeFacts, tuple[Cards, ...]]
"""A node and the GPUs on it that can be used."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Suitable:
    """The nodes for all specs with the same requirements; compared by identity."""

    nodes: tuple[NodeGPUs, ...]
    short_of_disk: tuple[NodeGPUs, ...]
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
        self._gpu_nodes: list[tuple[NodeFacts, tuple[Cards, ...], list[str]]] = []
        for node in nodes:
            usable, warnings = cards(node)
            if usable or warnings:
                self._gpu_nodes.append((node, tuple(usable), warnings))
        self._cache: dict[str, Suitable] = {}
        self._reports_disk = has_disk_report(node for node, _, _ in self._gpu_nodes)

    def suitable_nodes(
        self, spec: GRPOJobSpec, avoided: Sequence[str] = (), *, disk: bool = True
    ) -> Suitable:
        """The nodes for a spec, without those that its pods are kept away from.

        `disk`: whether the pods write what training does.
        """
        extra = extra_amounts(spec, reports_disk=self._reports_disk and disk)
        affinity = spec.pod_template.spec.affinity
        affinity_key = affinity.model_dump_json() if affinity else ""
        placement_key = spec.placement.model_dump_json(include={"node_selector", "tolerations"})
        amounts_key = sorted(extra.items())
        # All that the answer depends on: jobs that ask the same of nodes share one, and its
        # identity keys other caches.
        own_image = spec.image is not None
        key = f"{placement_key}{affinity_key}{amounts_key}{sorted(avoided)}{own_image}"
        if key not in self._cache:
            self._cache[key] = self._suitable(spec, extra, avoided)
        return self._cache[key]

    def _suitable(self, spec: GRPOJobSpec, extra: Amounts, avoided: Sequence[str]) -> Suitable:
        nodes: list[NodeGPUs] = []
        short: list[NodeGPUs] = []
        warnings: list[str] = []
        for node, node_cards, remarks in self._gpu_nodes:
            suspicion = "an earlier attempt ended or was slow on it" if node.name in avoided else ""
            if why := suspicion or left_out(node, spec.placement) or unfit(node, spec, extra):
                warnings.append(f"node {node.name}: left out, {why}")
            elif why := short_of_disk(node, spec, extra):
                warnings.append(f"node {node.name}: left out, {why}")
                short.append((node, node_cards))
            else:
                warnings += remarks
                nodes.append((node, node_cards))
        return Suitable(
            nodes=tuple(nodes),
            short_of_disk=tuple(short),
            warnings=tuple(warnings),
            extra=extra,
            reports_disk=self._reports_disk,
        )
