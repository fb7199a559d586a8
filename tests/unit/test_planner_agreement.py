"""All that is said of one plan says the same, and whoever allows more gets nothing worse."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_planner.explain.explain import decision_message
from grpo_planner.explain.fixes import with_value
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.plan import Planner, plan_job
from grpo_planner.result.formatting import brief_plan_name
from grpo_planner.time.step_time import headline_message
from tests.generated import cases
from tests.unit.planning import A10G, nodes, plan, spec
from tests.unit.test_planner_properties import GROUPS, cost, is_consent, jobs

FEW = settings(max_examples=cases(100, gate=8))
ADVICE = r"would take ([0-9]+) s; set spec\.placement\.gpus\.min to ([0-9]+)$"
ROUNDING = 0.01
"""Estimates are published in hundredths of a second."""


@FEW
@given(job=jobs(), group=GROUPS)
def test_table_sentence_sizes_and_warnings_say_the_same(job: GRPOJobSpec, group: Node) -> None:
    there = Inventory((group,))
    answer = plan_job(job, there)
    chosen = answer.chosen
    sizes = Planner(job).curve(there) if answer.feasible else []
    if chosen is None or chosen.memory is None:
        assert not any(size.chosen for size in sizes)
        if answer.candidates and "the nearest" in answer.message:
            name = brief_plan_name(answer.candidates[0])
            assert f"the nearest, {name} on" in answer.message.replace("full 8-bit", "full")
        return
    step = chosen.estimated_step_seconds
    assert step is not None
    assert answer.candidates[0].estimated_step_seconds == step
    share = chosen.memory.device_bytes / chosen.memory.usable_bytes
    (taken,) = [size for size in sizes if size.chosen]
    assert (taken.gpus, taken.nodes, taken.rule) == (chosen.gpus, chosen.nodes, answer.rule)
    assert taken.step_seconds == step
    rows = [row.estimated_step_seconds for row in answer.candidates]
    times = {f"{seconds:.{digits}f}" for seconds in rows if seconds for digits in (1, 2)}
    rivals = re.findall(r"would take ([0-9.]+) s", chosen.reason)
    assert times.issuperset(rivals)
    assert f"{step:.1f}" not in rivals or rows.count(step) > 1
    has_engines = bool(re.search("vLLM (Colocated|Servers)", chosen.reason))
    assert ("no GPU has confirmed" in chosen.reason) == has_engines
    assert taken.headroom == pytest.approx(1 - share, abs=1e-3)
    why = decision_message(answer)
    if compared := re.match(r"([0-9.]+) s per step", why):
        assert float(compared[1]) == pytest.approx(step, abs=0.051)
        assert f"({answer.rule})" in why
    low, high = re.findall(r"[0-9.]+", headline_message(chosen).rpartition(": ")[2])[:2]
    assert f"{low} to {high} s per step" in chosen.reason
    others = {size.gpus: size for size in sizes}
    for text in chosen.warnings:
        if estimated := re.match(r"a step is estimated at ([0-9]+) s", text):
            assert float(estimated[1]) == pytest.approx(step, abs=0.51)
        if filled := re.match(r"the plan takes ([0-9]+)% of each GPU", text):
            assert float(filled[1]) == pytest.approx(100 * share, abs=0.51)
        if advised := re.search(ADVICE, text):
            size = others[int(advised[2])]
            assert float(advised[1]) == pytest.approx(size.step_seconds, abs=0.51), text


@pytest.mark.parametrize(
    ("model", "there", "strategy", "training"),
    [
        ("Qwen/Qwen2.5-7B", nodes(4, 8, A10G, host_gib=2000), "Sharded",
         {"maxCompletionLength": 8192, "maxPromptLength": 2048, "maxSteps": 100,
          "promptsPerStep": 128, "numGenerations": 64}),
        ("Qwen/Qwen2.5-0.5B", nodes(1, 3, "NVIDIA-A100-SXM4-40GB", host_gib=88,
                                    gpu_memory_mib=40960), "Auto",
         {"maxCompletionLength": 2048, "maxPromptLength": 2048, "beta": 0.04, "numIterations": 2,
          "promptsPerStep": 256, "numGenerations": 64}),
    ],
)  # fmt: skip
def test_advised_gpus_are_planned_with_the_time_that_is_stated(
    model: str, there: Node, strategy: str, training: dict[str, Any]
) -> None:
    """Of the plans on as many GPUs an objective may take another than the fastest."""
    asked: dict[str, Any] = {
        "training": training,
        "reference__strategy": strategy,
        "adapter__use": "Never",
        "placement__objective": "FewestGPUs",
    }
    few = plan(spec(model, **asked), there)
    (advice,) = filter(None, (re.search(ADVICE, text) for text in few.warnings))
    stated, gpus = map(int, advice.groups())
    obeyed = plan(spec(model, **asked, placement__gpus={"min": gpus}), there)
    assert obeyed.gpus == gpus
    assert obeyed.estimated_step_seconds == pytest.approx(stated, abs=0.51)


def best_cost(job: GRPOJobSpec, *groups: Node) -> tuple[tuple[int, float, float], ExecutionPlan]:
    """What the plan costs by the job's objective."""
    chosen = plan_job(job, Inventory(groups)).chosen
    assume(chosen is not None and chosen.memory is not None)
    assert chosen is not None
    return cost(job, chosen, groups[0].gpu_hour_price), chosen


