"""Why this plan: one sentence with the two numbers that decided, true to the table below it."""

import re
from collections.abc import Callable
from io import StringIO
from itertools import product
from math import prod
from typing import Any

import pytest
from rich.console import Console

from grpo_api.plan.plan import ExecutionPlan
from grpo_cli.show.size_table import show_sizes
from grpo_planner.explain.explain import decision_message
from grpo_planner.plan import Planner, plan_job
from grpo_planner.result.formatting import brief_plan_name
from grpo_planner.result.result import PlanResult
from tests.unit.planning import (
    A100,
    H100,
    H200,
    L4,
    LLAMA_1B,
    LLAMA_70B,
    QWEN_7B,
    QWEN_32B,
    counted_risk,
    inventory,
    nodes,
    plan,
    spec,
)

MODELS = (LLAMA_1B, QWEN_7B, QWEN_32B, LLAMA_70B)
A100_40GB = "NVIDIA-A100-SXM4-40GB"
CLUSTERS = ((1, 1, H100), (1, 8, H100), (1, 4, L4), (2, 8, A100))


def test_nothing_else_fits_is_said_only_where_no_adapter_does() -> None:
    one_slice = nodes(1, 1, f"{H100}-MIG-1g.10gb", gpu_memory_mib=9728)
    for use, sentence in (
        ("IfNeeded", "nothing else that departs as little from the spec fits: "),
        ("Never", "nothing else fits: "),
    ):
        answer = plan_job(spec("Qwen/Qwen2.5-1.5B", adapter__use=use), inventory(one_slice))
        has_adapter = any(row.method == "LoRA" for row in answer.candidates)
        assert has_adapter == (use == "IfNeeded")
        assert decision_message(answer).startswith(sentence)


@pytest.mark.parametrize(("model", "cluster"), [*product(MODELS, CLUSTERS)], ids=str)
def test_every_plan_says_which_two_numbers_decided(
    model: str, cluster: tuple[int, int, str]
) -> None:
    answer = plan_job(spec(model), inventory(nodes(*cluster)))
    sentence = decision_message(answer)
    if answer.chosen is None:
        assert sentence == ""
        return
    rivals = [
        other
        for other in answer.candidates[1:]
        if other.rejected and other.rejected.message in sentence
    ]
    assert rivals, sentence
    numbers = set(re.findall(r"[0-9]+\.[0-9]", sentence))
    times = {
        f"{plan.estimated_step_seconds:.1f}"
        for plan in (answer.chosen, rivals[0])
        if plan.estimated_step_seconds
    }
    assert len(numbers) >= 2
    assert times <= numbers or "needs" in sentence


OBJECTIVES = ("Balanced", "FewestGPUs", "Cheapest", "Fastest")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_a_rejected_plan_has_more_of_outweighs_the_time_that_it_saves(
    model: str, objective: str
) -> None:
    """The named costs alone, beside all that speaks for the plan, let it lose."""
    job = spec(model, placement__objective=objective)
    there = [nodes(2, 8, H100, gpu_hour_price=3.0), nodes(1, 8, A100, gpu_hour_price=1.2)]
    answer = plan_job(job, inventory(*there))
    assert answer.chosen is not None
    for other in answer.candidates[1:]:
        assert other.rejected is not None
        message = other.rejected.message
        if other.rejected.reason in ("Slower", "NoBetter"):
            factors = counted_factors(other, answer.chosen, objective)
            named = prod(factors[cost] for cost in factors if re.search(cost, message))
            benefits = prod(min(1.0, factor) for factor in factors.values())
            assert named * benefits * seconds(other) > 0.99 * seconds(answer.chosen), message


