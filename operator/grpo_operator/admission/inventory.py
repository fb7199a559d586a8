"""Converts nodes and pods, as the API server describes them, into the planner's inventory.

The special cases of GPU nodes are handled only here. They are shared and time-sliced cards, MIG,
labels that contradict what the node offers, missing labels, AMD, cordoned and tainted nodes. Labels
are those of NVIDIA GPU feature discovery, of AMD's node labeller, and of clouds (cloud_labels.py).

Amounts are Kubernetes quantities. What a pod takes of a node is computed here, too, since a pod's
requests are more than the sum of its containers' requests.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from types import MappingProxyType

from grpo_api.spec.run_policy import PlacementSpec, Toleration
from grpo_api.text.contract import (
    GPU_GBPS_LABEL,
    GPU_PRICE_LABEL,
    NODE_GBPS_LABEL,
    PROGRESS_PORT,
)
from grpo_api.text.quantity import parse_quantity
from grpo_kube.objects.json_reader import JsonObject
from grpo_kube.objects.resources import controller_uid
from grpo_planner.hardware.cloud_labels import (
    GKE_MAX_CLIENTS,
    GKE_SHARING,
    CloudGPUs,
    cloud_gpus,
    small_number,
)
from grpo_planner.hardware.inventory import Node
from grpo_planner.hardware.products import is_slice, lookup_product

from ..pods.pod_spec import ARCHITECTURE_LABEL, GPU_TAINTS
from ..records.names import COMPONENT_ENGINE, LABEL_ATTEMPT, LABEL_COMPONENT, LABEL_JOB, LABEL_UID
from ..records.records import ENDED_PHASES

Amounts = dict[str, float]
"""Amounts by resource name: cores for cpu, bytes for memory, pieces for GPUs."""


NODE_PORT = f"port {PROGRESS_PORT} of the node"
"""Counted as a resource of which a node has one: the scheduler binds no two pods with the same port
of a node to it. Those on its network declare it."""


def quantity(value: object) -> float:
    """The number that a resource.Quantity such as `500m` or `16Gi` means; 0 for others."""
    # A stranger's pod may say anything; one quantity that can't be read must not hide what the pod
    # takes besides.
    try:
        return float(parse_quantity(str(value)))
    except ValueError:
        return 0.0


def thousandths(amount: float) -> int:
    """The amount as the scheduler counts cores: sums of floats are off in the last digit."""
    return ceil(round(amount * 1000, 3))


def amounts(part: JsonObject) -> Amounts:
    """A resource list as numbers."""
    return {name: quantity(value) for name, value in part.items()}


def _sum(parts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, value in part.items():
            before = total.get(name, 0.0)
            total[name] = before + value
    return total


def _larger_amounts(first: Amounts, second: Amounts) -> Amounts:
    names = first.keys() | second.keys()
    return {name: max(first.get(name, 0.0), second.get(name, 0.0)) for name in names}


def _resources(container: JsonObject, kind: str) -> Amounts:
    return amounts(container.part("resources").part(kind))


def pod_requests(spec: JsonObject, kind: str = "requests") -> Amounts:
    """Return the requests that the scheduler counts for a pod (kubernetes/enhancements KEP-753 and
    KEP-2837); with `limits` the sums that a quota counts.

    Containers and sidecars run together; an init container runs with the sidecars started before
    it. Requests of the pod as a whole replace the sums; its overhead comes on top.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    # Init containers run one after the other, each beside the sidecars that were started before it.
    # So the peak is the largest of these sums, or that of all containers and sidecars together.
    sidecars: Amounts = {}
    peak: Amounts = {}
    for container in spec.parts("initContainers"):
        beside_sidecars = _sum((sidecars, _resources(container, kind)))
        peak = _larger_amounts(peak, beside_sidecars)
        if container.text("restartPolicy") == "Always":
            sidecars = beside_sidecars
    containers = (_resources(container, kind) for container in spec.parts("containers"))
    together = _sum((sidecars, *containers))
    pod_level = _resources(spec, kind)
    overhead = amounts(spec.part("overhead"))
    without_overhead = _larger_amounts(peak, together) | pod_level
    return _sum((without_overhead, overhead))


def _node_port(spec: JsonObject) -> Amounts:
    """Whether a pod takes NODE_PORT."""
    containers = spec.parts("containers")
    ports = (port for container in containers for port in container.parts("ports"))
    return (
        {NODE_PORT: 1.0} if any(port.integer("hostPort") == PROGRESS_PORT for port in ports) else {}
    )


