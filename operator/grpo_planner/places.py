"""Explains why the inventory has no place for a gang, and what change would make one.

Where places exist and no plan fits any of them, plan.py explains it with the numbers of the nearest plan.
"""

from collections.abc import Sequence

from grpo_api.pods.containers import EPHEMERAL_STORAGE

from .hardware.pools import Pool
from .result import PlanReason, PlanResult, SpecRejected
from .search.batch import indivisible, micro_batches
from .search.demand import Demand
from .search.methods import methods
from .search.search import Search
from .words import plural


def short_of_disk(demand: Demand, notes: Sequence[str]) -> PlanResult:
    """The explanation where it is the nodes' disks alone that keep the gang away."""
    reasons = "; ".join(note for note in notes if EPHEMERAL_STORAGE in note)
    return PlanResult(
        feasible=False, reason=PlanReason.OUT_OF_EPHEMERAL_STORAGE, architecture=demand.model.source,
        message=f"the job would fit, but for the room on nodes' disks: {reasons}",
    )  # fmt: skip


def no_engine(demand: Demand, search: Search) -> SpecRejected | None:
    """Why an engine that the spec asks for has no room where the gang has; None where it isn't that."""
    pools = [pool for pool in search.pools if pool.gpus >= demand.fewest_gpus]
    if not (pools and search.placed):
        return None
    servers = demand.spec.generation.engine == "Servers"
    reason = PlanReason.NOT_ENOUGH_GPUS if servers else PlanReason.OUT_OF_DEVICE_MEMORY
    message = search.engines.misfit(pools)
    return SpecRejected(reason, message) if message else None


def no_place(demand: Demand, pools: list[Pool], notes: list[str]) -> SpecRejected:
    """Why there is no place at all for a gang of the wanted extent."""
    spec, reasons = demand.spec, "; ".join(notes)
    of_product = f" of product {spec.placement.gpu_product}" if spec.placement.gpu_product else ""
    if not pools:
        notes_added = f": {reasons}" if reasons else ""
        return SpecRejected(PlanReason.NO_GPUS, f"no node has GPUs{of_product} that this job may use{notes_added}")
    most = max(pool.gpus for pool in pools)
    if demand.fewest_gpus > most:
        return SpecRejected(
            PlanReason.NOT_ENOUGH_GPUS,
            f"the job asks for at least {demand.fewest_gpus} GPUs{of_product}; there are at most {most} of one kind: "
            "lower spec.placement.gpus.min or spec.placement.nodes",
        )
    if rejected := _indivisible_batch(demand, most):
        return rejected
    if not any(demand.precision(method, pool.hardware) for pool in pools for method in methods(spec)):
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
    """The refusal where the batch can't be split evenly over any allowed number of up to `most` GPUs."""
    spec = demand.spec
    pods = spec.nodes or 1
    # Every pod has the same number of GPUs, so only multiples of the number of pods are allowed.
    fewest = -(-demand.fewest_gpus // pods) * pods
    worlds = range(fewest, min(most, demand.most_gpus or most) + 1, pods)
    if not worlds or any(micro_batches(spec, world) for world in worlds):
        return None
    where = f"{worlds[0]} to {worlds[-1]} GPUs" if pods == 1 else f"as many GPUs on each of {pods} nodes"
    return indivisible(spec, worlds[0], where)
