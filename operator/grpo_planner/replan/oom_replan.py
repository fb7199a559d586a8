"""What follows when a plan ran out of memory: what is learned of the memory model, and the mildest
change that helps.

A checkpoint may be continued with another split of the same batch, so that is what changes. The
cheapest change comes first: activations are recomputed, then micro-batches get smaller, then fewer
completions are generated at a time. An engine that samples them then sleeps while the policy is
trained, and is given up last, where the spec leaves it open. What is trained never changes. Host
memory of a GPU job has no such settings: its request rises, where the spec leaves it open.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from grpo_api.plan.learned import HOST, MAX_REPLANS, Learned, LearnedMemory, Shortfall
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import MemoryShortage, Outcome
from grpo_api.spec.generation import EnginePlan
from grpo_api.spec.model import Architecture
from grpo_api.text.quantity import MAX_COUNT
from grpo_api.text.units import MIB

from ..hardware.products import table, usable_bytes
from ..memory.phases import Prediction, whole_mib
from ..result.formatting import distinct_gib, gib, plan_name, plural, sharding
from ..search.batch import generation_sizes
from ..search.engine_plan import sampler_name
from .past_run import Run

WIDER = 0.05
"""Share of a GPU, or of the host memory that a pod may use, that each plan after a shortfall leaves
free beyond the one before: the model has been wrong so often."""
HOST_RISE = 1.5
"""By how much host memory rises if it is unknown how much was missing."""


def learned_with_shortage(run: Run, attempt: int, outcome: Outcome) -> Learned:
    """Return what is known of the job once an attempt of this run has ended as OutOfMemory, by the
    trainer's own words or as concluded."""
    on_cpus = run.plan.accelerator == "CPU"
    unreported = MemoryShortage(memory="Host") if on_cpus else MemoryShortage(memory="Device")
    shortage = outcome.shortage or unreported
    on_host = shortage.memory == "Host" or on_cpus
    where = HOST if on_host else _phase(run, shortage)
    reported = shortage.allocated_bytes + shortage.requested_bytes
    if on_host:
        # The model predicts one process; a shortfall is stated per pod, which is what the user sets
        # a limit for.
        processes = run.plan.processes_per_node
        predicted = round(run.host_bytes / run.learned.factor(HOST))
        requested = run.plan.host_memory_bytes // processes
        expected = max(run.host_bytes, requested)
        available = run.host_limit
        least = available or round(HOST_RISE * expected)
    else:
        processes = 1
        predicted = round(run.prediction.phases[where] / run.learned.factor(where))
        available = run.usable_bytes
        least = max(_least_unfit_peak(run, where), 0)
    needed = max(reported, least)
    shortage_now = LearnedMemory(
        predicted_bytes=min(predicted, MAX_COUNT), needed_bytes=min(needed, MAX_COUNT)
    )
    shortage_before = run.learned.memory.get(where, shortage_now)
    largest = max(shortage_now, shortage_before, key=lambda learned_memory: learned_memory.factor)
    memory = run.learned.memory | {where: largest}
    shortfall = {
        "attempt": attempt,
        "where": where,
        "tried": split_name(run.plan),
        "needed_bytes": min(needed * processes, MAX_COUNT),
        "usable_bytes": available * processes,
        "checkpoint_step": outcome.checkpoint_step,
    }
    shortfalls = [*run.learned.shortfalls, Shortfall.model_validate(shortfall)]
    last_shortfalls = shortfalls[-MAX_REPLANS - 1 :]
    return run.learned.model_copy(update={"memory": memory, "shortfalls": last_shortfalls})


def learned_with_architecture(run: Run, architecture: Architecture) -> Learned:
    """Return what is known of the job once an attempt has reported the shape of its model.

    The bytes that a plan needed stay. The bytes that the memory model predicted for it are computed
    again with the reported shape: the old prediction was low partly because of the shape, and would
    correct for that twice.
    """
    if run.learned.architecture == architecture:
        return run.learned
    without_memory = run.learned.model_copy(update={"memory": {}})
    before = replace(run, learned=without_memory)
    after = replace(run, learned=Learned(architecture=architecture))
    memory: dict[str, LearnedMemory] = {}
    for key, learned_memory in run.learned.memory.items():
        needed_before = max(1, before.needed_bytes(key))
        needed_after = after.needed_bytes(key)
        predicted = round(learned_memory.predicted_bytes * needed_after / needed_before)
        update = {"predicted_bytes": min(predicted, MAX_COUNT)}
        memory[key] = learned_memory.model_copy(update=update)
    return run.learned.model_copy(update={"architecture": architecture, "memory": memory})


