"""Whatever a job leaves open is chosen no worse than what a user could pin, and more of anything
that a cluster offers makes no plan worse by its own objective."""

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_api.job import GRPOJobSpec, SpecInvalid
from grpo_planner.explain.fixes import with_value
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.plan import plan_job
from tests.generated import cases
from tests.unit.planning import H100, H200, LLAMA_70B, QWEN_32B, nodes, plan, result, spec
from tests.unit.test_planner_properties import MODELS, OFFERS, cost, is_consent

JOBS = st.builds(
    lambda model, changes: spec(model, **changes),
    MODELS,
    st.fixed_dictionaries(
        {},
        optional={
            "training__beta": st.sampled_from([0.0, 0.04]),
            "training__numGenerations": st.sampled_from([2, 4, 8, 16]),
            "training__promptsPerStep": st.sampled_from([1, 3, 8]),
            "training__maxCompletionLength": st.sampled_from([64, 512, 4096]),
            "placement__objective": st.sampled_from(
                ["Balanced", "Fastest", "FewestGPUs", "Cheapest"]
            ),
            "image": st.just("trainer:1"),
        },
    ),
)
"""Jobs that leave open how they run."""
PINS: dict[str, st.SearchStrategy[Any]] = {
    "generation.engine": st.sampled_from(["Transformers", "Colocated"]),
    "generation.tensorParallel": st.sampled_from([1, 2, 4, 8]),
    "generation.sequencesAtATime": st.integers(1, 128),
    "generation.sleep": st.booleans(),
    "generation.memoryShare": st.floats(0.05, 0.95),
    "generation.engineArguments.maxNumSeqs": st.integers(1, 128),
    "training.perDeviceTrainBatchSize": st.integers(1, 16),
    "training.gradientCheckpointing": st.sampled_from(["Enabled", "Disabled"]),
    "training.ds3GatherForGeneration": st.sampled_from(["Enabled", "Disabled"]),
    "training.optimizer": st.sampled_from(["AdamW", "AdamW8bit"]),
    "reference.strategy": st.sampled_from(["Clone", "Sharded", "Offload", "Adapter"]),
    "adapter.use": st.sampled_from(["Never", "Always"]),
    "placement.gpus": st.integers(1, 16).map(lambda gpus: {"min": gpus, "max": gpus}),
    "placement.nodes": st.integers(1, 4),
}
"""Everything that is searched, with values that a user may pin."""


@settings(max_examples=cases(100, gate=10))
@given(
    JOBS,
    st.lists(OFFERS, min_size=1, max_size=2),
    st.sampled_from(sorted(PINS)).flatmap(lambda path: st.tuples(st.just(path), PINS[path])),
)
def test_no_pin_beats_the_plan_without_it(
    job: GRPOJobSpec, offers: list[Node], pin: tuple[str, Any]
) -> None:
    groups = [offer.without_usage for offer in offers]
    inventory = Inventory(tuple(groups))
    try:
        pinned_job = with_value(job, *pin)
    except SpecInvalid:
        assume(False)
    free, pinned = plan_job(job, inventory), plan_job(pinned_job, inventory)
    assume(not is_consent(job, *pin, free))
    assert free.feasible or not pinned.feasible, pin
    if free.chosen and pinned.chosen:
        prices = {group.gpu_product: 0.0 for group in groups}
        for group in groups:
            prices[group.gpu_product] = max(prices[group.gpu_product], group.gpu_hour_price)
        best, rival = (
            cost(job, plan, prices[plan.gpu_product]) for plan in (free.chosen, pinned.chosen)
        )
        rounding = 0.01  # estimates are published in hundredths of a second
        assert best[:2] <= rival[:2], (pin, best, rival)
        if best[:2] == rival[:2]:
            assert best[2] <= rival[2] * (1 + rounding) + rounding, (pin, best, rival)


def test_an_engine_limited_to_fewer_completions_than_it_has_gpus_takes_longer() -> None:
    """Four GPUs share an engine and have 32 completions to sample: as many fillings of one."""
    pins = {"engine": "Colocated", "tensorParallel": 4}
    gpus = {"min": 8, "max": 8}
    seconds = []
    for at_once in (4, 2, 1):
        job = spec(generation=pins | {"sequencesAtATime": at_once}, placement__gpus=gpus)
        seconds.append(plan(job, nodes(1, 8, H100)).estimated_step_seconds or 0)
    assert seconds[1] > 1.3 * seconds[0]
    assert seconds[2] > 1.3 * seconds[1]


def test_more_completions_at_a_time_than_a_process_has_are_no_limit() -> None:
    """One GPU has no room for 16 at a time, of which each of two has 8."""
    limits = {"training__numGenerations": 8, "training__promptsPerStep": 2, "training__beta": 0,
              "training__maxCompletionLength": 32000, "placement__allowSlow": True}  # fmt: skip
    plans = []
    for at_once in (8, 10, 16):
        generation = {"engine": "Transformers", "sequencesAtATime": at_once}
        job = spec(QWEN_32B, adapter__use="Always", generation=generation, **limits)
        # With an engine, of which a warning speaks, they would be a limit.
        plans.append(plan(job, nodes(1, 2, H200)).model_copy(update={"warnings": []}))
    assert plans[0] == plans[1] == plans[2]
    assert (plans[0].gpus, plans[0].zero_stage) == (2, 0)


def test_an_engine_on_more_gpus_than_the_batch_has_completions_is_named() -> None:
    generation = {"engine": "Colocated", "tensorParallel": 8}
    small = {"training__numGenerations": 4, "training__promptsPerStep": 1}
    job = spec(QWEN_32B, generation=generation, **small)
    message = result(job, nodes(1, 8, H200)).message
    assert message.startswith(
        "spec.generation.tensorParallel 8: 4 completions per step can't be split over a multiple "
        "of 8 GPUs"
    )
    assert plan(with_value(job, "spec.training.promptsPerStep", 2), nodes(1, 8, H200)).gpus == 8


def test_an_engine_samples_fewer_completions_than_it_has_gpus_where_more_have_no_room() -> None:
    """Without one a step would take 20 times as long, which a pinned number would beat."""
    there = nodes(1, 8, "NVIDIA-L40S", host_gib=1463)
    long: dict[str, Any] = {"training__maxCompletionLength": 2048}
    chosen = plan(spec(LLAMA_70B, **long), there)
    assert chosen.engine is not None
    assert chosen.engine.max_sequences < chosen.engine.tensor_parallel
    pinned = plan(spec(LLAMA_70B, generation__sequencesAtATime=4, **long), there)
    assert chosen.estimated_step_seconds == pinned.estimated_step_seconds
