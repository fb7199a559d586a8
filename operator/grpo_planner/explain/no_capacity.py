"""Explains why the inventory has no place for a gang, which change would make one, and which
hardware would do.

Where places exist but no plan fits any of them, plan.py explains that with the numbers of the
nearest plan.

A refusal names what is missing on the available GPUs, but users who rent GPUs ask which ones to
rent. So this module finds the smallest hardware on which the job can be planned. Every answer has
been planned.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from grpo_api.job import GRPOJobSpec
from grpo_api.pods.containers import EPHEMERAL_STORAGE, ResourceRequirements
from grpo_api.spec.generation import GenerationSpec
from grpo_api.spec.run_policy import GPURange, PlacementSpec
from grpo_api.text.units import GIB

from ..hardware.inventory import Inventory, Node, allocatable_memory
from ..hardware.inventory_file import DEFAULT_CPU, DEFAULT_HOST_GIB
from ..hardware.pools import Pool
from ..hardware.products import lookup_product
from ..result.formatting import gib, plural
from ..result.result import Change, Fix, Hardware, PlanReason, PlanResult, SpecRejected
from ..search.batch import indivisible, micro_batches
from ..search.demand import Demand
from ..search.engines import settings_of_engines
from ..search.methods import methods
from ..search.option import Option
from ..search.search import Search
from .advice import LONG_STEP

HardwarePlanner = Callable[[GRPOJobSpec], Callable[[Inventory], Search]]
"""What a spec may run as on each of several inventories."""


def refusal(demand: Demand, reason: PlanReason, message: str, **more: Any) -> PlanResult:
    """The answer without a plan."""
    source = demand.model.source
    return PlanResult(feasible=False, reason=reason, message=message, architecture=source, **more)


def disk_shortage_result(demand: Demand, notes: Sequence[str]) -> PlanResult:
    """The explanation where it is the nodes' disks alone that keep the gang away."""
    reasons = "; ".join(note for note in notes if EPHEMERAL_STORAGE in note)
    message = f"the job would fit, but for the room on nodes' disks: {reasons}"
    return refusal(demand, PlanReason.OUT_OF_EPHEMERAL_STORAGE, message)


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


def is_without_engine_for_experts(demand: Demand) -> bool:
    """True where an engine may sample and the model has experts: no engine's can be proven yet."""
    engine = demand.spec.generation.engine
    return bool(demand.shape.experts) and engine == "Auto" and not demand.has_given_up_engine


def without_engine(spec: GRPOJobSpec) -> GRPOJobSpec:
    """The spec with Transformers in place of an engine, and without an engine's settings."""
    return spec.model_copy(update={"generation": GenerationSpec(engine="Transformers")})


def experts_result(demand: Demand, planner: HardwarePlanner) -> PlanResult:
    """The refusal of a mixture of experts, which the user may overrule: without an engine such a
    model takes many times as long as with one.

    It names the smallest hardware on which that is bearable: what was asked for is trained, its
    optimizer on the GPUs, in steps of minutes.
    """
    spec = without_engine(demand.spec)
    hardware = smallest_hardware(spec, planner, without_offload=True)
    bearable = f"steps below {round(LONG_STEP / 60)} minutes without offload"
    if hardware:
        place = f"{hardware.nodes * hardware.gpus_per_node} x {hardware.gpu_product}"
        least = f"the smallest hardware with {bearable} is {place}"
    else:
        least = f"no hardware of up to {MOST_RENTED} GPUs has {bearable}"
    path, engine = "spec.generation.engine", "Transformers"
    removed = settings_of_engines(demand.spec)
    way = " and ".join([f"set {path} to {engine}", *(f"remove {other}" for other in removed)])
    message = (
        f"no engine can serve {demand.spec.model.name}: in vLLM the weights of its "
        f"{demand.shape.experts} experts per layer can't be proven yet. Without one, {least}; "
        f"{way} to train so"
    )
    changes = [*(Change(path=other, value="null") for other in removed)]
    changes.append(Change(path=path, value=engine))
    fix = Fix(changes=changes, message=f"{way} (generates many times slower)")
    reason = PlanReason.INVALID_COMBINATION
    return refusal(demand, reason, message, fixes=[fix], hardware=hardware)


def place_rejection(demand: Demand, pools: list[Pool], notes: list[str]) -> SpecRejected:
    """Why there is no place at all for a gang of the wanted extent."""
    spec = demand.spec
    reasons = "; ".join(notes)
    product = spec.placement.gpu_product
    of_product = f" of product {product}" if product else ""
    if not pools:
        because = f": {reasons}" if reasons else ""
        message = f"no node has GPUs{of_product} that this job may use{because}"
        return SpecRejected(PlanReason.NO_GPUS, message)
    most = max(pool.gpus for pool in pools)
    if demand.fewest_gpus > most:
        message = (
            f"the job asks for at least {demand.fewest_gpus} GPUs{of_product}; there are at most "
            f"{most} of one kind: lower spec.placement.gpus.min or spec.placement.nodes"
        )
        return SpecRejected(PlanReason.NOT_ENOUGH_GPUS, message)
    if rejection := _indivisible_batch(demand, most):
        return rejection
    precisions = (
        demand.precision(method, pool.hardware) for pool in pools for method in methods(spec)
    )
    if not any(precisions):
        message = (
            "spec.training.dtype bfloat16 needs GPUs of compute capability 8.0 or later, and "
            f"{pools[0].label} is older: set it to Auto"
        )
        return SpecRejected(PlanReason.INVALID_COMBINATION, message)
    where = plural(spec.nodes, "node") if spec.nodes else "any number of nodes"
    message = (
        f"a gang of this job doesn't fit on {where} with the same GPU, as many for every pod, and "
        "enough CPU: change spec.placement.nodes, spec.placement.gpus or "
        "spec.resources.requests.cpu"
    )
    return SpecRejected(PlanReason.NOT_ENOUGH_GPUS, message)


