"""Nodes and pods as the API server describes them → what the planner takes.

Exists to keep the traps of GPU nodes in one place: shared and time-sliced cards, MIG, labels that disagree with what
the node offers, missing labels, AMD, cordoned and tainted nodes. Pure. Used by snapshot (facts) and board (inventory).
Labels are those of NVIDIA GPU feature discovery and of AMD's node labeller.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_api.running import PlacementSpec
from grpo_planner import Node

from ..names import LABEL_ATTEMPT, LABEL_JOB, LABEL_UID
from ..podspec import GPU_TAINTS
from .resources import Amounts, amounts, pod_requests, quantity

NVIDIA, AMD = GPU_TAINTS
MIG_PREFIX = "nvidia.com/mig-"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What matters of a Node."""

    name: str
    labels: Mapping[str, str]
    offers: Amounts
    """Allocatable amounts."""
    usable: bool
    """Ready and not cordoned."""
    taints: tuple[tuple[str, str, str], ...]
    """Key, value and effect of each taint that keeps pods away."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What a pod that has not ended takes of its node."""

    namespace: str
    name: str
    node: str
    takes: Amounts
    grpojob: str = ""
    grpojob_uid: str = ""
    attempt: str = ""

    @property
    def holder(self) -> str:
        """Who it belongs to, for messages: `namespace/GRPOJob`, else `namespace/pod`."""
        return f"{self.namespace}/{self.grpojob or self.name}"


def node_facts(item: Mapping[str, Any]) -> NodeFacts:
    """The facts of a Node object."""
    spec, status = item.get("spec") or {}, item.get("status") or {}
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
    taints = ((t["key"], t.get("value") or "", t["effect"]) for t in spec.get("taints") or ())
    return NodeFacts(
        name=item["metadata"]["name"],
        labels=item["metadata"].get("labels") or {},
        offers=amounts(status.get("allocatable")),
        usable=ready and not spec.get("unschedulable"),
        taints=tuple(taint for taint in taints if taint[2] != "PreferNoSchedule"),
    )


