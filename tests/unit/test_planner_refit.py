"""A run that goes on keeps its split, whatever became of its spec; what excludes the split is
named."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import Learned
from grpo_api.plan.plan import ExecutionPlan
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.replan.past_run import Run
from grpo_planner.replan.refit import PlanExcluded, refit
from tests.generated import cases
from tests.unit.planning import A100, H100, L4, LLAMA_1B, QWEN_7B, T4, inventory, nodes, plan, spec

THERE = inventory(nodes(2, 8, H100), nodes(2, 8, A100), nodes(4, 4, L4), nodes(4, 8, T4))
WHERE = (
    "gpu_product",
    "gpu_resource",
    "node_selector",
    "memory",
    "host_memory_bytes",
    "estimated_step_seconds",
    "link_bytes_per_second",
)


def begun(model: str = QWEN_7B, **changes: Any) -> ExecutionPlan:
    """The plan that a run began with, on eight H100 of one node."""
    settings_ = {
        "placement__gpuProduct": H100,
        "placement__gpus": {"min": 8, "max": 8},
        "placement__nodes": 1,
    }
    return plan(spec(model, **settings_, **changes), *THERE.nodes)


def split(one: ExecutionPlan) -> dict[str, Any]:
    """What a checkpoint demands."""
    return one.model_dump(exclude={*WHERE, "reason", "warnings"})


def test_nothing_changes_where_nothing_concerns_it() -> None:
    kept = begun()
    assert refit(kept, spec(QWEN_7B), THERE) is kept
    assert refit(kept, spec(QWEN_7B, placement__gpuProduct="NVIDIA-H100"), THERE) is kept


def test_another_product_that_takes_the_plan_gets_it() -> None:
    kept = begun()
    moved = refit(kept, spec(QWEN_7B, placement__gpuProduct=A100), THERE)
    assert (moved.gpu_product, moved.node_selector) == (A100, {"nvidia.com/gpu.product": A100})
    assert split(moved) == split(kept)
    assert moved.memory is not None
    assert kept.memory is not None
    assert moved.memory.device_bytes == kept.memory.device_bytes
    assert kept.link_bytes_per_second == 315_000_000_000
    assert moved.link_bytes_per_second == 210_000_000_000, "an A100's NVLink, 70 % of it"


@pytest.mark.parametrize(
    ("product", "says"),
    [
        (L4, "NVIDIA-L4 has .* GiB per GPU, where .* GiB are needed"),
        (T4, "Tesla-T4 has compute capability 7.5 and so no bfloat16"),
        ("NVIDIA-B200", "no node has such GPUs"),
    ],
)
def test_a_product_that_does_not_take_the_plan_is_named(product: str, says: str) -> None:
    with pytest.raises(
        PlanExcluded, match=rf"spec.placement.gpuProduct .*{says}.* set it back to {H100}"
    ):
        refit(begun(), spec(QWEN_7B, placement__gpuProduct=product), THERE)


def test_cards_without_bfloat16_do_not_take_a_plan_with_it_whatever_the_image() -> None:
    with pytest.raises(PlanExcluded, match="Tesla-T4 has no bfloat16"):
        refit(begun(), spec(QWEN_7B, placement__gpuProduct=T4, image="trainer:1"), THERE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"placement__nodes": 2}, "set spec.placement.nodes, which is 2, to 1"),
        ({"placement__gpus": {"max": 4}}, "set spec.placement.gpus.max, which is 4, to 8 at least"),
        (
            {"placement__gpus": {"min": 16}},
            "set spec.placement.gpus.min, which is 16, to 8 at most",
        ),
        (
            {
                "placement": {
                    "provisioning": "CreatePods",
                    "gpuProduct": H100,
                    "nodeSelector": {"pool": "h100"},
                    "nodes": 1,
                    "gpusPerNode": 4,
                }
            },
            "set spec.placement.gpusPerNode, which is 4, to 8 at least",
        ),
    ],
)
def test_an_extent_that_excludes_the_plan_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanExcluded, match=says):
        refit(begun(), spec(QWEN_7B, **changes), THERE)


def test_on_cpus_unset_fields_exclude_a_gang_of_several() -> None:
    cpus = {"placement": {"accelerator": "CPU", "nodes": 2, "processesPerNode": 3}}
    job = spec(LLAMA_1B, training__numGenerations=6, **cpus)
    kept = plan(job)
    assert refit(kept, job, Inventory()) is kept
    with pytest.raises(PlanExcluded) as excluded:
        refit(
            kept,
            spec(LLAMA_1B, training__numGenerations=6, placement={"accelerator": "CPU"}),
            Inventory(),
        )
    assert "set spec.placement.nodes, which is unset, to 2" in str(excluded.value)
    assert "set spec.placement.processesPerNode, which is unset, to 3" in str(excluded.value)


def test_the_memory_request_follows_the_spec() -> None:
    kept = begun(resources__requests={"memory": "512Gi"})
    assert (
        refit(kept, spec(QWEN_7B, resources__requests={"memory": "64Gi"}), THERE).host_memory_bytes
        == 64 * 2**30
    )
    freed = refit(kept, spec(QWEN_7B), THERE)
    assert freed.host_memory_bytes == begun().host_memory_bytes


@settings(max_examples=cases(60))
@given(
    product=st.sampled_from([None, H100, A100, L4, T4, "NVIDIA"]),
    count=st.sampled_from([None, 1, 2]),
    gpus=st.sampled_from([None, {"min": 1}, {"max": 8}, {"min": 8, "max": 16}, {"max": 4}]),
    memory=st.sampled_from([None, "8Gi", "600Gi"]),
)
def test_whatever_is_changed_the_split_stays_or_is_refused(
    product: str | None, count: int | None, gpus: dict[str, int] | None, memory: str | None
) -> None:
    changes: dict[str, Any] = {
        "placement__gpuProduct": product,
        "placement__nodes": count,
        "placement__gpus": gpus,
    }
    if memory:
        changes["resources__requests"] = {"memory": memory}
    job = spec(QWEN_7B, **{path: value for path, value in changes.items() if value is not None})
    kept = begun()
    try:
        found = refit(kept, job, THERE)
    except PlanExcluded:
        assert (product, count, gpus) != (None, None, None)
        return
    assert split(found) == split(kept)
    assert found.gpu_product.startswith(product or "")
    assert refit(found, job, THERE) is found


def test_the_engine_follows_the_spec_while_the_split_stays() -> None:
    kept = begun(generation__engine="Auto")
    assert kept.engine is not None
    assert refit(kept, spec(QWEN_7B, generation__engine="Auto"), THERE) is kept
    transformers = spec(QWEN_7B, generation__engine="Transformers")
    plain = refit(kept, transformers, THERE)
    assert plain.engine is None
    assert plain.memory is not None
    assert plain.memory.phases.model_dump() == Run(plain, transformers, Learned()).prediction.phases
    assert plain.memory.phases.sync == 0
    assert plain.host_memory_bytes == kept.host_memory_bytes - 8 * 2**30
    bound = {*WHERE, "engine", "reason", "generation_sub_batch", "warnings"} - {"gpu_product"}
    for wanted in (
        {"engine": "Colocated", "sleep": True},
        {"engine": "Colocated", "memoryShare": 0.3},
        {"engine": "Servers", "servers": {"replicas": 2, "gpuProduct": A100}},
        {"engine": "Servers"},
    ):
        other = refit(plain, spec(QWEN_7B, generation=wanted), THERE)
        assert other.engine is not None
        assert other.engine.kind == wanted["engine"]
        assert other.model_dump(exclude=bound) == plain.model_dump(exclude=bound)
        assert refit(other, spec(QWEN_7B, generation=wanted), THERE) is other
        assert other.memory is not None
        assert other.memory.phases.sync > 0


def test_an_engine_without_room_beside_the_split_is_named() -> None:
    many = {"engine": "Servers", "servers": {"replicas": 30}}
    with pytest.raises(
        PlanExcluded, match=r"spec.generation.engine Servers: beside the split .* no room"
    ):
        refit(begun(), spec(QWEN_7B, generation=many), THERE)


@pytest.mark.parametrize("engine", ["Colocated", "Servers"])
def test_an_engine_on_cpus_comes_and_goes_with_the_spec(engine: str) -> None:
    cpus = {"placement": {"accelerator": "CPU"}}
    plain, engined = (
        plan(spec(LLAMA_1B, generation__engine="Transformers", **cpus)),
        plan(spec(LLAMA_1B, generation__engine=engine, **cpus)),
    )
    asked = spec(LLAMA_1B, generation__engine=engine, **cpus)
    assert refit(engined, asked, THERE) is engined
    again = refit(plain, asked, THERE)
    assert again.engine is not None
    assert again.host_memory_bytes == engined.host_memory_bytes
    back = refit(engined, spec(LLAMA_1B, generation__engine="Transformers", **cpus), THERE)
    assert (back.engine, back.host_memory_bytes) == (None, plain.host_memory_bytes)
