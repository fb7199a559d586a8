"""Converts options into plans, and their numbers into sentences, so that the search contains no
text.

It also explains in one sentence, with the two deciding numbers, why this plan was chosen and no
other, and which engine samples. A table of candidates holds that answer, too, but not on its first
line.
"""

from collections.abc import Sequence
from typing import Any

from grpo_api.plan.plan import (
    MAX_TEXT,
    STEP_ESTIMATES,
    ExecutionPlan,
    MemoryPhases,
    MemoryPrediction,
)
from grpo_api.spec.generation import EnginePlan
from grpo_api.text.contract import ALLOCATOR_ENV, EXPANDABLE_SEGMENTS, NODE_GBPS_LABEL
from grpo_api.text.messages import shorten

from ..hardware.pools import MILLICORES_PER_GPU
from ..hardware.products import is_slice, obstacle_message
from ..memory.phases import FRAGMENTATION, checkpoint_bytes, whole_mib
from ..memory.setup import Engine
from ..result.formatting import (
    distinct,
    distinct_gib,
    engine_name,
    needs_message,
    plan_name,
    plan_texts,
    plural,
)
from ..result.result import Candidate, PlanResult
from ..search.demand import Demand, step_fields, training_fields
from ..search.engine_plan import engine_plan, engine_warnings
from ..search.engines import settings_of_engines
from ..search.notes import low_rate_message
from ..search.option import Option, rank
from ..search.search import Search
from ..time.step_time import assumed_link, step_message
from .rejections import rejection

FULL = 0.92
"""Share of a GPU from which a plan says that it may be too little."""


def as_plan(demand: Demand, option: Option, reason: str, warnings: Sequence[str]) -> ExecutionPlan:
    """The plan of an option, with the reason why it was chosen and sentences for the user, of which
    the first 16 are kept."""
    return ExecutionPlan(
        **_plan_fields(demand, option),
        reason=shorten(reason, MAX_TEXT),
        warnings=plan_texts(warnings),
    )


def _plan_fields(demand: Demand, option: Option) -> dict[str, Any]:
    """The fields of an option's plan but for sentences on it."""
    place = option.place
    pool = place.pool
    setup = option.footprint.setup
    method = option.footprint.method
    # Without ZeRO, PEFT's float32 adapters on bfloat16 weights need autocast; DeepSpeed has them in
    # bfloat16, too.
    narrow_without_zero = setup.precision == "bfloat16" and not setup.zero
    autocast = setup.precision == "mixed" or narrow_without_zero
    seconds = None if option.shortage else option.published_seconds
    host_memory = demand.pod_memory or whole_mib(option.host)
    millicores = pool.default_millicores(place.per_node)
    if demand.pod_cpu is not None:
        millicores = round(1000 * demand.pod_cpu)
    link = assumed_link(pool.hardware, place.nodes, place.per_node)
    return {
        **training_fields(demand, method, setup),
        "offload": "CPU" if method.offload else "None",
        "gpus": place.world,
        "nodes": place.nodes,
        "gpus_per_node": place.per_node,
        "processes_per_node": place.per_node,
        "gpu_product": pool.label,
        "gpu_hour_price": pool.price or None,
        "gpu_resource": pool.resource,
        "node_selector": dict(pool.selector),
        "gather_for_generation": setup.gather,
        "engine": _engine(demand, option),
        "autocast": autocast,
        "memory": _memory(demand, option),
        "cpu_millicores": millicores,
        "host_memory_bytes": host_memory,
        "estimated_step_seconds": seconds,
        **step_fields(option.correction),
        "expected_completion_length": demand.expected_completion,
        "link_bytes_per_second": link,
        "changes": plan_texts(changes(demand, option)),
    }


def _engine(demand: Demand, option: Option) -> EnginePlan | None:
    """The option's engine as the plan publishes it."""
    setup = option.footprint.setup
    if setup.engine is None:
        return None
    pool = option.servers or option.place.pool
    sync = None if option.shortage else option.time.sync / setup.engine.syncs
    return engine_plan(demand, setup, pool.usable_bytes, sync=sync, servers=option.servers)


