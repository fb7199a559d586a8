"""What spec.placement.objective means: the knee of the curve, one node, room on the GPU, GPUs, time
and price."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.text.timing import DAY, HOUR
from grpo_planner.plan import Planner
from grpo_planner.result.result import PlanReason
from grpo_planner.search.option import (
    CROWDED,
    OFFLOADED,
    PARTITIONED,
    SEVERAL_NODES,
    SHARES,
    WEIGHTS_OFFLOADED,
)
from grpo_planner.search.search import LONGEST_RUN, LONGEST_STEP
from tests.generated import cases
from tests.unit.planning import (
    A100,
    H100,
    L4,
    LLAMA_1B,
    LLAMA_70B,
    QWEN_7B,
    QWEN_32B,
    inventory,
    nodes,
    plan,
    result,
    spec,
)

PAGE = Path(__file__).parents[2] / "docs/explanation/strategies.md"


def seconds(plan: ExecutionPlan) -> float:
    """The estimated time of a step."""
    assert plan.estimated_step_seconds is not None
    return plan.estimated_step_seconds


def filled(plan: ExecutionPlan) -> float:
    """Share of a GPU that the plan takes."""
    assert plan.memory is not None
    return plan.memory.device_bytes / plan.memory.usable_bytes


def test_objectives_trade_gpus_for_time() -> None:
    group = nodes(1, 8, H100)
    fewest = plan(spec(LLAMA_1B, placement__objective="FewestGPUs"), group)
    balanced = plan(spec(LLAMA_1B), group)
    fastest = plan(spec(LLAMA_1B, placement__objective="Fastest"), group)
    assert fewest.gpus == 1
    assert fewest.gpus <= balanced.gpus <= fastest.gpus
    assert seconds(fastest) <= seconds(balanced) <= seconds(fewest)


def test_balanced_stops_where_gpu_seconds_rise_faster_than_time_falls() -> None:
    """1,024 L40S: 512 of them would be the fastest, 64 need a fraction of their GPU-seconds."""
    job = spec(QWEN_7B, training__promptsPerStep=128, placement__gpus={"min": 16})
    sizes = Planner(job).curve(inventory(nodes(128, 8, "NVIDIA-L40S")))
    chosen = next(size for size in sizes if size.chosen)
    larger = [size for size in sizes if size.gpus > chosen.gpus]
    assert larger
    assert chosen.gpus < max(sizes, key=lambda size: -size.step_seconds).gpus
    for size in larger:
        dearer = size.step_gpu_seconds / chosen.step_gpu_seconds
        assert dearer * 1.05**2 >= chosen.step_seconds / size.step_seconds
    assert plan(job, nodes(128, 8, "NVIDIA-L40S")).gpus == chosen.gpus


def test_more_nodes_cost_balanced_time_and_are_no_veto() -> None:
    there = nodes(64, 8, H100)
    assert plan(spec(QWEN_7B), there).nodes == 1, "a small batch gains too little"
    large = spec(QWEN_7B, training__promptsPerStep=128)
    sizes = Planner(large).curve(inventory(there))
    chosen = next(size for size in sizes if size.chosen)
    assert chosen.nodes > 1
    for size in sizes:
        is_dominating = (
            size.step_seconds < chosen.step_seconds
            and size.step_gpu_seconds < chosen.step_gpu_seconds
        )
        assert not is_dominating
    assert plan(spec(LLAMA_70B, adapter__use="Never"), there).nodes > 1


def test_balanced_takes_idle_gpus_of_its_node_where_they_spare_a_full_gpu_or_an_offloaded_optimizer() -> (  # noqa: E501
    None
):
    roomy = plan(spec(QWEN_32B), nodes(1, 8, H100))
    full = plan(spec(QWEN_32B), nodes(1, 2, H100))
    assert filled(roomy) < 0.9 < filled(full)
    assert roomy.gpus > full.gpus
    assert seconds(roomy) < seconds(full)
    idle, none_idle = (plan(spec(QWEN_7B), nodes(1, count, "NVIDIA-L40S")) for count in (8, 4))
    assert (idle.offload, none_idle.offload) == ("None", "CPU")
    assert seconds(idle) < seconds(none_idle)


def test_cheapest_is_the_least_price_of_a_step() -> None:
    job, fast, slow = {"placement__objective": "Cheapest"}, nodes(1, 8, H100), nodes(1, 8, L4)
    assert (
        plan(
            spec(LLAMA_1B, **job),
            replace(fast, gpu_hour_price=3.0),
            replace(slow, gpu_hour_price=0.2),
        ).gpu_product
        == L4
    )
    dear = plan(
        spec(LLAMA_1B, **job), replace(fast, gpu_hour_price=3.0), replace(slow, gpu_hour_price=3.0)
    )
    assert dear.gpu_product == H100
    known = plan(spec(LLAMA_1B, **job), fast, replace(slow, gpu_hour_price=3.0))
    assert known.gpu_product == L4
    assert any(
        text.startswith(f"{H100} has no price, which objective Cheapest needs")
        for text in known.warnings
    )
    nowhere = result(spec(LLAMA_1B, **job), fast, slow)
    assert nowhere.reason == PlanReason.NO_GPUS
    assert "grpo.dev/gpu-hour-price" in nowhere.message
    assert nowhere.hardware is None, "others have no price either"


def test_the_curve_counts_gpu_hours_and_their_price() -> None:
    job, priced = spec(LLAMA_1B, training__maxSteps=1000), nodes(1, 8, H100, gpu_hour_price=2.0)
    sizes = Planner(job).curve(inventory(priced))
    assert [size.gpus for size in sizes] == [1, 2, 4, 8]
    for size in sizes:
        assert size.gpu_hours == pytest.approx(1000 * size.gpus * size.step_seconds / 3600)
        assert size.price == pytest.approx(2 * (size.gpu_hours or 0))
        assert 0 <= size.headroom < 1
    bare = Planner(spec(LLAMA_1B)).curve(inventory(nodes(1, 8, H100)))
    assert {(size.gpu_hours, size.price) for size in bare} == {(None, None)}
    assert Planner(spec(LLAMA_70B, adapter__use="Never")).curve(inventory(nodes(1, 1, L4))) == []


def test_the_curve_counts_the_gpus_of_engines_at_their_price() -> None:
    servers = {"replicas": 2, "gpusPerReplica": 2, "gpuProduct": L4}
    generation = {"engine": "Servers", "servers": servers}
    job = spec(LLAMA_1B, training__maxSteps=1000, generation=generation)
    trainers = nodes(1, 4, H100, gpu_hour_price=3.0)
    for price in (0.5, 0.0):
        sizes = Planner(job).curve(inventory(trainers, nodes(1, 8, L4, gpu_hour_price=price)))
        assert [(size.gpus, size.engine_gpus) for size in sizes] == [(1, 4), (2, 4), (4, 4)]
        for size in sizes:
            hours = 1000 * size.step_seconds / 3600
            assert size.gpu_hours == pytest.approx((size.gpus + 4) * hours)
            expected = (size.gpus * 3.0 + 4 * price) * hours if price else None
            assert size.price == pytest.approx(expected)


def test_room_on_the_gpu_is_worth_time_except_to_fastest() -> None:
    job = {
        "adapter__use": "Never",
        "placement__gpus": {"min": 8, "max": 8},
        "generation__engine": "Transformers",
    }
    there = nodes(1, 8, A100)
    fastest = plan(spec(QWEN_7B, **job, placement__objective="Fastest"), there)
    chosen = plan(spec(QWEN_7B, **job), there)
    assert filled(fastest) > 0.9
    assert filled(chosen) <= 0.8
    assert seconds(fastest) < seconds(chosen) <= 1.25 * seconds(fastest)


def test_an_optimizer_in_host_memory_is_taken_before_a_full_gpu() -> None:
    job = {"training__beta": 0}
    there = nodes(1, 8, A100)
    fastest = plan(spec(QWEN_32B, **job, placement__objective="Fastest"), there)
    chosen = plan(spec(QWEN_32B, **job), there)
    assert (fastest.offload, chosen.offload) == ("None", "CPU")
    assert filled(fastest) > 0.97
    assert filled(chosen) <= 0.9
    assert seconds(chosen) <= 1.25 * seconds(fastest)


def test_the_page_has_the_factors_that_the_search_counts() -> None:
    page = " ".join(PAGE.read_text().split())

    def percent(factor: float) -> str:
        return f"{factor - 1:.0%}".replace("%", " %")

    roomy, nearly_full, full = (f"{share:.0%}".replace("%", " %") for share in SHARES[:-1])
    crowded = "; ".join(map(percent, CROWDED[1:]))
    rows = [
        f"more than {roomy} of a GPU; more than {nearly_full}; more than {full} | {crowded} |",
        f"offloads its optimizer | {percent(OFFLOADED)} |",
        f"in host memory | {percent(WEIGHTS_OFFLOADED)} |",
        f"has several nodes | {percent(SEVERAL_NODES)} |",
        f"by ZeRO-2; by ZeRO-3 | {percent(PARTITIONED[2])}; {percent(PARTITIONED[3])} |",
        f"more than {LONGEST_STEP / HOUR:.0f} hours",
        f"more than {LONGEST_RUN / DAY:.0f} days",
    ]
    assert [row for row in rows if row not in page] == []


ENGINES: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"engine": "Auto"},
        {"engine": "Colocated"},
        {"engine": "Colocated", "tensorParallel": 2},
        {"engine": "Colocated", "tensorParallel": 4},
        {"engine": "Servers", "servers": {"replicas": 1, "gpusPerReplica": 2}},
    ]
)
TWO_GPUS = {"engine": "Colocated", "tensorParallel": 2}
SERVERS = {"engine": "Servers", "servers": {"replicas": 3, "gpusPerReplica": 2}}


@settings(max_examples=cases(80, gate=8))
# Two nodes of three GPUs have no two of them for each engine, three nodes of two have.
@example((3, 3, 1024), TWO_GPUS, (4, 3), "Never", 6)
# Servers take host memory of no trainer's node.
@example((2, 8, 48), SERVERS, (8, 2), "Never", None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(8, 128)),
    ENGINES,
    st.sampled_from([(4, 2), (4, 3), (8, 2)]),
    st.sampled_from(["Never", "Always"]),
    st.sampled_from([None, 4, 6, 8]),
)
def test_no_pinned_number_of_nodes_is_faster_than_the_chosen_one(
    group: tuple[int, int, int],
    engine: dict[str, Any],
    batch: tuple[int, int],
    adapter: str,
    gpus: int | None,
) -> None:
    count, node_gpus, host_gib = group
    there = nodes(count, node_gpus, A100, host_gib)
    generations, prompts = batch
    changes: dict[str, Any] = {
        "training__numGenerations": generations,
        "training__promptsPerStep": prompts,
        # Of one tier, so that time alone decides.
        "training__optimizer": "AdamW",
        "adapter__use": adapter,
        "generation": engine,
        "placement__objective": "Fastest",
    }
    if gpus:
        changes["placement__gpus"] = {"min": gpus, "max": gpus}
    answers = [
        result(spec(QWEN_7B, **changes | {"placement__nodes": number}), there)
        for number in range(1, count + 1)
    ]
    answer = result(spec(QWEN_7B, **changes), there)
    times = [seconds(pinned.chosen) for pinned in answers if pinned.chosen]
    assert bool(answer.chosen) == bool(times), answer.message
    if answer.chosen:
        assert seconds(answer.chosen) <= min(times) * (1 + 1e-6)
