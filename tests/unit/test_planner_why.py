"""Why this plan: one sentence with the two numbers that decided, true to the table below it."""

import re
from io import StringIO
from itertools import product
from typing import Any

import pytest
from rich.console import Console

from grpo_cli.show.size_table import show_sizes
from grpo_planner.explain.explain import decision_message
from grpo_planner.plan import Planner, plan_job
from grpo_planner.result.result import PlanResult
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
    spec,
)

MODELS = (LLAMA_1B, QWEN_7B, QWEN_32B, LLAMA_70B)
CLUSTERS = ((1, 1, H100), (1, 8, H100), (1, 4, L4), (2, 8, A100))


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


KNEE = "the knee: more GPUs would cost more than they save"


@pytest.mark.parametrize(
    ("changes", "gpus", "rule"),
    [
        ({}, 8, KNEE),
        ({"placement__objective": "Fastest"}, 8, "objective Fastest"),
        ({"placement__objective": "FewestGPUs"}, 8, "objective FewestGPUs"),
        ({"placement__objective": "Cheapest"}, 8, "objective Cheapest"),
        ({"placement__gpus": {"min": 4, "max": 4}}, 8, "as many GPUs as asked for"),
        ({}, 1, "no other number of GPUs fits"),
        ({}, 2, "the most GPUs that there are: they save more than they cost"),
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


def test_an_adapter_that_was_not_asked_for_is_explained() -> None:
    answer = plan_job(spec(QWEN_32B), inventory(nodes(1, 1, H100, host_gib=100)))
    assert answer.chosen is not None
    assert answer.chosen.method == "LoRA"
    assert re.match(
        r"an adapter, because training all parameters needs [0-9.]+ GiB of host memory per node, "
        r"has 100.0 GiB",
        decision_message(answer),
    )


def test_what_was_compared_with_nothing_has_no_reason() -> None:
    chosen = plan_job(spec(LLAMA_1B), inventory(nodes(1, 8, H100)))
    assert (
        decision_message(PlanResult(**dict(chosen) | {"candidates": chosen.candidates[:1]})) == ""
    )