def _memory(demand: Demand, option: Option) -> MemoryPrediction:
    """The prediction as the plan publishes it."""
    footprint = option.footprint
    prediction = footprint.prediction
    drifts = demand.spec.reference.sync is not None
    checkpoint = checkpoint_bytes(demand.shape, footprint.setup, drifting_reference=drifts)
    phases = MemoryPhases(**prediction.phases)
    return MemoryPrediction(
        phases=phases,
        peak_phase=prediction.peak_phase,
        peak_allocated_bytes=prediction.peak,
        device_bytes=footprint.device,
        usable_bytes=option.place.pool.usable_bytes,
        host_bytes_per_node=option.host,
        expandable_segments=demand.spec.has_expandable_segments,
        checkpoint_bytes=checkpoint,
    )


def changes(demand: Demand, option: Option) -> list[str]:
    """Return sentences about an adapter or 8-bit moments that the plan uses although the spec did
    not ask for them."""
    spec = demand.spec
    method = option.footprint.method
    sentences = []
    if method.lora and not spec.is_adapter_requested:
        rank = spec.adapter.rank
        modules = spec.adapter.target_modules
        module_names = ", ".join(modules)
        adapter_parameters = demand.shape.adapter_parameters(rank, tuple(modules))
        share = adapter_parameters / demand.shape.parameters
        rate = f"{low_rate_message(spec)}; " if spec.adapter.learning_rate is None else ""
        is_without_zero = spec.training.optimizer == "AdamW8bit"
        pin = " without ZeRO, which optimizer AdamW8bit excludes" if is_without_zero else ""
        sentences.append(
            f"trains a LoRA adapter of rank {rank} on {module_names} only ({share:.2%} of the "
            f"parameters), because no plan with all parameters fits{pin}, or none in time; {rate}"
            "adapter.use Never refuses an adapter, Always asks for one"
        )
    if method.eight_bit and spec.training.optimizer == "Auto":
        sentences.append(
            "keeps AdamW's moments in 8 bits, because no plan with 32-bit moments fits"
        )
    return sentences


def warnings(demand: Demand, option: Option) -> list[str]:
    """What the planner could not know about the chosen option."""
    pool = option.place.pool
    hardware = pool.hardware
    setup = option.footprint.setup
    sentences = demand.notes
    if not hardware.is_known:
        guesses = "its speed is a guess"
        if not hardware.capability:
            guesses = (
                "its speed, that it has bfloat16 and that the image's torch has kernels for it are "
                "guesses"
            )
        sentences.append(f"GPU product {pool.label!r} is unknown: {guesses}")
    if why := obstacle_message(pool.label, pool.resource, hardware.capability):
        sentences.append(f"{why}: whether spec.image can compute there is not known")
    if is_slice(pool.label):
        sentences.append(
            "a pod takes one MIG instance of its node, since NCCL can't join two: others stay free"
        )
    if not demand.spec.has_expandable_segments:
        variables = " or ".join(ALLOCATOR_ENV)
        waste = f"{FRAGMENTATION[False]:.0%}"
        usual_waste = f"{FRAGMENTATION[True]:.0%}"
        sentences.append(
            f"spec.env sets {variables} without {EXPANDABLE_SEGMENTS}: fragmentation is taken to "
            f"waste {waste} of what comes and goes instead of {usual_waste} (assumed)"
        )
    if setup.precision == "bfloat16" and not setup.has_lora and not setup.zero:
        sentences.append(
            "dtype bfloat16 without ZeRO has no float32 master weights: small updates can round "
            "away; set spec.training.dtype to Auto for float32 weights under bfloat16 autocast"
        )
    of_nodes = (_few_cores_message(demand, option), _uneven_nodes_message(demand, option))
    sentences += filter(None, of_nodes)
    if not hardware.has_bfloat16:
        sentences.append(f"{pool.label} has no bfloat16: everything runs in float32")
    is_declared = option.place.nodes == 1 or hardware.node_network
    if not is_declared and not demand.spec.resources.network_cards:
        assumed_gbps = option.place.per_node * hardware.network
        sentences.append(
            f"step times assume {assumed_gbps:.0f} GB/s between nodes, usual for these GPUs, but "
            "the pods ask for no RDMA card (spec.resources.limits, "
            "examples/11-rdma-and-init.yaml), and no interconnect is declared (node label "
            f"{NODE_GBPS_LABEL}, or interconnect.nodeGBps of an inventory file): over TCP steps "
            "may take longer"
        )
    if option.device_share >= FULL:
        sentences.append(
            f"the plan takes {option.device_share:.0%} of each GPU, by numbers of which some are "
            "assumed: it may run out of memory, after which the next attempt gets a leaner plan "
            "where there is one"
        )
    sentences += engine_warnings(demand, setup)
    hang_timeout = demand.spec.guard.hang_timeout_seconds
    longest = STEP_ESTIMATES * option.seconds
    if longest > hang_timeout:
        patience, _ = distinct(longest, hang_timeout, 0)
        sentences.append(
            f"a step is estimated at {option.seconds:.0f} s: one without an end is a hang only "
            f"after {patience} s, "
            f"not after spec.guard.hangTimeoutSeconds = {hang_timeout}; raise that"
        )
    return sentences