def _phase(run: Run, shortage: MemoryShortage) -> str:
    """The phase of the memory model that a shortage concerns: rewards are scored in what it calls
    generate."""
    phase = "generate" if shortage.phase == "reward" else shortage.phase
    # Without an engine there is no sync, so it can't have been that.
    if phase and run.prediction.phases[phase]:
        return phase
    return run.prediction.peak_phase


def _least_unfit_peak(run: Run, phase: str) -> int:
    """The least peak of a phase with which the plan would not have been made: it can't have been
    less."""
    static = run.prediction.static
    world = run.plan.world_size
    # What a device must have grows linearly with the peak, so two points give the peak that just
    # fits.
    high_peak = 2**40
    device_at_zero = run.demand.device_bytes(Prediction({phase: 0}, static), world)
    device_at_high = run.demand.device_bytes(Prediction({phase: high_peak}, static), world)
    share = (run.usable_bytes - device_at_zero) / (device_at_high - device_at_zero)
    fitting_peak = round(share * high_peak)
    return fitting_peak + MIB


def mildest_fitting_split(run: Run, *, last_resort: bool = True) -> ExecutionPlan | None:
    """Return the plan with the mildest change that makes it fit; None if no split of its batch
    helps a GPU.

    Where by its numbers nothing fits, as a last resort the leanest is tried: they are a model's.
    Host memory that nothing lowers leaves the plan as it is, with a higher request where the spec
    allows one.
    """
    shortfalls = run.learned.shortfalls
    where = shortfalls[-1].where
    on_host = where == HOST
    room = 1.0 - WIDER * len(shortfalls)
    if on_host and (run.plan.accelerator != "CPU" or not run.host_limit):
        return _with_explanation(run, run)
    leaner = [run.with_plan(**changes) for changes in leaner_splits(run)]
    new_run = next((option for option in leaner if option.may_fit(room)), None)
    if new_run is None and not last_resort and not on_host:
        return None
    if new_run is None and on_host:
        new_run = next(_ordered_savings(run, leaner), run)
    elif new_run is None:
        # The first of equals, so the mildest.
        new_run = min([run, *leaner], key=lambda option: option.prediction.phases[where])
    # The same plan on a GPU would run out again; on a host it may get a higher request.
    if new_run is run and not on_host:
        return None
    return _with_explanation(run, new_run)


def _ordered_savings(run: Run, leaner: Sequence[Run]) -> Iterator[Run]:
    """One saving after the other, for a container that was killed: that doesn't say in which
    phase."""
    at_once = run.setup.generation_batch
    same_generation = [option for option in leaner if option.setup.generation_batch == at_once]
    micro_batch = run.plan.micro_batch
    yield from (option for option in same_generation if option.plan.micro_batch == micro_batch)
    yield from same_generation[-1:]
    yield from leaner[-1:]


def leaner_splits(run: Run) -> Iterator[dict[str, object]]:
    """All leaner splits of the same batch that the spec's pins allow, mildest first, the leanest
    last."""
    for engine in _engines(run):
        yield from _splits(run, engine)


def _engines(run: Run) -> Iterator[EnginePlan | None]:
    """The plan's engine, asleep while the policy is trained, awake while its base is in host
    memory, and none."""
    engine = run.plan.engine
    wanted = run.spec.generation
    yield engine
    if engine and engine.kind == "Colocated" and run.plan.accelerator == "GPU":
        can_sleep = engine.model_runner == "Auto" and wanted.sleep is not False
        if can_sleep and not engine.sleep:
            yield engine.model_copy(update={"sleep": True})
        has_whole_base = run.plan.method == "LoRA" and not run.plan.zero_stage
        if can_sleep and has_whole_base and not engine.offload_base:
            yield engine.model_copy(update={"sleep": True, "offload_base": True})
        if wanted.engine == "Auto":
            yield None


