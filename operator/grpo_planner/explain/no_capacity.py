"""Explains why the inventory has no place for a gang, which change would make one, and which
hardware would do.

Where places exist but no plan fits any of them, plan.py explains that with the numbers of the
nearest plan.

A refusal tells what is missing on the available GPUs, but users who rent GPUs ask which ones to
rent. So this module finds the smallest hardware on which the job can be planned. Every answer has
been planned.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from grpo_api.job import GRPOJobSpec
from grpo_api.pods.containers import EPHEMERAL_STORAGE
from grpo_api.spec.run_policy import GPURange, PlacementSpec
from grpo_api.text.quantity import GIB

from ..hardware.inventory import Inventory, Node
from ..hardware.inventory_file import DEFAULT_CPU, DEFAULT_HOST_GIB
from ..hardware.pools import Pool
from ..hardware.products import lookup_product
from ..result.formatting import gib, plural
from ..result.result import Hardware, PlanReason, PlanResult, SpecRejected
from ..search.batch import indivisible, micro_batches
from ..search.demand import Demand
from ..search.methods import methods
from ..search.option import Option
from ..search.search import Search


def disk_shortage_result(demand: Demand, notes: Sequence[str]) -> PlanResult:
    """The explanation where it is the nodes' disks alone that keep the gang away."""
    reasons = "; ".join(note for note in notes if EPHEMERAL_STORAGE in note)
    return PlanResult(
        feasible=False, reason=PlanReason.OUT_OF_EPHEMERAL_STORAGE,
        architecture=demand.model.source,
        message=f"the job would fit, but for the room on nodes' disks: {reasons}",
    )  # fmt: skip


def engine_rejection(demand: Demand, search: Search) -> SpecRejected | None:
    """Why an engine that the spec asks for has no room where the gang has; None where it isn't
    that."""
    pools = [pool for pool in search.pools if pool.gpus >= demand.fewest_gpus]
    if not (pools and search.has_place):
        return None
    servers = demand.spec.generation.engine == "Servers"
    reason = PlanReason.NOT_ENOUGH_GPUS if servers else PlanReason.OUT_OF_DEVICE_MEMORY
    message = search.engines.misfit(pools)
    return SpecRejected(reason, message) if message else None


def place_rejection(demand: Demand, pools: list[Pool], notes: list[str]) -> SpecRejected:
    """Why there is no place at all for a gang of the wanted extent."""
    spec = demand.spec
    reasons = "; ".join(notes)
    of_product = f" of product {spec.placement.gpu_product}" if spec.placement.gpu_product else ""
    if not pools:
        notes_added = f": {reasons}" if reasons else ""
        return SpecRejected(
            PlanReason.NO_GPUS, f"no node has GPUs{of_product} that this job may use{notes_added}"
        )
    most = max(pool.gpus for pool in pools)
    if demand.fewest_gpus > most:
        return SpecRejected(
            PlanReason.NOT_ENOUGH_GPUS,
            f"the job asks for at least {demand.fewest_gpus} GPUs{of_product}; there are at most "
            f"{most} of one kind: "
            "lower spec.placement.gpus.min or spec.placement.nodes",
        )
    if rejected := _indivisible_batch(demand, most):
        return rejected
    if not any(
        demand.precision(method, pool.hardware) for pool in pools for method in methods(spec)
    ):
        return SpecRejected(
            PlanReason.INVALID_COMBINATION,
            "spec.training.dtype bfloat16 needs GPUs of compute capability 8.0 or later, and "
            f"{pools[0].label} is older: set it to Auto",
        )
    where = plural(spec.nodes, "node") if spec.nodes else "any number of nodes"
    return SpecRejected(
        PlanReason.NOT_ENOUGH_GPUS,
        f"a gang of this job doesn't fit on {where} with the same GPU and enough CPU for its pods: "
        "change spec.placement.nodes, spec.placement.gpus or spec.resources.requests.cpu",
    )