NVIDIA, AMD = GPU_TAINTS
IMAGE_ARCHITECTURES = ("amd64",)
"""CPU architectures of the trainer's image; the operator's settings may name more."""
MIG_PREFIX = "nvidia.com/mig-"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The fields of a Node that admission reads."""

    name: str
    labels: Mapping[str, str]
    offers: Amounts
    """Allocatable amounts."""
    usable: bool
    """Ready and not cordoned."""
    taints: tuple[tuple[str, str, str], ...]
    """ObjectKey, value and effect of each taint that keeps pods away."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of a GPU hour by product, from the installation; the node's label goes first."""
    architecture: str = ""
    """Architecture of its CPU, such as arm64; empty when unknown."""
    image_architectures: tuple[str, ...] = IMAGE_ARCHITECTURES
    """Architectures that the trainer's image is built for, as the operator was installed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """The resources that a pod which has not ended takes of its node."""

    namespace: str
    name: str
    node: str
    takes: Amounts
    grpojob: str = ""
    grpojob_uid: str = ""
    attempt: str = ""
    engine: bool = False
    """True if it is an engine's."""
    controlled: bool = True
    """True if a Job made it; labels alone may be a stranger's."""

    @property
    def holder(self) -> str:
        """Who it belongs to, for messages: `namespace/GRPOJob`, else `namespace/pod`."""
        return f"{self.namespace}/{self.grpojob or self.name}"


