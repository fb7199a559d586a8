"""plan_job: the planner's front door, from a spec and an inventory to a PlanResult.

It brings the rooms together, and turns everything that can go wrong into an answer with a reason
and a way out.
"""

from collections.abc import Callable, Iterator
from functools import cached_property

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned
from grpo_api.spec.run_policy import PlacementSpec
from grpo_api.text.timing import DAY, HOUR

from .explain import explain
from .explain.advice import advice
from .explain.explain import sampling_message
from .explain.fixes import ACCESS_MODE, find_faster, find_fixes
from .explain.no_capacity import (
    MOST_RENTED,
    HardwarePlanner,
    disk_shortage_result,
    engine_rejection,
    experts_result,
    is_without_engine_for_experts,
    place_rejection,
    refusal,
    smallest_hardware,
    without_engine,
    without_size,
)
from .hardware.inventory import Inventory, declared_inventory
from .hardware.inventory_file import DEFAULT_HOST_GIB
from .hardware.pools import UNPRICED, Pool, build_pools
from .hardware.products import is_of_product
from .memory.disk import disk_request
from .memory.phases import Predictor
from .model.architecture import NOTHING, ModelFacts, resolve_model
from .result.formatting import distinct, distinct_gib
from .result.result import Candidate, Fix, Hardware, PlanReason, PlanResult, SpecRejected
from .search.cpu_plan import plan_cpu
from .search.demand import Demand, build_demand, refuse_long_sequences
from .search.engines import check, server_pools
from .search.footprints import Footprints
from .search.methods import conflicting_pins, methods
from .search.option import Option, missing_shares, notable
from .search.scaling_curve import Size, curve, deciding_rule
from .search.search import LONGEST_RUN, LONGEST_STEP, Search
from .time.measured_runs import NO_RUNS, MeasuredRuns
from .time.step_time import with_measured_links

LACKS_HARDWARE = (
    PlanReason.NO_GPUS, PlanReason.NOT_ENOUGH_GPUS, PlanReason.OUT_OF_DEVICE_MEMORY,
    PlanReason.OUT_OF_HOST_MEMORY,
    PlanReason.ONLY_ADAPTER_FITS,
)  # fmt: skip
"""Reasons for which other hardware may help."""


def plan_job(
    spec: GRPOJobSpec,
    inventory: Inventory,
    *,
    facts: ModelFacts = NOTHING,
    learned: Learned | None = None,
    measured: MeasuredRuns = NO_RUNS,
) -> PlanResult:
    """How to run a job on these nodes, or why not. Deterministic: the same arguments give the same
    bytes.

    The pods may be bound to all nodes of the inventory. `facts`: what the caller knows of the model
    beside the spec; `learned`: what earlier attempts of the job found.
    """
    return Planner(spec, facts=facts, learned=learned, measured=measured).plan(inventory)