def _indivisible_batch(demand: Demand, most: int) -> SpecRejected | None:
    """The refusal where the batch can't be split evenly over any allowed number of up to `most`
    GPUs."""
    spec = demand.spec
    pods = spec.nodes or 1
    # Every pod has the same number of GPUs, so only multiples of the number of pods are allowed.
    fewest = -(-demand.fewest_gpus // pods) * pods
    worlds = range(fewest, min(most, demand.most_gpus or most) + 1, pods)
    if not worlds or any(micro_batches(spec, world) for world in worlds):
        return None
    where = (
        f"{worlds[0]} to {worlds[-1]} GPUs"
        if pods == 1
        else f"as many GPUs on each of {pods} nodes"
    )
    return indivisible(spec, worlds[0], where)


RENTED = (
    "Tesla-T4", "NVIDIA-L4", "NVIDIA-A10G", "NVIDIA-L40S", "NVIDIA-A100-SXM4-40GB",
    "NVIDIA-A100-SXM4-80GB",
    "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200", "NVIDIA-B200",
)  # fmt: skip
"""Products that are looked at: what most clouds have."""
EXTENTS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
"""Nodes and GPUs of each, as they are rented."""

MOST_RENTED = max(nodes * per_node for nodes, per_node in EXTENTS)
"""GPUs of the largest of EXTENTS."""

Planner = Callable[[GRPOJobSpec, Inventory], Option | None]
"""What a spec would be planned as on an inventory; None where nothing fits."""


class _Rented(NamedTuple):
    """Nodes with the same GPUs."""

    memory: int
    """MiB of all GPUs."""
    nodes: int
    per_node: int
    product: str

    @property
    def inventory(self) -> Inventory:
        """They alone, with the host memory and cores that such nodes usually have."""
        host = DEFAULT_HOST_GIB * GIB * self.per_node
        cpu = float(DEFAULT_CPU * self.per_node)
        node = Node(
            gpu_product=self.product, gpus_free=self.per_node, gpus_total=self.per_node,
            host_memory_free=host,
            host_memory_total=host, cpu_free=cpu, cpu_total=cpu, count=self.nodes,
        )  # fmt: skip
        return Inventory((node,))


def smallest_hardware(spec: GRPOJobSpec, plan: Planner) -> Hardware | None:
    """The hardware with the least GPU memory in all that the job fits; None where none of RENTED
    does.

    What spec.placement demands at least stays; its upper bounds and its product are what may have
    to change.
    """
    placed = spec.model_copy(update={"placement": _loosened(spec.placement)})
    by_size = sorted(_rented())
    # The largest has a place for all that the others have one for, and more memory: one plan
    # instead of all of them.
    if plan(placed, by_size[-1].inventory) is None:
        return None
    option = next(filter(None, (plan(placed, rented.inventory) for rented in by_size)))
    return _hardware(option)


def _rented() -> Iterator[_Rented]:
    for product in RENTED:
        for nodes, per_node in EXTENTS:
            yield _Rented(
                lookup_product(product).memory_mib * nodes * per_node, nodes, per_node, product
            )


def _loosened(placement: PlacementSpec) -> PlacementSpec:
    """A placement with the lower bounds of another; the fewest GPUs are wanted."""
    least = placement.gpus.min if placement.gpus else 1
    nodes = None if placement.declared_gpus else placement.nodes
    return PlacementSpec(objective="FewestGPUs", gpus=GPURange(min=least), nodes=nodes)


def _hardware(option: Option) -> Hardware:
    """The place of an option as an answer, with what it needs of it."""
    place = option.place
    footprint = option.footprint
    more = (
        f" and {plural(option.engine_gpus, 'GPU')} more for engines" if option.engine_gpus else ""
    )
    per_gpu = f"{gib(footprint.device)} of {gib(place.pool.usable_bytes)} per GPU"
    per_node = f"{gib(option.host)} of host memory per node"
    message = f"{place.name}{more}, {footprint.method.name}: {per_gpu}, {per_node}"
    return Hardware(
        nodes=place.nodes, gpus_per_node=place.per_node, gpu_product=place.pool.label,
        host_memory_bytes=option.host, message=message,
    )  # fmt: skip
