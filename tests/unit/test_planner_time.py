"""The time model ranks candidates, so each of its terms must move as the thing that it stands for
does."""

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import Learned, MeasuredLinks
from grpo_api.plan.plan import ExecutionPlan
from grpo_planner.hardware.inventory import Node
from grpo_planner.hardware.products import lookup_product
from grpo_planner.memory.setup import Setup
from grpo_planner.model.catalogue import lookup_shape as model
from grpo_planner.plan import plan_job
from grpo_planner.time.sampling import decoded_parameters, transformers_seconds
from grpo_planner.time.step_time import StepTime, step_time
from grpo_planner.time.training import LINK_EFFICIENCY
from tests.generated import cases
from tests.unit.planning import H100, L4, LLAMA_1B, QWEN_7B, inventory, nodes, plan, spec

MOE = "Qwen/Qwen3-30B-A3B"
SETUP = Setup(
    precision="bfloat16", prompt=512, completion=512, micro_batch=2, accumulation=4,
    generation_batch=8, world=8, zero=2
)  # fmt: skip


def time(
    setup: Setup = SETUP,
    name: str = QWEN_7B,
    gpus: int = 1,
    calls: float = 1.0,
    product: str = H100,
) -> StepTime:
    """A step of a catalogued model on so many nodes."""
    shape = model(name)
    assert shape is not None
    return step_time(shape, setup, lookup_product(product), gpus, calls)


def test_zero_reduces_after_every_micro_batch_and_ddp_once() -> None:
    more = replace(SETUP, accumulation=8)
    assert time(more).communication == pytest.approx(time().communication * 9 / 5), (
        "and gathers new weights once"
    )
    third = replace(SETUP, zero=3)
    assert time(replace(third, accumulation=8)).communication == pytest.approx(
        time(third).communication * 2
    )
    plain = replace(SETUP, zero=0)
    assert time(replace(plain, accumulation=8)).communication == time(plain).communication


def test_ddp_sends_float32_gradients() -> None:
    """2 (N - 1) / N of 4 bytes per parameter, whether weights or an adapter over bfloat16 weights
    are trained."""
    shape = model(QWEN_7B)
    assert shape is not None
    full, adapter = replace(SETUP, zero=0, precision="mixed"), replace(SETUP, zero=0, lora_rank=16)
    link = 450e9 * LINK_EFFICIENCY
    assert time(full).communication == pytest.approx(2 * 7 / 8 * 4 * shape.parameters / link)
    assert time(adapter).communication == pytest.approx(
        2 * 7 / 8 * 4 * shape.adapter_parameters(16) / link
    )


def test_a_superchip_reaches_the_host_faster_than_pcie() -> None:
    """Gradients, weights and an offloaded reference cross that link; CPU Adam stays as it is."""
    offloaded = replace(SETUP, offload=True, reference="Offload")
    plain, superchip = time(offloaded), time(offloaded, product="NVIDIA-GH200-480GB")
    shape = model(QWEN_7B)
    assert shape is not None
    saved = 2 * shape.parameters * (2 * 4 / 8 + 1) * (1 / 22e9 - 1 / 300e9)
    assert plain.offload - superchip.offload == pytest.approx(saved)


def test_the_prompts_pass_costs() -> None:
    """With one completion token, generation is prefill: it grows with the prompts although nothing
    else does."""
    one = replace(SETUP, completion=1, generation_batch=64)
    assert (
        time(replace(one, prompt=4096)).generation > 4 * time(replace(one, prompt=512)).generation
    )


def test_a_decode_batch_reads_all_experts_that_it_touches() -> None:
    shape = model(MOE)
    assert shape is not None
    assert decoded_parameters(shape, 1) == pytest.approx(shape.active_parameters)
    assert decoded_parameters(shape, 64) > 0.95 * shape.parameters
    dense = model(QWEN_7B)
    assert dense is not None
    assert decoded_parameters(dense, 64) == dense.parameters
    alone = replace(SETUP, generation_batch=1, prompt=1, completion=16)
    many = replace(alone, generation_batch=64)
    assert time(many, MOE, product=L4).generation > 5 * time(alone, MOE, product=L4).generation


def test_without_gather_the_model_is_sent_for_every_token_of_every_call() -> None:
    apart = replace(SETUP, zero=3, gather=False)
    assert time(apart, calls=4).gathering == pytest.approx(4 * time(apart, calls=1).gathering)
    gathered = time(replace(apart, gather=True)).gathering
    assert time(apart).gathering == pytest.approx(512 * gathered), "expected: all tokens"
    assert time().gathering == 0


def test_layers_gathered_one_by_one_wait_for_the_network_however_small_they_are() -> None:
    tiny = replace(SETUP, zero=3, gather=False)
    shape = model(LLAMA_1B)
    assert shape is not None
    assert time(tiny, LLAMA_1B, gpus=2).gathering > 512 * shape.layers * 100e-6


def test_offloaded_gradients_pass_the_host_link_after_every_micro_batch() -> None:
    shape = model(QWEN_7B)
    assert shape is not None
    host = replace(SETUP, offload=True)
    more = time(replace(host, accumulation=5)).offload - time(replace(host, accumulation=4)).offload
    assert more == pytest.approx(2 * 2 * shape.parameters / 8 / 22e9), (
        "the sum so far comes, and goes again"
    )