def _few_cores_message(demand: Demand, option: Option) -> str:
    """Cores that are fewer than usual for a node's GPUs; empty where they are enough."""
    gpus = option.place.per_node
    cores = option.place.pool.default_millicores(gpus) / 1000
    usual = gpus * MILLICORES_PER_GPU // 1000
    if demand.pod_cpu is not None or cores >= usual:
        return ""
    return (
        f"these nodes leave {plural(gpus, 'GPU')} {cores:g} of the usual {usual} cores: rewards, "
        "tokenizing and engines may take longer than estimated"
    )


def _uneven_nodes_message(demand: Demand, option: Option) -> str:
    """GPUs that stay idle since the one other node has fewer; empty where there are none."""
    place, pool, placement = option.place, option.place.pool, demand.spec.placement
    is_limited = demand.spec.nodes or placement.gpus or option.engine_gpus
    sizes = [room.gpus for room, _ in pool.rooms]
    takes_all = place.per_node == max(sizes) and pool.nodes == place.nodes + 1
    if is_limited or not takes_all or min(sizes) in (0, max(sizes)):
        return ""
    return (
        f"{pool.gpus - place.world} of {pool.gpus} GPUs stay idle: every pod has as many GPUs, and "
        f"a node has {min(sizes)} where the others have {max(sizes)}"
    )


def reason_message(option: Option, sampling: str) -> str:
    """Why this plan, in a sentence with its numbers; `sampling`: what samples the completions, and
    why."""
    place = option.place
    footprint = option.footprint
    usable = place.pool.usable_bytes
    phase = footprint.prediction.peak_phase
    spread = option.correction.spread if option.correction else None
    step = step_message(option.seconds, spread)
    numbers = needs_message(footprint.device, usable, phase, step)
    return f"{footprint.method.name} on {place.name}: {numbers}{_SAMPLING}{sampling}"


_SAMPLING = "; completions by "


def sampling_reason(plan: ExecutionPlan) -> str:
    """What samples a plan's completions and why, of its reason; empty where that says nothing."""
    return plan.reason.partition(_SAMPLING)[2]


def refusal_message(result: PlanResult) -> str:
    """The message of a result without a plan, less the fixes, which are listed beside it."""
    fixes = "; or ".join(fix.message for fix in result.fixes)
    message = result.message.replace(f"; would fit: {fixes}", "")
    return message.replace(f"; would be in time: {fixes}", "")


def candidates(demand: Demand, options: Sequence[Option], winner: Option | None) -> list[Candidate]:
    """The options with their verdicts: the chosen one, then what fits by time, then what does not
    by what it lacks."""
    ranked = sorted(options, key=lambda option: (option is not winner, *rank(option)))
    objective = demand.spec.placement.objective
    return [
        Candidate(**_plan_fields(demand, option), rejected=rejection(option, winner, objective))
        for option in ranked
    ]


def decision_message(result: PlanResult) -> str:
    """What decided for the chosen plan; empty where nothing was compared."""
    plan = result.chosen
    if plan is None or plan.memory is None:
        return ""
    others = result.candidates[1:]
    # Of those that don't fit, the first lacks least.
    lacking = [other for other in others if _is_rejected(other, "DeviceMemory", "HostMemory")]
    full = next((other for other in others if other.method == "Full"), None)
    if plan.method == "LoRA" and full:
        return f"an adapter, because {_full_obstacle(full)}"
    # Some differ from the plan by what a name leaves out, such as the size of micro-batches.
    own_name = plan_name(plan)
    outdone = [other for other in others if _is_rejected(other, "Slower", "NoBetter")]
    fitting = [other for other in outdone if plan_name(other) != own_name]
    if not fitting:
        return _nothing_else_message(others, lacking[0]) if lacking else ""
    rival = min(fitting, key=_step_seconds)
    assert rival.rejected is not None, "it was not chosen"
    seconds, rival_seconds = distinct(_step_seconds(plan), _step_seconds(rival))
    verdict = rival.rejected.message
    would_take = "" if seconds == rival_seconds else f" would take {rival_seconds} s"
    rule = f" ({result.rule})" if result.rule else ""
    # Without it, a plan without an engine would be called as the chosen one is on the line above.
    sampler = ", Transformers" if plan.engine and not rival.engine else ""
    return f"{seconds} s per step{rule}; {plan_name(rival)}{sampler}{would_take}: {verdict}"


