"""Properties that every plan has, on random jobs and clusters.

A planner has too many inputs to enumerate: more memory never hurts, more completions never save,
order and repetition change nothing, and what is chosen fits.
"""

from dataclasses import fields, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_planner.explain.fixes import with_value
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.memory.phases import Predictor, predict
from grpo_planner.memory.setup import Setup, ZeroStage
from grpo_planner.model import catalogue
from grpo_planner.plan import Planner, plan_job
from grpo_planner.result.result import PlanResult
from tests.generated import cases
from tests.unit.planning import (
    A10G,
    A100,
    H100,
    H200,
    L4,
    LLAMA_1B,
    LLAMA_70B,
    QWEN_7B,
    QWEN_32B,
    T4,
    nodes,
    risk,
    spec,
)

MODELS = st.sampled_from(
    [LLAMA_1B, QWEN_7B, QWEN_32B, LLAMA_70B, "google/gemma-3-1b-it", "Qwen/Qwen3-30B-A3B"]
)
PRODUCTS = st.sampled_from([A10G, A100, H100, H200, L4, T4])
GROUPS = st.builds(
    nodes,
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    PRODUCTS,
    st.sampled_from([32, 256, 2048]),
)
OFFERS = st.builds(
    replace,
    GROUPS,
    gpus_free=st.integers(0, 8),
    node_gbps=st.sampled_from([0.0, 1.25, 50.0]),
    gpu_gbps=st.sampled_from([0.0, 25.0]),
    gpu_hour_price=st.sampled_from([0.0, 0.5, 3.0]),
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "training__beta": st.sampled_from([0.0, 0.04]),
        "training__numGenerations": st.sampled_from([2, 4, 8, 16]),
        "training__promptsPerStep": st.sampled_from([1, 3, 8]),
        "training__maxCompletionLength": st.sampled_from([64, 512, 4096]),
        "training__optimizer": st.sampled_from(["Auto", "AdamW", "AdamW8bit"]),
        "training__dtype": st.sampled_from(["Auto", "float32"]),
        "adapter__use": st.sampled_from(["Never", "IfNeeded", "Always"]),
        "placement__objective": st.sampled_from(["Balanced", "Fastest", "FewestGPUs", "Cheapest"]),
        "placement__nodes": st.integers(1, 3),
        "image": st.just("trainer:1"),
        "generation__engine": st.sampled_from(["Auto", "Transformers", "Colocated"]),
    },
)
ONCE = {"size": "1Ti", "accessMode": "ReadWriteOnce"}
FEW = settings(max_examples=cases(40, gate=6))