def require_no_worse(
    job: GRPOJobSpec, before: Node, after: Node, freed: GRPOJobSpec | None = None
) -> None:
    """A job on the nodes after has a plan that costs no more than that on the nodes before."""
    old, old_plan = best_cost(job, before)
    answer = plan_job(freed or job, Inventory((after,)))
    assert answer.chosen is not None, answer.message
    new = cost(job, answer.chosen, after.gpu_hour_price)
    assert new[0] <= old[0]
    if new[0] == old[0]:
        assert new[1] <= old[1]
        if new[1] == old[1]:
            assert new[2] <= old[2] * (1 + ROUNDING) + ROUNDING, (old_plan, answer.chosen)


PRICED = st.builds(replace, GROUPS, gpu_hour_price=st.just(2.0))


@FEW
@given(job=jobs(), group=PRICED, more=st.integers(1, 4))
def test_more_nodes_are_never_worse(job: GRPOJobSpec, group: Node, more: int) -> None:
    require_no_worse(job, group, replace(group, count=group.count + more))


@FEW
@given(
    job=jobs(),
    group=PRICED,
    name=st.sampled_from(["node_gbps", "gpu_gbps"]),
    speed=st.sampled_from([1.25, 12.5, 50.0]),
    times=st.sampled_from([1.5, 4.0]),
)
def test_faster_links_are_never_worse(
    job: GRPOJobSpec, group: Node, name: str, speed: float, times: float
) -> None:
    slow: dict[str, Any] = {name: speed}
    fast: dict[str, Any] = {name: times * speed}
    require_no_worse(job, replace(group, **slow), replace(group, **fast))


PINS: dict[str, list[Any]] = {
    "spec.generation.engine": ["Transformers", "Colocated"],
    "spec.reference.strategy": ["Clone", "Sharded", "Offload"],
    "spec.training.optimizer": ["AdamW"],
    "spec.training.gradientCheckpointing": ["Enabled", "Disabled"],
    "spec.training.perDeviceTrainBatchSize": [1, 2],
    "spec.adapter.use": ["Never", "Always"],
    "spec.placement.nodes": [1, 2],
    "spec.placement.gpus": [{"min": 2, "max": 2}, {"min": 1, "max": 4}],
}


@FEW
@given(
    job=jobs(),
    group=PRICED,
    pin=st.sampled_from(sorted(PINS)).flatmap(
        lambda path: st.tuples(st.just(path), st.sampled_from(PINS[path]))
    ),
)
def test_one_more_allowed_way_is_never_worse(
    job: GRPOJobSpec, group: Node, pin: tuple[str, Any]
) -> None:
    path, value = pin
    free = with_value(job, path, None)
    try:
        pinned = with_value(job, path, value)
    except ValueError:
        assume(False)
    assume(not is_consent(job, path, value, plan_job(free, Inventory((group,)))))
    # A pinned adapter is what was asked for, and training all parameters is not worse.
    require_no_worse(pinned, group, group, free)