def node_facts(
    item: object,
    prices: Mapping[str, float] = MappingProxyType({}),
    image_architectures: tuple[str, ...] = IMAGE_ARCHITECTURES,
) -> NodeFacts:
    """The facts of a Node object.

    Args:
        item: the object.
        prices: of a GPU for an hour by product.
        image_architectures: what the trainer's image is built for.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    spec = whole.part("spec")
    status = whole.part("status")
    taints = (
        (taint.text("key"), taint.text("value"), taint.text("effect"))
        for taint in spec.parts("taints")
    )
    repelling_taints = tuple(taint for taint in taints if taint[2] != "PreferNoSchedule")
    is_ready = status.condition("Ready").text("status") == "True"
    offers = amounts(status.part("allocatable")) | {NODE_PORT: 1.0}
    labels = meta.string_map("labels")
    architecture = labels.get(ARCHITECTURE_LABEL) or status.part("nodeInfo").text("architecture")
    return NodeFacts(
        name=meta.required_text("name"),
        labels=labels,
        offers=offers,
        usable=is_ready and not spec.is_true("unschedulable"),
        taints=repelling_taints,
        prices=prices,
        architecture=architecture,
        image_architectures=image_architectures,
    )


def pod_facts(item: object) -> PodFacts | None:
    """The facts of a pod that is bound to a node and has not ended (one that is being deleted
    counts), else None.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    spec = whole.part("spec")
    node = spec.text("nodeName")
    if not node:
        return None
    # A pod that is being deleted holds its GPUs until it has ended.
    if whole.part("status").text("phase") in ENDED_PHASES:
        return None
    labels = meta.part("labels")
    is_engine = labels.text(LABEL_COMPONENT) == COMPONENT_ENGINE
    return PodFacts(
        namespace=meta.required_text("namespace"),
        name=meta.required_text("name"),
        node=node,
        takes=pod_requests(spec) | _node_port(spec),
        grpojob=labels.text(LABEL_JOB),
        grpojob_uid=labels.text(LABEL_UID),
        attempt=labels.text(LABEL_ATTEMPT),
        engine=is_engine,
        controlled=bool(controller_uid(meta)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """The usable GPUs of a node, and a sentence for each kind that is not fully usable."""
    usable: list[Cards] = []
    warnings: list[str] = []
    for kind, warning in (*_nvidia(node), *_mig(node), *_amd(node)):
        if kind:
            usable.append(kind)
        if warning:
            warnings.append(f"node {node.name}: {warning}")
    return usable, warnings


Finding = tuple[Cards | None, str]


def _nvidia(node: NodeFacts) -> Iterator[Finding]:
    labels = node.labels
    count = int(node.offers.get(NVIDIA, 0))
    if not count:
        return
    product = labels.get(f"{NVIDIA}.product", "")
    label_count = _number_label(labels, f"{NVIDIA}.count")
    gpus_of_cloud = None if product else cloud_gpus(labels)
    # Of a shared card several pods use the same memory, and a plan's prediction would not hold.
    if _is_shared(labels, product):
        name = product or (gpus_of_cloud.product if gpus_of_cloud else "GPUs")
        yield None, f"its {name} are shared or time-sliced, so their memory can't be counted on"
    # Sharing shows even without its label: the node then offers more than feature discovery has
    # counted.
    elif label_count and count > label_count:
        warning = (
            f"it offers {count} {NVIDIA} but its label counts {label_count}: shared, or of several "
            "products"
        )
        yield None, warning
    elif gpus_of_cloud:
        yield _of_cloud(gpus_of_cloud, count)
    elif not product:
        kind = Cards(resource=NVIDIA, count=count)
        yield (
            kind,
            f"no {NVIDIA}.product label; set placement.gpuMemory, or run GPU feature discovery",
        )
    else:
        memory_mib = _number_label(labels, f"{NVIDIA}.memory")
        selector = ((f"{NVIDIA}.product", product),)
        kind = Cards(
            resource=NVIDIA,
            count=count,
            product=product,
            memory_mib=memory_mib,
            capability=_capability(labels),
            selector=selector,
            sliced="-MIG-" in product,
        )
        yield kind, "" if memory_mib else f"its {NVIDIA}.memory label is missing or 0"


def _of_cloud(gpus: CloudGPUs, count: int) -> Finding:
    """GPUs that the cloud's labels name, since NVIDIA's are missing."""
    if gpus.is_shared or 0 < gpus.count < count:
        label_count = gpus.count or "shared"
        warning = (
            f"it offers {count} {NVIDIA}, and its labels say {label_count} {gpus.product}: shared, "
            "so their memory can't be counted on"
        )
        return None, warning
    kind = Cards(
        resource=NVIDIA,
        count=count,
        product=gpus.product,
        memory_mib=lookup_product(gpus.product).memory_mib,
        selector=gpus.selector,
        sliced=is_slice(gpus.product),
    )
    return kind, ""


def _is_shared(labels: Mapping[str, str], product: str) -> bool:
    # GKE's device plugin shares GPUs without NVIDIA's labels, products outside its table included.
    strategies = (labels.get(f"{NVIDIA}.sharing-strategy"), labels.get(GKE_SHARING))
    has_strategy = any(strategy not in (None, "", "none") for strategy in strategies)
    replicas = max(
        _number_label(labels, f"{NVIDIA}.replicas"), _number_label(labels, GKE_MAX_CLIENTS)
    )
    return has_strategy or replicas > 1 or product.endswith("-SHARED")


def _mig(node: NodeFacts) -> Iterator[Finding]:
    """MIG strategy `mixed`: each profile is a resource of its own."""
    product = node.labels.get(f"{NVIDIA}.product", "")
    for resource, count in sorted(node.offers.items()):
        if resource.startswith(MIG_PREFIX) and count:
            memory_mib = _number_label(node.labels, f"{resource}.memory")
            # The product label names the whole card, so the profile is added:
            # `NVIDIA-A100-SXM4-40GB-MIG-1g.5gb`.
            profile = resource.removeprefix(MIG_PREFIX)
            name = f"{product}-MIG-{profile}".lstrip("-")
            selector = ((f"{NVIDIA}.product", product),) if product else ()
            if _number_label(node.labels, f"{resource}.replicas") > 1:
                yield None, f"its {name} are shared, so their memory can't be counted on"
            else:
                kind = Cards(
                    resource=resource,
                    count=int(count),
                    product=name,
                    memory_mib=memory_mib,
                    capability=_capability(node.labels),
                    selector=selector,
                    sliced=True,
                )
                yield kind, ""


def _amd(node: NodeFacts) -> Iterator[Finding]:
    count = int(node.offers.get(AMD, 0))
    if not count:
        return
    key = _first_set_label(node.labels, f"{AMD}.product-name", "beta.amd.com/gpu.product-name")
    vram_key = _first_set_label(node.labels, f"{AMD}.vram", "beta.amd.com/gpu.vram")
    vram = node.labels[vram_key] if vram_key else ""
    # the labeller writes 192G for 192 GiB
    gibibytes = vram.removesuffix("B").removesuffix("i").removesuffix("G")
    memory_mib = int(quantity(gibibytes or 0) * 1024)
    product = node.labels.get(key, "")
    selector = ((key, product),) if key else ()
    kind = Cards(
        resource=AMD, count=count, product=product, memory_mib=memory_mib, selector=selector
    )
    yield kind, "" if memory_mib else f"no {AMD}.vram label; set placement.gpuMemory"


def _first_set_label(labels: Mapping[str, str], *keys: str) -> str:
    """Return the first of the keys whose label is not empty; empty without one."""
    return next((key for key in keys if labels.get(key)), "")


def _number_label(labels: Mapping[str, str], key: str) -> int:
    return small_number(labels.get(key, ""))


def _amount(labels: Mapping[str, str], key: str) -> float:
    """A label's plain decimal; 0 where it is no decimal, as a label can't be refused."""
    text = labels.get(key, "")
    is_decimal = re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text)
    return float(text) if is_decimal else 0.0


def _capability(labels: Mapping[str, str]) -> tuple[int, int] | None:
    major = labels.get(f"{NVIDIA}.compute.major", "")
    minor = labels.get(f"{NVIDIA}.compute.minor", "")
    if not re.fullmatch("[0-9]{1,3}", major) or not re.fullmatch("[0-9]{1,3}", minor):
        return None
    capability = int(major), int(minor)
    return capability if capability[0] else None


def left_out(node: NodeFacts, placement: PlacementSpec) -> str:
    """Why a job's pods can't be bound to the node; empty when they can."""
    if not node.usable:
        return "not ready or cordoned"
    for label, value in placement.node_selector.items():
        if node.labels.get(label) != value:
            return f"label {label} is not {value}"
    for key, value, effect in node.taints:
        if not _is_tolerated(key, value, effect, placement):
            return f"taint {key}={value}:{effect}"
    return ""


def _is_tolerated(key: str, value: str, effect: str, placement: PlacementSpec) -> bool:
    # As pods/pod_spec.py tolerates them: no pod stays on a node with NoExecute.
    if key in GPU_TAINTS and effect == "NoSchedule":
        return True
    return any(_tolerates(toleration, key, value, effect) for toleration in placement.tolerations)


def _tolerates(toleration: Toleration, key: str, value: str, effect: str) -> bool:
    """True if a toleration matches a taint, as in the scheduler: unset key or effect match all."""
    if toleration.effect not in (None, effect) or toleration.key not in (None, key):
        return False
    if toleration.operator == "Exists":
        return True
    tolerated_value = toleration.value or ""
    return toleration.key == key and tolerated_value == value


def planner_node(node: NodeFacts, kind: Cards, allocated_resources: Amounts) -> Node:
    """The planner's Node for one kind of GPU on a node, less the resources that are taken."""
    total = kind.count
    in_use = int(allocated_resources.get(kind.resource, 0))
    free = max(0, total - in_use)
    if kind.sliced:
        # NCCL can't join two MIG instances of one node, so a pod gets one, and a gang one pod per
        # node.
        total = min(1, total)
        free = min(1, free)
    memory = node.offers.get("memory", 0.0)
    memory_free = max(0.0, memory - allocated_resources.get("memory", 0.0))
    cpu = node.offers.get("cpu", 0.0)
    cpu_free = max(0, thousandths(cpu - allocated_resources.get("cpu", 0.0))) / 1000
    node_gbps = _amount(node.labels, NODE_GBPS_LABEL)
    # NCCL can't join MIG instances of one node, so the label's bandwidth between GPUs is not
    # theirs.
    gpu_gbps = 0.0 if kind.sliced else _amount(node.labels, GPU_GBPS_LABEL)
    default_price = node.prices.get(kind.product, 0.0)
    price = _amount(node.labels, GPU_PRICE_LABEL) or default_price
    return Node(
        name=node.name,
        gpu_product=kind.product,
        gpu_memory_mib=kind.memory_mib,
        gpus_free=free,
        gpus_total=total,
        gpu_resource=kind.resource,
        compute_capability=kind.capability,
        host_memory_free=int(memory_free),
        host_memory_total=int(memory),
        cpu_free=cpu_free,
        cpu_total=cpu,
        node_selector=kind.selector,
        node_gbps=node_gbps,
        gpu_gbps=gpu_gbps,
        gpu_hour_price=price,
    )


def takers(pods: Iterable[PodFacts], resource: str) -> dict[str, int]:
    """Return how many GPUs of a resource each holder has, the largest number first."""
    gpus_by_holder: dict[str, int] = {}
    for pod in pods:
        if count := int(pod.takes.get(resource, 0)):
            before = gpus_by_holder.get(pod.holder, 0)
            gpus_by_holder[pod.holder] = before + count
    biggest_first = sorted(gpus_by_holder.items(), key=lambda pair: (-pair[1], pair[0]))
    return dict(biggest_first)