class Planner:
    """Plans one job on one inventory after another; what depends on the job alone is worked out
    once."""

    def __init__(
        self,
        spec: GRPOJobSpec,
        *,
        facts: ModelFacts = NOTHING,
        brief: bool = False,
        learned: Learned | None = None,
        measured: MeasuredRuns = NO_RUNS,
    ) -> None:
        """Takes what plan_job takes, less the inventory; works nothing out yet.

        `brief`: the chosen plan alone, not what it was compared with. That is most of the work and
        nearly all of what an answer weighs.
        """
        self._spec = spec
        self._facts = facts
        self._brief = brief
        self._learned = learned
        self._measured = measured
        self._waiting: dict[Inventory, PlanResult] = {}

    def has_planned_by(self, measured: MeasuredRuns) -> bool:
        """Return True if these rows have the same of its model as those that it plans by."""
        if measured.rows is self._measured.rows:
            return True
        try:
            demand = self._demand
        except SpecRejected:
            return True
        shape = demand.shape
        of_model = measured.of_model(shape.parameters, shape.active_parameters)
        if of_model.rows != demand.measured.rows:
            return False
        self._measured = measured
        return True

    def plan(self, inventory: Inventory) -> PlanResult:
        """What plan_job answers, byte for byte; a brief one is without candidates."""
        try:
            policy = self._demand.shape
            disk_bytes = disk_request(self._spec, reported=inventory.reports_disk, policy=policy)
            result = self._plan(inventory)
            return result.with_disk_request(disk_bytes)
        except SpecRejected as rejection:
            return PlanResult(feasible=False, reason=rejection.reason, message=str(rejection))

    def _plan(self, inventory: Inventory) -> PlanResult:
        """The plan without the pods' requests of their nodes' disks."""
        if self._spec.placement.accelerator == "CPU":
            return _plan_cpu(self._demand)
        inventory = self._usable(inventory)
        if is_without_engine_for_experts(self._demand):
            return self._refuse_experts_on(inventory)
        result = self._on_free(inventory)
        return result or self._on_emptied(_emptied_nodes(inventory))

    @cached_property
    def _refuse_experts(self) -> PlanResult:
        return experts_result(self._demand, _planner_elsewhere(self._footprints))

    def _refuse_experts_on(self, inventory: Inventory) -> PlanResult:
        """The refusal, with its fix where that has a plan on these nodes."""
        planner = _planner_elsewhere(self._footprints)(without_engine(self._spec))
        if planner(_emptied_nodes(inventory)).choice:
            return self._refuse_experts
        # The way out is the last part of the message.
        message, _, _ = self._refuse_experts.message.rpartition("; ")
        message += "; these nodes have no plan without one either"
        return self._refuse_experts.model_copy(update={"fixes": [], "message": message})

    def curve(self, inventory: Inventory) -> list[Size]:
        """What every number of GPUs would give on these nodes were they empty, fewest first; []
        where nothing fits.

        Raises:
            SpecRejected: the spec can't be planned at all.
        """
        emptied = _emptied_nodes(self._usable(inventory))
        search, _ = _search(self._footprints, emptied)
        return curve(search)

    def _usable(self, inventory: Inventory) -> Inventory:
        """The nodes, or those that the spec declares, with the links that were measured."""
        if self._spec.placement.provisioning == "CreatePods":
            inventory = declared_inventory(self._spec.placement)
        if self._learned is None:
            return inventory
        return with_measured_links(inventory, self._learned.links)

    @cached_property
    def _demand(self) -> Demand:
        reported = self._learned.architecture if self._learned else None
        model = resolve_model(self._spec.model, self._facts, reported)
        measured = self._measured.of_model(model.shape.parameters, model.shape.active_parameters)
        demand = build_demand(self._spec, model, self._learned, measured)
        refuse_long_sequences(demand)
        return demand

    @cached_property
    def _footprints(self) -> Footprints:
        if not methods(self._spec):
            raise conflicting_pins(self._spec)
        demand = self._demand
        check(demand)
        predictor = Predictor(demand.shape, demand.resident_bytes)
        return Footprints(demand, predictor)

    def _on_free(self, inventory: Inventory) -> PlanResult | None:
        """The plan on what is free; None when nothing fits there, or what is free is unknown."""
        if not inventory.visible:
            return None
        search, left_out = _search(self._footprints, inventory)
        if not search.is_feasible or search.choice is None:
            return None
        notes = [*inventory.assumptions, *inventory.warnings, *left_out]
        return self._answer(search, search.choice, notes, fits_now=True)

    def _on_emptied(self, emptied: Inventory) -> PlanResult:
        """The plan on what will be free, else an explanation; the same for as long as the nodes are
        the same."""
        if emptied not in self._waiting:
            self._waiting = {emptied: self._plan_emptied(emptied)}
        return self._waiting[emptied]

    def _plan_emptied(self, emptied: Inventory) -> PlanResult:
        search, left_out = _search(self._footprints, emptied)
        reasons = [*emptied.warnings, *left_out]
        if search.is_feasible:
            if search.choice is None:
                return _too_slow(self._footprints, search, emptied)
            notes = [*emptied.assumptions, *reasons]
            return self._answer(search, search.choice, notes, fits_now=not emptied.visible)
        if emptied.short_of_disk:
            on_larger_disks, _ = _search(self._footprints, emptied.with_larger_disks)
            if on_larger_disks.is_feasible:
                return disk_shortage_result(self._demand, emptied.warnings)
        refusal = _no_capacity_result(self._footprints, search, emptied, reasons)
        result = _with_hardware(refusal, self._footprints)
        return result.model_copy(update={"candidates": []}) if self._brief else result

    def _answer(
        self, search: Search, winner: Option, notes: list[str], *, fits_now: bool
    ) -> PlanResult:
        result = _result(search, winner, notes, fits_now)
        return result if self._brief else _with_candidates(result, search, winner)


def _search(footprints: Footprints, inventory: Inventory) -> tuple[Search, list[str]]:
    """What the job may run as on these nodes, and a sentence on each group of them that it can't
    use."""
    spec = footprints.demand.spec
    pools, left_out = build_pools(inventory, spec)
    return Search(footprints, pools, server_pools(inventory, spec)), left_out


def _emptied_nodes(inventory: Inventory) -> Inventory:
    """The nodes with nothing running on them. Nodes that differ in their usage alone are merged,
    too."""
    return inventory.with_merged_nodes.without_usage.with_merged_nodes


def _plan_cpu(demand: Demand) -> PlanResult:
    """A CPU job: one plan, no search."""
    plan = plan_cpu(demand)
    candidate = Candidate.from_plan(plan)
    return PlanResult(
        feasible=True,
        fits_now=True,
        reason=PlanReason.PLANNED,
        message=plan.reason,
        chosen=plan,
        candidates=[candidate],
        changes=plan.changes,
        architecture=plan.architecture,
    )