def pod_facts(item: Mapping[str, Any]) -> PodFacts | None:
    """The facts of a pod that is bound to a node and has not ended (one that is being deleted counts), else None."""
    meta, spec = item["metadata"], item["spec"]
    if not spec.get("nodeName") or (item.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    labels = meta.get("labels") or {}
    return PodFacts(
        namespace=meta["namespace"],
        name=meta["name"],
        node=spec["nodeName"],
        takes=pod_requests(spec),
        grpojob=labels.get(LABEL_JOB, ""),
        grpojob_uid=labels.get(LABEL_UID, ""),
        attempt=labels.get(LABEL_ATTEMPT, ""),
    )


@dataclass(frozen=True, slots=True)
class Cards:
    """The GPUs of one kind on a node."""

    resource: str
    count: int
    product: str = ""
    memory_mib: int = 0
    capability: tuple[int, int] | None = None
    selector: tuple[tuple[str, str], ...] = ()
    sliced: bool = False
    """MIG instances: NCCL can't join two of one node, so a pod takes one."""


def cards(node: NodeFacts) -> tuple[list[Cards], list[str]]:
    """The usable GPUs of a node, and a sentence for each kind that is left out or known in part only."""
    found: list[Cards] = []
    warnings: list[str] = []
    for kind, warning in (*_nvidia(node), *_mig(node), *_amd(node)):
        if kind:
            found.append(kind)
        if warning:
            warnings.append(f"node {node.name}: {warning}")
    return found, warnings


Finding = tuple[Cards | None, str]


def _nvidia(node: NodeFacts) -> Iterator[Finding]:
    labels, count = node.labels, int(node.offers.get(NVIDIA, 0))
    if not count:
        return
    product, counted = labels.get(f"{NVIDIA}.product", ""), _whole(labels, f"{NVIDIA}.count")
    if _shared(labels, product):
        yield None, f"its {product or 'GPUs'} are shared or time-sliced, so their memory can't be counted on"
    elif counted and count > counted:
        yield None, f"it offers {count} {NVIDIA} but its label counts {counted}: shared, or of several products"
    elif not product:
        yield Cards(NVIDIA, count), f"no {NVIDIA}.product label; set placement.gpuMemory, or run GPU feature discovery"
    else:
        memory = _whole(labels, f"{NVIDIA}.memory")
        kind = Cards(
            resource=NVIDIA,
            count=count,
            product=product,
            memory_mib=memory,
            capability=_capability(labels),
            selector=((f"{NVIDIA}.product", product),),
            sliced="-MIG-" in product,
        )
        yield kind, "" if memory else f"its {NVIDIA}.memory label is missing or 0"


def _shared(labels: Mapping[str, str], product: str) -> bool:
    strategy = labels.get(f"{NVIDIA}.sharing-strategy", "none")
    return strategy not in ("", "none") or _whole(labels, f"{NVIDIA}.replicas") > 1 or product.endswith("-SHARED")


def _mig(node: NodeFacts) -> Iterator[Finding]:
    """MIG strategy `mixed`: each profile is a resource of its own."""
    product = node.labels.get(f"{NVIDIA}.product", "")
    for resource, count in sorted(node.offers.items()):
        if resource.startswith(MIG_PREFIX) and count:
            memory = _whole(node.labels, f"{resource}.memory")
            name = f"{product}-MIG-{resource.removeprefix(MIG_PREFIX)}".lstrip("-")
            selector = ((f"{NVIDIA}.product", product),) if product else ()
            if _whole(node.labels, f"{resource}.replicas") > 1:
                yield None, f"its {name} are shared, so their memory can't be counted on"
            else:
                yield Cards(resource, int(count), name, memory, _capability(node.labels), selector, sliced=True), ""


def _amd(node: NodeFacts) -> Iterator[Finding]:
    count = int(node.offers.get(AMD, 0))
    if not count:
        return
    key = next((k for k in (f"{AMD}.product-name", "beta.amd.com/gpu.product-name") if node.labels.get(k)), "")
    vram = next((node.labels[k] for k in (f"{AMD}.vram", "beta.amd.com/gpu.vram") if node.labels.get(k)), "")
    # the labeller writes 192G for 192 GiB
    memory = int(quantity(vram.removesuffix("B").removesuffix("i").removesuffix("G") or 0) * 1024)
    selector = ((key, node.labels[key]),) if key else ()
    warning = "" if memory else f"no {AMD}.vram label; set placement.gpuMemory"
    yield Cards(AMD, count, node.labels.get(key, ""), memory, None, selector), warning


def _whole(labels: Mapping[str, str], key: str) -> int:
    text = labels.get(key, "")
    return int(text) if text.isdecimal() else 0


def _capability(labels: Mapping[str, str]) -> tuple[int, int] | None:
    major = _whole(labels, f"{NVIDIA}.compute.major")
    return (major, _whole(labels, f"{NVIDIA}.compute.minor")) if major else None


def left_out(node: NodeFacts, placement: PlacementSpec) -> str:
    """Why a job's pods can't be bound to the node; empty when they can."""
    if not node.usable:
        return "not ready or cordoned"
    for label, value in placement.node_selector.items():
        if node.labels.get(label) != value:
            return f"label {label} is not {value}"
    return next((f"taint {key}={value}:{effect}" for key, value, effect in node.taints
                 if not _tolerated(key, value, effect, placement)), "")  # fmt: skip


def _tolerated(key: str, value: str, effect: str, placement: PlacementSpec) -> bool:
    if key in GPU_TAINTS:
        return True
    return any(
        (one.effect in (None, effect))
        and (one.key in (None, key))
        and (one.operator == "Exists" or (one.key == key and (one.value or "") == value))
        for one in placement.tolerations
    )


def planner_node(node: NodeFacts, kind: Cards, taken: Amounts) -> Node:
    """What the planner sees of one kind of GPU on a node, given what is taken of the node."""
    total = kind.count
    free = max(0, total - int(taken.get(kind.resource, 0)))
    if kind.sliced:
        total, free = min(1, total), min(1, free)
    memory, cpu = node.offers.get("memory", 0.0), node.offers.get("cpu", 0.0)
    return Node(
        name=node.name,
        gpu_product=kind.product,
        gpu_memory_mib=kind.memory_mib,
        gpus_free=free,
        gpus_total=total,
        gpu_resource=kind.resource,
        compute_capability=kind.capability,
        host_memory_free=int(max(0.0, memory - taken.get("memory", 0.0))),
        host_memory_total=int(memory),
        cpu_free=max(0.0, cpu - taken.get("cpu", 0.0)),
        cpu_total=cpu,
        node_selector=kind.selector,
    )


def takers(pods: Iterable[PodFacts], resource: str) -> dict[str, int]:
    """How many GPUs of a resource each holder has, the biggest first."""
    held: dict[str, int] = {}
    for pod in pods:
        if count := int(pod.takes.get(resource, 0)):
            held[pod.holder] = held.get(pod.holder, 0) + count
    return dict(sorted(held.items(), key=lambda pair: (-pair[1], pair[0])))