def _full_obstacle(full: Candidate) -> str:
    """Why an adapter is trained and not all parameters, of which `full` is the best plan."""
    what = "training all parameters"
    if full.estimated_step_seconds is None:
        return _shortage_message(full, what)
    # It fits, so only its time can be against it.
    return f"{what} would take {full.estimated_step_seconds:.0f} s per step"


def _nothing_else_message(others: Sequence[Candidate], nearest: Candidate) -> str:
    """What lacks least, where nothing else fits, or only what trains less."""
    shortage = _shortage_message(nearest, f"the nearest, {plan_name(nearest)},")
    has_other_tier = any(_is_rejected(other, "NotNeeded") for other in others)
    what = " that departs as little from the spec" if has_other_tier else ""
    return f"nothing else{what} fits: {shortage}"


def _step_seconds(plan: ExecutionPlan) -> float:
    return plan.estimated_step_seconds or 0


def _is_rejected(candidate: Candidate, *reasons: str) -> bool:
    return candidate.rejected is not None and candidate.rejected.reason in reasons


def _shortage_message(candidate: Candidate, what: str) -> str:
    """`training all parameters needs 94.4 GiB at forward, has 78.9 GiB`."""
    assert candidate.rejected is not None, "it doesn't fit"
    return f"{what} {candidate.rejected.message}"


def sampling_message(search: Search, chosen: Option) -> str:
    """Return which engine samples the chosen option's completions, and why, with the numbers of the
    alternatives that it was compared with."""
    engine, wanted = chosen.footprint.setup.engine, search.demand.spec.generation.engine
    sampler = _sampler_name(engine)
    if chosen.servers:
        sampler = f"{sampler} on {chosen.engine_gpus} x {chosen.servers.gpu_name}"
    if search.engines.why_none:
        return f"Transformers, since {search.engines.why_none}"
    if wanted != "Auto":
        return f"{sampler}, as asked for; {_ASSUMED}"
    # An engine for which the base must go is worth the reason why it must.
    others = [
        other
        for other in search.rivals(chosen)
        if _kind(other.footprint.setup.engine) != _kind(engine) or _is_kept_base(engine, other)
    ]
    if not others:
        # Transformers may always sample, and an engine on one GPU, unless a setting excludes it.
        pins = " and ".join(settings_of_engines(search.demand.spec))
        why = search.engines.colocated_misfit([chosen.place.pool])
        return f"{sampler}: {why or f'no engine has a place on these GPUs with {pins}'}"
    comparisons = "; ".join(_comparison_message(chosen, other) for other in others)
    return f"{sampler}: {comparisons}; {_ASSUMED}"


_ASSUMED = "no GPU has confirmed an engine's memory (assumed)"


def _sampler_name(engine: Engine | None) -> str:
    if engine is None:
        return "Transformers"
    return engine_name(
        engine.kind, engine.tensor_parallel, sleeps=engine.sleeps,
        offloads_base=engine.offloads_base, engines=engine.replicas,
    )  # fmt: skip


def _is_kept_base(engine: Engine | None, other: Option) -> bool:
    """True if the other is the engine without its offloaded base."""
    rival = other.footprint.setup.engine
    if engine is None or rival is None or not engine.offloads_base:
        return False
    return rival.sleeps and not rival.offloads_base


def _comparison_message(chosen: Option, other: Option) -> str:
    """How another engine on the same split compares."""
    name = _sampler_name(other.footprint.setup.engine)
    if other.shortage == "HostMemory":
        need, have = distinct_gib(other.host, other.place.host_memory)
        return f"{name} needs {need} of host memory per node, of {have}"
    if other.shortage:
        phase = other.footprint.prediction.peak_phase
        need, have = distinct_gib(other.footprint.device, other.place.pool.usable_bytes)
        return f"{name} needs {need} of {have} per GPU at {phase}"
    more = ""
    if other.engine_gpus > chosen.engine_gpus:
        more = f" on {plural(other.engine_gpus, 'GPU')} more"
    seconds, _ = distinct(other.published_seconds, chosen.published_seconds)
    return f"{name}{more} would take {seconds} s"


def _kind(engine: Engine | None) -> str:
    return engine.kind if engine else "Transformers"