def _splits(run: Run, engine: EnginePlan | None) -> Iterator[dict[str, object]]:
    """The splits with one engine: ever fewer completions generated at a time, and for each ever
    leaner updates."""
    plan = run.plan
    step_share = plan.micro_batch * plan.gradient_accumulation
    generated = plan.micro_batch * plan.steps_per_generation
    recomputes = plan.gradient_checkpointing or run.spec.training.gradient_checkpointing == "Auto"
    leaner_updates = [(size, recomputes) for size in _micro_batch_sizes(run, step_share)]
    if engine:
        # Those of all its GPUs, so that one may sample fewer than it has GPUs.
        most_at_once = engine.max_sequences
    elif plan.engine:
        most_at_once = generation_sizes(run.spec, plan.world_size)[0]
    else:
        most_at_once = run.setup.generation_batch
    halvings = 1 if _has_fixed_size(run, engine) else most_at_once.bit_length()
    for bits in range(halvings):
        at_once = most_at_once >> bits
        sub_batch = 0
        if engine is None and at_once < generated:
            sub_batch = at_once
        sampling_engine = engine
        if engine and bits:
            sampling_engine = engine.model_copy(update={"max_sequences": at_once})
        # Where generation is what was short, the update need not get slower.
        same_update = [(plan.micro_batch, plan.gradient_checkpointing)] if bits else []
        for micro_batch, checkpointing in [*same_update, *leaner_updates]:
            split: dict[str, object] = {
                "micro_batch": micro_batch,
                "gradient_accumulation": step_share // micro_batch,
                "steps_per_generation": generated // micro_batch,
                "gradient_checkpointing": checkpointing,
                "generation_sub_batch": sub_batch,
                "engine": sampling_engine,
            }
            if any(getattr(plan, name) != value for name, value in split.items()):
                yield split


def _micro_batch_sizes(run: Run, step_share: int) -> list[int]:
    """Micro-batches that divide a process's share of a step, from the plan's down; only the plan's
    where it is fixed.

    A loss that depends on the micro-batch would be another loss with another size.
    """
    largest = run.plan.micro_batch
    training = run.spec.training
    if training.per_device_train_batch_size is not None or training.is_micro_batch_dependent:
        return [largest]
    return [size for size in range(largest, 0, -1) if step_share % size == 0]


def _has_fixed_size(run: Run, engine: EnginePlan | None) -> bool:
    """True where the number of completions at a time is pinned, and for an engine that takes no
    less memory with fewer: its GPUs, or its share, are its own."""
    if run.spec.generation.sequences_at_a_time is not None:
        return True
    if engine is None:
        return False
    return engine.kind == "Servers" or run.spec.generation.memory_share is not None


def _with_explanation(before: Run, after: Run) -> ExecutionPlan:
    """The new plan with its numbers, and what changed in words."""
    plan = after.plan
    last = after.learned.shortfalls[-1]
    fields: dict[str, object] = {}
    needed_host = whole_mib(after.host_bytes * plan.processes_per_node)
    sentences = list(_differences(before.plan, plan))
    if plan.memory:
        # offloaded gradients that accumulate take some, too
        host_per_node = max(needed_host, plan.memory.host_bytes_per_node)
        fields["memory"] = after.predicted_memory(plan.memory, host_per_node)
        fields |= after.step_fields
        lean = f"{plan_name(plan)}, with less memory per GPU than before"
        fields["reason"] = f"{lean}: {after.needs_message}"
    if after.demand.pod_memory is None and needed_host > plan.host_memory_bytes:
        fields["host_memory_bytes"] = needed_host
        asked, before_asked = distinct_gib(needed_host, plan.host_memory_bytes)
        sentences.append(f"asks for {asked} of host memory per pod instead of {before_asked}")
    needed = gib(last.needed_bytes)
    why = f"after OutOfMemory at {last.where} in attempt {last.attempt}, which needed {needed}"
    differences = "; ".join(sentences) or "nothing that the spec leaves open would lower it"
    changes = [*plan.changes, f"{why} or more: {differences}"]
    fields["changes"] = changes[-16:]
    fields["engine"] = after.sized_engine
    return plan.model_copy(update=fields)