def _no_capacity_result(
    footprints: Footprints, search: Search, emptied: Inventory, notes: list[str]
) -> PlanResult:
    """The explanation where nothing would fit even if nothing else ran."""
    demand = footprints.demand
    pools = search.pools
    options = search.misses()
    fixes = _fixes(footprints, emptied, pools)
    if options:
        result = _nothing_fits(demand, options, fixes)
    else:
        rejection = engine_rejection(demand, search) or place_rejection(demand, pools, notes)
        result = refusal(demand, rejection.reason, str(rejection), fixes=fixes)
    return _on_one_node(demand, result)


def _with_hardware(result: PlanResult, footprints: Footprints) -> PlanResult:
    """The rejection, with the smallest hardware that would do where more of it helps."""
    # Where GPUs lack only a price, others would lack it, too.
    if result.reason not in LACKS_HARDWARE or UNPRICED in result.message:
        return result

    plan = _planner_elsewhere(footprints)
    spec = footprints.demand.spec
    hardware = smallest_hardware(spec, plan)
    if hardware:
        pins = " and ".join(_pins_beside(spec.placement, hardware))
        without = f"without {pins} " if pins else ""
        would_do = f"{without}the smallest hardware that would do: {hardware.message}"
        message = f"{result.message}; {would_do}"
        return result.model_copy(update={"hardware": hardware, "message": message})
    without_demands = smallest_hardware(without_size(spec), plan)
    if without_demands:
        product = "gpuProduct, " if spec.placement.gpu_product else ""
        would_do = (
            f"without spec.placement.{product}nodes, gpus.min and spec.resources the smallest "
            f"hardware that would do: {without_demands.message}"
        )
    else:
        would_do = (
            f"no usual hardware of up to {MOST_RENTED} GPUs, with {DEFAULT_HOST_GIB} GiB of host "
            "memory for each, would do"
        )
    message = f"{result.message}; {would_do}"
    return result.model_copy(update={"message": message})


def _pins_beside(placement: PlacementSpec, hardware: Hardware) -> Iterator[str]:
    """Yield what of a placement would keep the job off hardware that would do."""
    if not is_of_product(hardware.gpu_product, placement.gpu_product or ""):
        yield "spec.placement.gpuProduct"
    most = placement.gpus and placement.gpus.max
    if most and most < hardware.nodes * hardware.gpus_per_node:
        yield "spec.placement.gpus.max"


def _planner_elsewhere(footprints: Footprints) -> HardwarePlanner:
    """What plans changed specs of the same job, each on one inventory after another."""

    def planner(spec: GRPOJobSpec) -> Callable[[Inventory], Search]:
        changed = footprints.with_spec(spec)
        return lambda inventory: _search(changed, inventory)[0]

    return planner


def _on_one_node(demand: Demand, result: PlanResult) -> PlanResult:
    """The rejection, with the claim named where it is what keeps the gang on one node."""
    if demand.spec.placement.nodes or not demand.spec.checkpoint.is_on_one_node:
        return result
    message = f"{result.message}; {ACCESS_MODE} ReadWriteOnce keeps the gang on one node"
    # The fixes of a plan that fits nowhere are part of its message.
    if ACCESS_MODE not in result.message:
        message += ": with ReadWriteMany it may have more"
    return result.model_copy(update={"message": message})


def _with_candidates(result: PlanResult, search: Search, winner: Option) -> PlanResult:
    """The result with all that the winner was compared with, and the rule that took it."""
    assert result.chosen is not None, "it was given"
    others = search.comparable_options(winner)
    options = [*others, *search.extents(winner), *search.rivals(winner)]
    ranked = explain.candidates(search.demand, notable(options, winner), winner)
    winning_candidate = Candidate.from_plan(result.chosen)
    candidates = [winning_candidate, *ranked[1:]]
    rule = deciding_rule(search, winner)
    return result.model_copy(update={"candidates": candidates, "rule": rule})


def _result(search: Search, winner: Option, notes: list[str], fits_now: bool) -> PlanResult:
    """The result of a search that something fits, without what the winner was compared with."""
    demand = search.demand
    sampling = sampling_message(search, winner)
    reason = explain.reason_message(winner, sampling)
    warnings = explain.warnings(demand, winner)
    sentences = [*warnings, *advice(search, winner), *notes]
    plan = explain.as_plan(demand, winner, reason, sentences)
    message = reason if fits_now else f"needs {winner.place.name}, which are taken now; {reason}"
    result_reason = PlanReason.PLANNED if fits_now else PlanReason.WAITING_FOR_GPUS
    return PlanResult(
        feasible=True,
        fits_now=fits_now,
        reason=result_reason,
        message=message,
        chosen=plan,
        changes=plan.changes,
        architecture=demand.model.source,
    )