@st.composite
def jobs(draw: st.DrawFn) -> GRPOJobSpec:
    """A job of a known model with some of its fields set."""
    changes: dict[str, Any] = draw(CHANGES)
    return spec(draw(MODELS), **changes)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Any combination that the memory model is asked about."""
    stages: list[ZeroStage] = [0, 2, 3]
    zero = draw(st.sampled_from(stages))
    return Setup(
        precision=draw(st.sampled_from(["bfloat16", "mixed", "float32"])),
        prompt=draw(st.integers(1, 4096)),
        completion=draw(st.integers(1, 4096)),
        micro_batch=draw(st.integers(1, 16)),
        accumulation=draw(st.sampled_from([1, 2, 8])),
        generation_batch=draw(st.integers(1, 64)),
        world=draw(st.sampled_from([2, 4, 8])),
        zero=zero,
        offload=draw(st.booleans()) and zero > 0,
        lora_rank=draw(st.sampled_from([0, 16])),
        eight_bit=draw(st.booleans()) and not zero,
        checkpointing=draw(st.booleans()),
        gather=draw(st.booleans()),
        reference=draw(st.sampled_from(["None", "Clone", "Sharded", "Offload"])),
        scores_old_policy=draw(st.booleans()),
    )


def is_consent(job: GRPOJobSpec, path: str, value: Any, answer: PlanResult) -> bool:
    """Whether a pinned engine says what the planner does not assume by itself, so that its plan may
    beat the answer without it: that an image of the user's has vLLM, or that completions of a model
    which no engine serves may take many times longer."""
    if path.removeprefix("spec.") != "generation.engine":
        return False
    if value == "Colocated":
        return job.image is not None
    return answer.chosen is None and answer.message.startswith("no engine can serve")


def cost(job: GRPOJobSpec, plan: ExecutionPlan, price: float) -> tuple[int, float, float]:
    """What the job's objective wants little of, by its documented meaning: tier, what comes first,
    what is then compared."""
    assert plan.estimated_step_seconds is not None
    seconds, gpus = plan.estimated_step_seconds, plan.gpus
    tier = 2 if plan.method == "LoRA" else int(plan.optimizer == "AdamW8bit")
    counted = seconds * risk(plan)
    costs = {
        "Balanced": (0, gpus**0.5 * counted),
        "Fastest": (0, seconds),
        "FewestGPUs": (gpus, counted),
        "Cheapest": (0, price * gpus * counted),
    }
    return (tier, *costs[job.placement.objective])


def fits(job: GRPOJobSpec, plan: ExecutionPlan, groups: list[Node]) -> None:
    """What every plan keeps to: the memory, the GPUs and the batch that there are."""
    assert plan.memory is not None
    assert plan.memory.peak_allocated_bytes < plan.memory.device_bytes <= plan.memory.usable_bytes
    alike = [group for group in groups if group.gpu_product == plan.gpu_product]
    rooms = [
        (group.host_memory_total, group.gpus_total) for group in alike for _ in range(group.count)
    ]
    needed = (plan.memory.host_bytes_per_node, plan.gpus_per_node)
    assert sum(room[0] >= needed[0] and room[1] >= needed[1] for room in rooms) >= plan.nodes
    step = job.training.prompts_per_step * job.training.num_generations
    assert plan.world_size * plan.micro_batch * plan.gradient_accumulation == step


@settings(max_examples=cases(60, gate=12))
@given(
    jobs(),
    st.lists(OFFERS, min_size=1, max_size=3),
    st.integers(1, 60_000),
    st.randoms(use_true_random=False),
)
def test_invariants_of_every_plan(
    job: GRPOJobSpec, offers: list[Node], more: int, random: Any
) -> None:
    """What is chosen fits; order and repetition change nothing; with more memory it is no worse and
    still there."""
    groups = [replace(offer, gpus_free=min(offer.gpus_free, offer.gpus_total)) for offer in offers]
    answer = plan_job(job, Inventory(tuple(groups)))
    single = [
        replace(group, count=1, name=f"n{i}-{j}")
        for i, group in enumerate(groups)
        for j in range(group.count)
    ]
    random.shuffle(single)
    assert plan_job(job, Inventory(tuple(single))).model_dump_json() == answer.model_dump_json()
    # On nodes that are empty before and after: with more memory a job may start at once on what it
    # waited past.
    empty = [group.without_usage for group in groups]
    before = plan_job(job, Inventory(tuple(empty)))
    bigger = [replace(group, gpu_memory_mib=group.gpu_memory_mib + more) for group in empty]
    after = plan_job(job, Inventory(tuple(bigger)))
    assert after.feasible or not before.feasible
    if answer.chosen:
        fits(job, answer.chosen, groups)
    else:
        assert answer.message
    if before.chosen and after.chosen:
        prices = {group.gpu_product: 0.0 for group in groups}
        for group in groups:
            prices[group.gpu_product] = max(prices[group.gpu_product], group.gpu_hour_price)
        old, new = (
            cost(job, plan, prices[plan.gpu_product]) for plan in (before.chosen, after.chosen)
        )
        rounding = 0.01  # estimates are published in hundredths of a second
        assert new[:2] < old[:2] or (
            new[:2] == old[:2] and new[2] <= old[2] * (1 + rounding) + rounding
        )


@FEW
@given(jobs(), GROUPS, st.integers(1, 3))
def test_longer_completions_never_make_an_infeasible_job_feasible(
    job: GRPOJobSpec, group: Node, bits: int
) -> None:
    longer = job.model_copy(
        update={"training": job.training.model_copy(
            update={"max_completion_length": job.training.max_completion_length << bits})}
    )  # fmt: skip
    if plan_job(longer, Inventory((group,))).feasible:
        assert plan_job(job, Inventory((group,))).feasible


@settings(max_examples=cases(300, gate=37))
@given(setups(), st.sampled_from(sorted(catalogue.shapes())))
def test_more_of_anything_never_needs_less(setup: Setup, name: str) -> None:
    shape = catalogue.shapes()[name]
    before = predict(shape, setup).phases
    for more in (
        replace(setup, completion=setup.completion + 64),
        replace(setup, prompt=setup.prompt + 64),
        replace(setup, micro_batch=setup.micro_batch + 1),
        replace(setup, generation_batch=setup.generation_batch + 1),
        replace(setup, accumulation=setup.accumulation + 1),
    ):
        after = predict(shape, more).phases
        assert all(after[name] >= before[name] for name in before), (more, before, after)


@given(st.lists(setups(), min_size=2, max_size=8), st.sampled_from(sorted(catalogue.shapes())))
def test_terms_kept_for_one_setup_are_right_for_the_next(asked: list[Setup], name: str) -> None:
    """Neighbours that differ in one setting are what a key without that setting would confuse."""
    shape = catalogue.shapes()[name]
    asked += [
        replace(asked[0], **{field.name: getattr(asked[1], field.name)}) for field in fields(Setup)
    ]
    predictor = Predictor(shape)
    for setup in asked:
        assert predictor.predict(setup) == predict(shape, setup)


@FEW
@given(jobs(), GROUPS, GROUPS)
def test_a_claim_of_one_node_never_gets_a_gang_of_several(
    job: GRPOJobSpec, one: Node, other: Node
) -> None:
    if (job.placement.nodes or 1) > 1:
        return
    there = Inventory((one, replace(other, gpus_free=other.gpus_free // 2)))
    held = with_value(job, "spec.checkpoint.volumeClaimTemplate", ONCE)
    chosen = plan_job(held, there).chosen
    assert chosen is None or chosen.nodes == 1
    assert chosen == plan_job(with_value(job, "spec.placement.nodes", 1), there).chosen


@FEW
@given(
    jobs(),
    st.lists(
        st.lists(st.tuples(GROUPS, st.integers(0, 8)), min_size=1, max_size=3),
        min_size=2,
        max_size=4,
    ),
)
def test_a_planner_that_has_planned_before_answers_the_same_bytes(
    job: GRPOJobSpec, clusters: list[list[tuple[Node, int]]]
) -> None:
    planner, brief = Planner(job), Planner(job, brief=True)
    rounds = []
    for groups in clusters:
        there = [
            replace(group, name=f"n{n}", gpus_free=min(free, group.gpus_free))
            for n, (group, free) in enumerate(groups)
        ]
        # the same nodes, one by one and in another order, as a cluster lists them
        apart = [
            replace(node, count=1, name=f"{node.name}-{k}")
            for node in reversed(there)
            for k in range(node.count)
        ]
        fresh = plan_job(job, Inventory(tuple(there))).model_dump_json()
        rounds.append((there, apart, fresh))
    for there, apart, fresh in [*rounds, *rounds]:
        assert planner.plan(Inventory(tuple(there))).model_dump_json() == fresh
        assert planner.plan(Inventory(tuple(apart)).with_merged_nodes).model_dump_json() == fresh
        found = brief.plan(Inventory(tuple(apart)).with_merged_nodes)
        whole = planner.plan(Inventory(tuple(there)))
        assert found == whole.model_copy(update={"candidates": [], "rule": ""})