def counted_factors(plan: ExecutionPlan, other: ExecutionPlan, objective: str) -> dict[str, float]:
    """By how much more an objective counts a plan than another for each cost that a verdict may
    name."""
    if objective == "Fastest":
        return {}
    gpus = plan.gpus / other.gpus
    prices = (plan.gpu_hour_price or 1) / (other.gpu_hour_price or 1)
    gpus_factor = {"Balanced": gpus**0.5, "Cheapest": gpus * prices}.get(objective, gpus**9)
    factors = {"GPUs instead of|its GPUs cost": gpus_factor}
    causes: dict[str, Callable[[ExecutionPlan], dict[str, Any]]] = {
        "optimizer offload": lambda plan: {"offloads": plan.offload == "CPU"},
        "in host memory": lambda plan: {
            "strategy": plan.strategy,
            "offloads_base": plan.engine is not None and plan.engine.offload_base,
        },
        "[0-9] node": lambda plan: {"nodes": plan.nodes},
        "ZeRO-": lambda plan: {"zero": plan.zero_stage},
        "it fills": lambda plan: {"share": filled(plan)},
    }
    for cost, cause in causes.items():
        risks = [counted_risk(**(NO_RISK | cause(of))) for of in (plan, other)]
        factors[cost] = risks[0] / risks[1]
    return factors


NO_RISK: dict[str, Any] = {
    "share": 0.0, "offloads": False, "strategy": "Clone", "offloads_base": False, "nodes": 1,
    "zero": 0,
}  # fmt: skip


def filled(plan: ExecutionPlan) -> float:
    """Share of a GPU that a plan takes."""
    assert plan.memory is not None
    return plan.memory.device_bytes / plan.memory.usable_bytes


def seconds(plan: ExecutionPlan) -> float:
    """The estimated time of a step."""
    assert plan.estimated_step_seconds is not None
    return plan.estimated_step_seconds


KNEE = "the knee, risks counted: more GPUs would cost more than they save"
MOST = "the most GPUs that the job can have: risks counted, they save more than they cost"


@pytest.mark.parametrize(
    ("changes", "gpus", "rule"),
    [
        ({}, 8, KNEE),
        ({"placement__objective": "Fastest"}, 8, "objective Fastest"),
        ({"placement__objective": "FewestGPUs"}, 8, "objective FewestGPUs"),
        ({"placement__objective": "Cheapest"}, 8, "objective Cheapest, risks counted"),
        ({"placement__gpus": {"min": 4, "max": 4}}, 8, "as many GPUs as asked for"),
        ({}, 1, "no other number of GPUs fits"),
        ({}, 2, MOST),
        ({"placement__gpus": {"max": 2}}, 8, MOST),
    ],
)
def test_the_rule_that_decided_is_named_in_the_sentence_and_below_the_sizes(
    changes: dict[str, Any], gpus: int, rule: str
) -> None:
    job = spec(LLAMA_1B, **changes)
    there = inventory(nodes(1, gpus, H100, gpu_hour_price=2.0))
    answer = plan_job(job, there)
    assert answer.rule == rule
    assert f"s per step ({rule}); " in decision_message(answer)
    sizes = Planner(job).curve(there)
    assert [size.rule for size in sizes if size.chosen] == [rule]
    out = Console(record=True, width=200, file=StringIO())
    show_sizes(out, sizes)
    assert f"CHOSEN: {rule}" in out.export_text()


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_plan_is_compared_with_none_of_its_own_name(gpus: int) -> None:
    """On one GPU without much host memory, only who samples differs."""
    job = spec(QWEN_7B, adapter__use="Never", training__promptsPerStep=16)
    answer = plan_job(job, inventory(nodes(1, gpus, H200, host_gib=48 if gpus == 1 else 1024)))
    assert answer.chosen is not None
    assert answer.chosen.engine is not None
    sentence = decision_message(answer)
    assert "would take" in sentence
    assert f"{brief_plan_name(answer.chosen)} would take" not in sentence


def test_an_adapter_that_was_not_asked_for_is_explained() -> None:
    answer = plan_job(spec(QWEN_32B), inventory(nodes(1, 1, H100, host_gib=100)))
    assert answer.chosen is not None
    assert answer.chosen.method == "LoRA"
    assert re.match(
        r"an adapter, because training all parameters needs [0-9.]+ GiB at forward, has 78.9 GiB; "
        r"host memory [0-9.]+ GiB, has 100.0 GiB",
        decision_message(answer),
    )


