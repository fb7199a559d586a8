"""plan_job: the planner's front door, from a spec and an inventory to a PlanResult.

Exists to bring the parts together and to turn a refusal into an answer. Called by the operator before each attempt
and by `grpo plan`.
"""

from collections.abc import Mapping
from typing import Any

from grpo_api.job import GRPOJobSpec

from . import explain
from .cpu import plan_cpu
from .fixes import find_fixes
from .hardware.inventory import Inventory
from .hardware.pools import Pool, build_pools
from .memory import Predictor
from .model.architecture import Resolved, resolve
from .result import Candidate, Fix, PlanReason, PlanRefused, PlanResult
from .search.batch import micro_batches, refuse_split
from .search.demand import MOST_SEQUENCES, Demand, build_demand, methods, refuse_pins
from .search.footprints import Needs
from .search.search import Option, Search, choose, closest_miss, notable
from .words import gib, plural


def plan_job(spec: GRPOJobSpec, inventory: Inventory, *, config: Mapping[str, Any] | None = None) -> PlanResult:
    """How to run a job on these nodes, or why not. Deterministic: the same arguments give the same bytes.

    Args:
        spec: the job.
        inventory: nodes that its pods may be bound to.
        config: the model's config.json, where the caller could read it.
    """
    try:
        resolved = resolve(spec.model, config)
        demand = build_demand(spec, resolved)
        if spec.placement.accelerator == "CPU":
            return _plan_cpu(demand)
        return _plan_gpu(demand, inventory)
    except PlanRefused as refused:
        return PlanResult(feasible=False, reason=refused.reason, message=str(refused))


def _plan_cpu(demand: Demand) -> PlanResult:
    """A CPU job: one plan, no search."""
    chosen = plan_cpu(demand)
    return PlanResult(
        feasible=True, fits_now=True, reason=PlanReason.PLANNED, message=chosen.reason, chosen=chosen,
        candidates=[Candidate.of(chosen)], changes=chosen.changes, architecture=chosen.architecture,
    )  # fmt: skip


def _plan_gpu(demand: Demand, inventory: Inventory) -> PlanResult:
    """A GPU job: on the GPUs that are free, else on those that will be, else an explanation."""
    if not methods(demand.spec):
        raise refuse_pins(demand.spec)
    pools, left_out = build_pools(inventory, demand.spec.placement)
    notes = [*inventory.warnings, *left_out]
    needs = Needs(demand, Predictor(demand.shape, demand.reward_bytes))
    free = Search(needs, pools)
    if inventory.visible and free.feasible:
        return _planned(demand, free, notes, fits_now=True)
    emptied, _ = build_pools(inventory, demand.spec.placement, emptied=True)
    search = Search(needs, emptied)
    if search.feasible:
        return _planned(demand, search, notes, fits_now=not inventory.visible)
    options = search.families()
    if not options:
        refused = _no_layout(demand, emptied, notes)
        fixes = _fixes(needs, inventory, emptied)
        return PlanResult(
            feasible=False, reason=refused.reason, message=str(refused), fixes=fixes, architecture=demand.source
        )
    return _nothing_fits(demand, options, _fixes(needs, inventory, emptied))


def _planned(demand: Demand, search: Search, notes: list[str], fits_now: bool) -> PlanResult:
    """The result of a search that something fits."""
    found = search.families()
    chosen = choose(found, demand.spec.placement.objective)
    assert chosen is not None, "something fits"
    others = [option for option in found if option.method != chosen.method or option.pool is not chosen.pool]
    options = others + search.extents(chosen)
    reason = explain.reason(chosen)
    plan = explain.as_plan(demand, chosen, reason, [*explain.warnings(demand, chosen), *notes])
    ranked = explain.candidates(demand, notable(options, chosen), chosen)
    message = reason
    if not fits_now:
        free = f"{chosen.layout.world} x {chosen.pool.label or chosen.pool.resource}"
        message = f"needs {free} on {plural(chosen.layout.nodes, 'node')}, which are taken now; {reason}"
    return PlanResult(
        feasible=True, fits_now=fits_now, reason=PlanReason.PLANNED if fits_now else PlanReason.WAITING_FOR_GPUS,
        message=message, chosen=plan, candidates=[Candidate.of(plan), *ranked[1:]], changes=plan.changes,
        architecture=demand.source,
    )  # fmt: skip