def test_an_offloaded_reference_under_zero_3_is_streamed_for_every_micro_batch() -> None:
    host = replace(SETUP, zero=3, reference="Offload")
    assert time(replace(host, accumulation=8)).offload == pytest.approx(2 * time(host).offload)


def test_a_declared_network_decides_what_several_nodes_cost() -> None:
    """8 nodes of one L4 are not 1 node of 8, and 10 Gbit/s Ethernet is not NVLink."""
    wanted = {"placement__gpus": {"min": 8, "max": 8}, "training__beta": 0.0}
    one, eight = nodes(1, 8, L4), nodes(8, 1, L4)
    job = spec(LLAMA_1B, **wanted)

    def seconds(group: Node) -> float:
        return plan(job, group).estimated_step_seconds or 0.0

    assert seconds(eight) > 1.05 * seconds(one)
    assert (
        seconds(replace(eight, node_gbps=1.25))
        > seconds(eight)
        > seconds(replace(eight, node_gbps=25.0))
    )
    fast, slow = nodes(1, 8, H100), nodes(1, 8, H100, gpu_gbps=10.0)
    assert seconds(slow) > seconds(fast)


@pytest.mark.parametrize(("over", "declared"), [(2, {"node_gbps": 2.0}), (1, {"gpu_gbps": 20.0})])
def test_what_an_attempt_measured_is_as_good_as_declared_and_what_is_declared_stays(
    over: int, declared: dict[str, Any]
) -> None:
    group, job = nodes(2, 8, H100), spec(QWEN_7B, placement__nodes=over, placement__gpus={"min": 8})
    speed = round(LINK_EFFICIENCY * 1e9 * next(iter(declared.values())))
    links = MeasuredLinks(gpu_product=H100, nodes=over, bytes_per_second=speed)
    known = Learned(links=links)
    measured = plan_job(job, inventory(group), learned=known).chosen
    assert measured == plan(job, replace(group, **declared))
    assert measured != plan(job, group)
    twice = replace(group, **{name: 2 * value for name, value in declared.items()})
    assert plan_job(job, inventory(twice), learned=known).chosen == plan(job, twice)
    others = known.model_copy(update={"links": links.model_copy(update={"gpu_product": L4})})
    assert plan_job(job, inventory(group), learned=others).chosen == plan(job, group)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_completions_are_scored_once_however_often_they_are_trained_on(zero: Any) -> None:
    def scoring(iterations: int) -> float:
        setup = replace(SETUP, zero=zero, iterations=iterations)
        scored = replace(setup, reference="Sharded", scores_old_policy=True)
        times = time(scored), time(setup)
        ours, without = (one.compute + one.communication for one in times)
        return ours - without

    assert scoring(4) == pytest.approx(scoring(1) / 4)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_an_offloaded_reference_comes_once_however_often_completions_are_trained_on(
    zero: Any,
) -> None:
    once = replace(SETUP, zero=zero, reference="Offload")
    assert time(replace(once, iterations=4)).offload == pytest.approx(time(once).offload / 4)


@pytest.mark.parametrize("product", [L4, H100])
def test_an_engine_that_is_compared_with_costs_the_policy_a_pass(product: str) -> None:
    """TRL computes the policy's log-probabilities of all that an engine has sampled."""

    def chosen(mode: str) -> ExecutionPlan:
        sampling = {"training__importanceSampling": {"mode": mode}}
        job = spec(LLAMA_1B, generation__engine="Colocated", training__beta=0, **sampling)
        return plan(job, nodes(1, 1, product))

    compared, alone = chosen("truncate"), chosen("none")
    assert compared.memory is not None
    assert alone.memory is not None
    assert compared.memory.phases.reference > 0
    assert (compared.estimated_step_seconds or 0) > 1.05 * (alone.estimated_step_seconds or 0)


@settings(max_examples=cases(200, gate=10))
@given(
    st.sampled_from([QWEN_7B, MOE, LLAMA_1B]),
    st.sampled_from([H100, L4]),
    st.integers(1, 4000),
    st.integers(1, 2000),
    st.sampled_from([(1, 64), (60, 64), (300, 1024), (20000, 20000)]),
)
def test_no_batch_is_faster_than_the_bound_of_a_range_of_sizes(
    name: str, product: str, whole: int, prompt: int, lengths: tuple[int, int]
) -> None:
    """generate() on `whole` completions in calls of one size, against the bound of all sizes."""
    shape, hardware = model(name), lookup_product(product)
    assert shape is not None
    expected, limit = lengths
    setup = replace(SETUP, prompt=prompt, completion=limit, expected=expected)
    sizes = sorted({ceil(whole / rounds) for rounds in (1, 2, 3, 7, 30, 500)})
    times = [
        transformers_seconds(
            shape, replace(setup, generation_batch=size), hardware, ceil(whole / size)
        )
        for size in sizes
    ]
    largest = replace(setup, generation_batch=sizes[-1])
    bound = transformers_seconds(shape, largest, hardware, 1, smallest=sizes[0])
    assert bound <= min(times) * (1 + 1e-9)