def _too_slow(footprints: Footprints, search: Search, emptied: Inventory) -> PlanResult:
    """The answer where what fits takes longer than a job may."""
    demand = search.demand
    changed = _search_of(footprints, emptied, search.pools)
    fixes = find_faster(demand.spec, search.pools, lambda spec: changed(spec).choice_in_time)
    in_time = "; or ".join(fix.message for fix in fixes)
    ways = f"would be in time: {in_time}"
    if not fixes:
        ways = "use fewer or shorter completions, a smaller model or more GPUs"
    slow = search.best(objective="Fastest")
    assert slow is not None, "something fits"
    steps = demand.spec.training.max_steps
    whole_run = ""
    if steps and search.most_seconds < LONGEST_STEP:
        days, _ = distinct(steps * slow.least_seconds / DAY, LONGEST_RUN / DAY, 0)
        whole_run = f", {steps} of them {days} days"
    hours, _ = distinct(slow.least_seconds / HOUR, LONGEST_STEP / HOUR)
    message = (
        f"the fastest that fits, {slow.footprint.method.name} on {slow.place.name}, would take "
        f"{hours} h per step or more{whole_run}{_guess_message(demand)}: more than "
        f"{LONGEST_STEP / HOUR:.0f} h per step or {LONGEST_RUN / DAY:.0f} days in all are refused, "
        f"unless you set spec.placement.allowSlow to true; {ways}"
    )
    return refusal(demand, PlanReason.TOO_SLOW, message, fixes=fixes)


def _nothing_fits(demand: Demand, options: list[Option], fixes: list[Fix]) -> PlanResult:
    """The answer where no option fits: what is missing and what would help."""
    nearest = min(options, key=missing_shares)
    place = nearest.place
    footprint = nearest.footprint
    host_need, host_have = distinct_gib(nearest.host, place.host_memory)
    on_host = f"{host_need} of host memory per node, {host_have} are there"
    if nearest.shortage == "HostMemory":
        reason = PlanReason.OUT_OF_HOST_MEMORY
        numbers = on_host
    else:
        reason = PlanReason.OUT_OF_DEVICE_MEMORY
        phase = footprint.prediction.peak_phase
        need, usable = distinct_gib(footprint.device, place.pool.usable_bytes)
        numbers = f"{need} per GPU at {phase}, {usable} are usable"
        if nearest.host > place.host_memory:
            numbers += f", and {on_host}"
    if any([change.path for change in fix.changes] == ["spec.adapter.use"] for fix in fixes):
        reason = PlanReason.ONLY_ADAPTER_FITS
    message = f"nothing fits; the nearest, {footprint.method.name} on {place.name}, needs {numbers}"
    message += _guess_message(demand)
    if fixes:
        would_fit = "; or ".join(fix.message for fix in fixes)
        message += f"; would fit: {would_fit}"
    ranked = explain.candidates(demand, notable(options, None), None)
    return refusal(demand, reason, message, candidates=ranked, fixes=fixes)


def _guess_message(demand: Demand) -> str:
    """That numbers rest on a shape that nothing says; empty where something does."""
    is_guess = demand.model.source == "Estimated"
    return f" (the shape is a guess: {demand.model.note})" if is_guess else ""


def _fixes(footprints: Footprints, emptied: Inventory, pools: list[Pool]) -> list[Fix]:
    """Changes of the spec that lead to a plan on the emptied nodes."""
    demand = footprints.demand
    search = _search_of(footprints, emptied, pools)

    def plan(spec: GRPOJobSpec) -> Option | None:
        is_too_long = _is_shortened_too_little(demand, spec)
        return None if is_too_long else search(spec).choice

    return find_fixes(demand.spec, demand.shape, pools, plan)


def _search_of(
    footprints: Footprints, emptied: Inventory, pools: list[Pool]
) -> Callable[[GRPOJobSpec], Search]:
    """What a changed spec of a job may run as on the emptied nodes; `pools` are those of the spec
    as it is."""
    placement = footprints.demand.spec.placement

    def search(spec: GRPOJobSpec) -> Search:
        trainer_pools = pools
        wanted = (spec.placement.gpu_product, spec.placement.objective)
        if wanted != (placement.gpu_product, placement.objective):
            trainer_pools, _ = build_pools(emptied, spec)
        engine_pools = server_pools(emptied, spec)
        return Search(footprints.with_spec(spec), trainer_pools, engine_pools)

    return search


def _is_shortened_too_little(demand: Demand, changed: GRPOJobSpec) -> bool:
    """True for shorter sequences that are still beyond the positions that the model was probably
    made for: these are no advice."""
    new_demand = demand.with_spec(changed)
    positions = demand.model.positions.tokens
    return bool(positions) and positions < new_demand.length < demand.length