def _nothing_fits(demand: Demand, options: list[Option], fixes: list[Fix]) -> PlanResult:
    """The refusal of a job that no candidate fits, with what is missing and what would help."""
    nearest = closest_miss(options)
    assert nearest is not None, "there are options"
    phase = nearest.prediction.peak_phase
    if nearest.shortage == "HostMemory":
        reason = PlanReason.OUT_OF_HOST_MEMORY
        numbers = f"{gib(nearest.host)} of host memory per node, {gib(nearest.host_room)} are there"
    else:
        reason = PlanReason.OUT_OF_DEVICE_MEMORY
        numbers = f"{gib(nearest.device)} per GPU at {phase}, {gib(nearest.pool.usable)} are usable"
    if any(fix.path == "spec.adapter.use" for fix in fixes):
        reason = PlanReason.ONLY_ADAPTER_FITS
    message = f"nothing fits; the nearest, {nearest.method.name} on {explain.gpus(nearest)}, needs {numbers}"
    if fixes:
        message += "; would fit: " + "; or ".join(fix.message for fix in fixes)
    ranked = explain.candidates(demand, notable(options, None), None)
    return PlanResult(
        feasible=False, reason=reason, message=message, candidates=ranked, fixes=fixes, architecture=demand.source,
    )  # fmt: skip


def _fixes(needs: Needs, inventory: Inventory, pools: list[Pool]) -> list[Fix]:
    """Changes of the spec that lead to a plan on the emptied nodes."""
    demand = needs.demand
    resolved = Resolved(demand.shape, demand.source)

    def attempt(spec: GRPOJobSpec) -> Option | None:
        there = pools
        if spec.placement.gpu_product != demand.spec.placement.gpu_product:
            there, _ = build_pools(inventory, spec.placement, emptied=True)
        changed = Needs(build_demand(spec, resolved), needs.predictor)
        return choose(Search(changed, there).fitting(), spec.placement.objective)

    return find_fixes(demand.spec, pools, attempt)


def _no_layout(demand: Demand, pools: list[Pool], notes: list[str]) -> PlanRefused:
    """The refusal when no gang of the wanted extent exists."""
    spec, said = demand.spec, "; ".join(notes)
    wanted = f" of product {spec.placement.gpu_product}" if spec.placement.gpu_product else ""
    if not pools:
        return PlanRefused(
            PlanReason.NO_GPUS, f"no node has GPUs{wanted} that this job may use" + (f": {said}" if said else "")
        )
    most = max(pool.gpus for pool in pools)
    if demand.fewest_gpus > most:
        return PlanRefused(
            PlanReason.NOT_ENOUGH_GPUS,
            f"the job asks for at least {demand.fewest_gpus} GPUs{wanted}; the largest group of alike GPUs has {most}: "
            "lower spec.placement.gpus.min or spec.placement.nodes",
        )
    pods = spec.placement.nodes or 1
    worlds = range(-(-demand.fewest_gpus // pods) * pods, min(most, demand.most_gpus or most) + 1, pods)
    if worlds and not any(micro_batches(spec, world, MOST_SEQUENCES) for world in worlds):
        where = f"{worlds[0]} to {worlds[-1]} GPUs" if pods == 1 else f"as many GPUs on each of {pods} nodes"
        return refuse_split(spec, worlds[0], where)
    if not any(demand.precision(method, pool.hardware) for pool in pools for method in methods(spec)):
        return PlanRefused(
            PlanReason.INVALID_COMBINATION,
            f"spec.training.dtype bfloat16 needs GPUs of compute capability 8.0 or later; {pools[0].label} has none: "
            "set it to Auto",
        )
    return PlanRefused(
        PlanReason.NOT_ENOUGH_GPUS,
        f"no {plural(spec.placement.nodes or 1, 'node')} with alike GPUs, and enough CPU for its pods, can "
        "hold a gang of this job: change spec.placement.nodes, gpus or cpu",
    )