def _differences(old: ExecutionPlan, new: ExecutionPlan) -> Iterator[str]:
    if new.gradient_checkpointing and not old.gradient_checkpointing:
        yield "recomputes activations (gradient checkpointing)"
    if new.micro_batch != old.micro_batch:
        yield (
            f"micro-batches of {new.micro_batch} instead of {old.micro_batch}, "
            f"{new.gradient_accumulation} instead of {old.gradient_accumulation} of them per step"
        )
    yield from engine_differences(old.engine, new.engine)
    if new.generation_sub_batch != old.generation_sub_batch:
        whole = old.micro_batch * old.steps_per_generation
        before = old.generation_sub_batch or whole
        yield (
            f"generates {new.generation_sub_batch} completions at a time instead of {before}, "
            "which draws other samples of the same distribution"
        )


def engine_differences(old: EnginePlan | None, new: EnginePlan | None) -> Iterator[str]:
    """What changes for the user from one engine to another, as parts of a sentence."""
    if old is None:
        return
    if new is None:
        yield (
            "generates by Transformers instead of an engine, which draws other samples of the "
            "same distribution"
        )
        return
    if new.max_sequences != old.max_sequences:
        yield (
            f"the engine samples {new.max_sequences} completions at a time instead of "
            f"{old.max_sequences}"
        )
    if new.model_runner != old.model_runner:
        yield "the engine runs model runner V1, without CUDA graphs and without sleep"
    if new.sleep and not old.sleep:
        yield "the engine sleeps while the policy is trained"
    if new.offload_base and not old.offload_base:
        yield "the frozen base is in host memory while the engine samples"


def split_name(plan: ExecutionPlan) -> str:
    """Return a short description of the plan's split, for messages."""
    devices = f"{plan.gpus} x {plan.gpu_product or plan.gpu_resource}"
    if plan.accelerator == "CPU":
        devices = f"{plan.world_size} x CPUs"
    sharding_name = sharding(plan.zero_stage, offload=plan.offload != "None")
    whole = plan.micro_batch * plan.steps_per_generation
    at_once = plan.generation_sub_batch or whole
    sampling = f"{at_once} generated at a time"
    if plan.engine:
        sampling = f"{plan.engine.max_sequences} sampled at a time by {sampler_name(plan)}"
    with_or_without = "with" if plan.gradient_checkpointing else "without"
    name = (
        f"{plan.method} {sharding_name} on {devices}, micro-batch {plan.micro_batch}, "
        f"{with_or_without} checkpointing, {sampling}"
    )
    return name[:256]


def shortage_message(run: Run) -> str:
    """Return sentences on the plans that ran out of memory and on the hardware that would be
    enough."""
    plans = plural(len(run.learned.shortfalls), "plan")
    return f"ran out of memory with {plans}, {last_shortfall_message(run)}. {remedy_message(run)}"


def last_shortfall_message(run: Run) -> str:
    """The last plan that ran out of memory, which was the leanest; status.learned.shortfalls has
    the others, and a message has no room for them."""
    shortfall = run.learned.shortfalls[-1]
    needed, usable = distinct_gib(shortfall.needed_bytes, shortfall.usable_bytes)
    of_usable = f" of {usable}" if shortfall.usable_bytes else ""
    return f"the last {shortfall.tried}, needed {needed} or more at {shortfall.where}{of_usable}"


def remedy_message(run: Run) -> str:
    """The hardware that would do for the leanest split, by what was learned."""
    splits = list(leaner_splits(run))
    leanest = run.with_plan(**splits[-1]) if splits else run
    if run.learned.shortfalls[-1].where == HOST:
        per_process = HOST_RISE * max(leanest.host_bytes, leanest.host_limit)
        per_pod = gib(per_process * run.plan.processes_per_node)
        return (
            f"{per_pod} of host memory per pod would probably do: set "
            "spec.resources.limits.memory and requests to it"
        )
    needed = leanest.device_bytes
    large_enough = [
        (product.memory_mib, name)
        for name, product in table().items()
        if usable_bytes(product.memory_mib) >= needed
    ]
    advice = "; no known product has so much, so more GPUs"
    if large_enough:
        _, smallest = min(large_enough)
        advice = f", such as {smallest}"
    return (
        f"The same number of GPUs with {gib(needed)} usable each would do{advice} (spec.placement)"
    )