def _indivisible_batch(demand: Demand, most: int) -> SpecRejected | None:
    """The refusal where the batch can't be split evenly over any allowed number of up to `most`
    GPUs."""
    spec = demand.spec
    pods = spec.nodes or 1
    # Every pod has the same number of GPUs, so only multiples of the number of pods are allowed.
    fewest_per_pod = -(-demand.fewest_gpus // pods)
    largest = min(most, demand.most_gpus or most)
    worlds = range(fewest_per_pod * pods, largest + 1, pods)
    if not worlds or any(micro_batches(spec, world) for world in worlds):
        return None
    where = f"as many GPUs on each of {pods} nodes"
    if pods == 1:
        most_gpus = plural(worlds[-1], "GPU")
        where = most_gpus if len(worlds) == 1 else f"{worlds[0]} to {most_gpus}"
    return indivisible(spec, worlds[0], where)


RENTED = (
    "Tesla-T4", "NVIDIA-L4", "NVIDIA-A10G", "NVIDIA-L40S", "NVIDIA-A100-SXM4-40GB",
    "NVIDIA-A100-SXM4-80GB",
    "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200", "NVIDIA-B200",
)  # fmt: skip
"""Products that are tried: what most clouds have."""
EXTENTS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
"""Nodes and GPUs of each, as they are rented."""

MOST_RENTED = max(nodes * per_node for nodes, per_node in EXTENTS)
"""GPUs of the largest of EXTENTS."""


class _RentedGpus(NamedTuple):
    """Nodes with the same GPUs."""

    memory: int
    """MiB of all GPUs."""
    nodes: int
    per_node: int
    product: str

    @property
    def inventory(self) -> Inventory:
        """They alone, with the host memory and cores that such nodes usually have."""
        node = Node(
            gpu_product=self.product,
            gpus_total=self.per_node,
            host_memory_total=allocatable_memory(DEFAULT_HOST_GIB * GIB * self.per_node),
            cpu_total=float(DEFAULT_CPU * self.per_node),
            count=self.nodes,
        )
        return Inventory((node.without_usage,))


def smallest_hardware(
    spec: GRPOJobSpec, planner: HardwarePlanner, *, without_offload: bool = False
) -> Hardware | None:
    """Return the hardware of RENTED with the least GPU memory in all that `planner` finds a plan
    on. Plans without long steps go before all others in time. None where RENTED has no plan.

    What spec.placement demands at least stays; its upper bounds and its product are what may have
    to change. `without_offload`: steps must not be long, and the optimizer stays on the GPUs.
    """
    search = planner(spec.model_copy(update={"placement": _lower_bounds(spec.placement)}))
    *smaller, last_rented = sorted(_rented_gpus())
    largest = search(last_rented.inventory)
    limits = [LONG_STEP] if without_offload else [LONG_STEP, largest.most_seconds]
    for limit in limits:
        # Who rents for a plan should not find that it was a little too small.
        on_largest = largest.roomy_choice(limit, without_offload=without_offload)
        # The largest has a place for all that the others have one for, and more memory: one plan
        # instead of all of them.
        if on_largest is None:
            continue
        searches = (search(rented.inventory) for rented in smaller)
        choices = (
            smaller_search.roomy_choice(limit, without_offload=without_offload)
            for smaller_search in searches
        )
        return _hardware(next(filter(None, choices), on_largest))
    return None


def without_size(spec: GRPOJobSpec) -> GRPOJobSpec:
    """The spec without what it demands of the number and the size of nodes."""
    return spec.model_copy(
        update={"placement": PlacementSpec(), "resources": ResourceRequirements()}
    )


def _rented_gpus() -> Iterator[_RentedGpus]:
    for product in RENTED:
        memory_mib = lookup_product(product).memory_mib
        for nodes, per_node in EXTENTS:
            yield _RentedGpus(memory_mib * nodes * per_node, nodes, per_node, product)


def _lower_bounds(placement: PlacementSpec) -> PlacementSpec:
    """A placement with the lower bounds of another."""
    fewest = placement.gpus.min if placement.gpus else 1
    gpus = GPURange(min=fewest)
    nodes = None if placement.declared_gpus else placement.nodes
    return PlacementSpec(gpus=gpus, nodes=nodes)


def _hardware(option: Option) -> Hardware:
    """The place of an option as an answer, with what it needs of it and how long a step takes."""
    place = option.place
    footprint = option.footprint
    for_engines = ""
    if option.engine_gpus:
        engine_gpus = plural(option.engine_gpus, "GPU")
        for_engines = f" and {engine_gpus} more for engines"
    usable = gib(place.pool.usable_bytes)
    per_gpu = f"{gib(footprint.device)} of {usable} per GPU"
    per_node = f"{gib(option.host)} of host memory per node"
    needs = f"{per_gpu}, {per_node}, {option.seconds:.0f} s per step"
    message = f"{place.name}{for_engines}, {footprint.method.name}: {needs}"
    return Hardware(
        nodes=place.nodes,
        gpus_per_node=place.per_node,
        gpu_product=place.pool.label,
        host_memory_bytes=option.host,
        message=message,
    )