def test_an_adapter_that_is_trained_for_time_says_so_and_has_its_sizes() -> None:
    job = spec("Qwen/Qwen3-32B", training__maxCompletionLength=2048, placement__objective="Fastest")
    there = inventory(nodes(4, 1, A100, host_gib=256, node_gbps=1.25))
    answer = plan_job(job, there)
    assert answer.chosen is not None
    assert answer.chosen.method == "LoRA"
    assert "or none in time" in answer.changes[0]
    why = "an adapter, because training all parameters would take [0-9]{5,} s per step"
    assert re.fullmatch(why, decision_message(answer))
    sizes = Planner(job).curve(there)
    assert all(size.method.startswith("LoRA") for size in sizes)
    (chosen,) = [size for size in sizes if size.chosen]
    assert chosen.step_seconds == answer.chosen.estimated_step_seconds


def test_an_adapter_beside_a_pinned_optimizer_names_the_pin() -> None:
    answer = plan_job(spec(training__optimizer="AdamW8bit"), inventory(nodes(1, 4, H100)))
    assert "without ZeRO, which optimizer AdamW8bit excludes" in answer.changes[0]


@pytest.mark.parametrize(
    ("model", "gpus", "setting", "value", "why"),
    [
        (QWEN_7B, 4, "tensorParallel", 8, "28 heads and 4 key heads can't be split over 8 GPUs; 1"),
        (LLAMA_70B, 8, "tensorParallel", 16, "an engine's GPUs are on one node, and none has more"),
        (QWEN_7B, 4, "memoryShare", 0.01, "of 78.9 GiB is too little for an engine, whose weights"),
    ],
)
def test_a_setting_that_leaves_no_engine_a_place_says_why(
    model: str, gpus: int, setting: str, value: float, why: str
) -> None:
    there = nodes(1, gpus, H100, host_gib=2048)
    chosen = plan(spec(model, **{f"generation__{setting}": value}), there)
    assert f"by Transformers: spec.generation.{setting} {value:g}" in chosen.reason
    assert why in chosen.reason


def test_gpus_that_an_engine_can_not_share_evenly_are_transformers() -> None:
    job = spec(
        placement__gpus={"min": 6, "max": 6}, training__promptsPerStep=6,
        generation__tensorParallel=4,
    )  # fmt: skip
    chosen = plan(job, nodes(1, 6, H100))
    reason = "no engine has a place on these GPUs with spec.generation.tensorParallel"
    assert chosen.reason.endswith(f"by Transformers: {reason}")


def test_what_lacks_memory_of_both_kinds_says_so() -> None:
    """With more memory of one kind alone it would still not fit."""
    job = spec(LLAMA_70B, adapter__use="Never", training__optimizer="AdamW")
    answer = plan_job(job, inventory(nodes(1, 8, A100_40GB, host_gib=500)))
    assert re.search(
        r"needs [0-9.]+ GiB per GPU at backward, [0-9.]+ GiB are usable, and [0-9.]+ GiB of host "
        r"memory per node, 500\.0 GiB are there",
        answer.message,
    )
    verdicts = [other.rejected.message for other in answer.candidates if other.rejected]
    assert any(
        re.search(r" at backward, has [0-9.]+ GiB; host memory [0-9.]+ GiB, has 500", verdict)
        for verdict in verdicts
    )


@pytest.mark.parametrize(
    ("model", "host_gib"),
    [(QWEN_32B, 100), (QWEN_32B, 500), (LLAMA_70B, 100), (LLAMA_70B, 500), (LLAMA_70B, 900)],
)
def test_the_nearest_is_the_first_row(model: str, host_gib: int) -> None:
    """Of some the GPU's memory is too small, of others the host's, or both."""
    job = spec(model, adapter__use="Never", training__optimizer="AdamW")
    answer = plan_job(job, inventory(nodes(1, 8, A100_40GB, host_gib=host_gib)))
    assert f"the nearest, {brief_plan_name(answer.candidates[0])} on" in answer.message


def test_what_was_compared_with_nothing_has_no_reason() -> None:
    chosen = plan_job(spec(LLAMA_1B), inventory(nodes(1, 8, H100)))
    assert (
        decision_message(PlanResult(**dict(chosen) | {"candidates": chosen.candidates[:1]})) == ""
    )
