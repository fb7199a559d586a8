"""Which engine a job gets: what Auto takes and why, what pins do, and what holds whatever is asked
for."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import Learned
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.pods.platform import PlatformSpec
from grpo_api.spec.generation import PROVEN_FAMILIES
from grpo_planner.explain.fixes import with_value
from grpo_planner.hardware.products import lookup_product, usable_bytes
from grpo_planner.model.architecture import ModelFacts
from grpo_planner.model.catalogue import model_type
from grpo_planner.model.config import architecture_of
from grpo_planner.model.shapes import families
from grpo_planner.plan import plan_job
from grpo_planner.replan.past_run import Run
from grpo_planner.result.result import PlanReason
from grpo_planner.search import engine_plan, engines
from grpo_planner.search.engine_plan import sampler_name, short_sampler_name
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
    RTX_4090,
    inventory,
    nodes,
    result,
    risk,
)
from tests.unit.planning import plan as planned
from tests.unit.planning import spec as job

GEMMA, MIXTRAL = "google/gemma-3-1b-it", "mistralai/Mixtral-8x7B"
EIGHT = nodes(1, 8, H100)
CPU: dict[str, Any] = {"placement": {"accelerator": "CPU"}, "model__name": "Qwen/Qwen2.5-0.5B"}


def auto(name: str = QWEN_7B, *groups: Any, **changes: Any) -> ExecutionPlan:
    """The plan with engine Auto."""
    return planned(job(name, **{"generation__engine": "Auto"} | changes), *(groups or (EIGHT,)))


@pytest.mark.parametrize(
    ("model", "there", "expected"),
    [
        (LLAMA_1B, nodes(1, 1, H100), "vLLM"),
        (QWEN_7B, nodes(1, 8, H100), "vLLM over 4"),
        (QWEN_7B, nodes(1, 1, H100), "vLLM, asleep"),
        (QWEN_7B, nodes(1, 4, A10G), "vLLM over 4, asleep"),
        (QWEN_32B, nodes(1, 8, H100), "vLLM over 8"),
        (LLAMA_70B, nodes(1, 8, H100), "vLLM over 8"),
        (QWEN_32B, nodes(1, 1, H100), "Transformers"),
        (LLAMA_1B, nodes(1, 1, L4), "vLLM, asleep"),
        (GEMMA, nodes(1, 8, H100), "vLLM"),
        (QWEN_7B, nodes(1, 1, RTX_4090, 32), "vLLM, asleep, base offloaded"),
    ],
)
def test_what_auto_takes(model: str, there: Any, expected: str) -> None:
    assert short_sampler_name(auto(model, there)) == expected


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model__name": "my/model", "model__parameters": "7B"}, "shape is only estimated"),
        (
            {"image": "trainer:mine"},
            "whether spec.image has vLLM is not known: if it has, set spec.generation.engine",
        ),
        ({"generation__engine": "Transformers"}, "spec.generation.engine asks for it"),
        ({"training__temperature": 0.005}, "vLLM samples at no temperature below 0.01"),
    ],
)
def test_why_there_is_no_engine(changes: dict[str, Any], why: str) -> None:
    chosen = auto(QWEN_7B, nodes(4, 8, H100), **changes)
    assert chosen.engine is None
    assert why in chosen.reason


@pytest.mark.parametrize(
    ("has_vllm", "sampler"),
    [(True, "vLLM over 4"), (False, "Transformers"), (None, "Transformers")],
)
def test_an_image_of_the_job_s_own_has_an_engine_if_the_preflight_found_vllm(
    has_vllm: bool | None, sampler: str
) -> None:
    spec = job(QWEN_7B, generation__engine="Auto", image="trainer:mine")
    answer = plan_job(spec, inventory(EIGHT), learned=Learned(has_vllm=has_vllm))
    assert answer.chosen is not None
    assert short_sampler_name(answer.chosen) == sampler
    assert ("spec.image has no vLLM" in answer.chosen.reason) is (has_vllm is False)


def test_a_family_that_is_not_proven_gets_an_engine_only_by_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (engines, engine_plan):
        monkeypatch.setattr(module, "PROVEN_FAMILIES", ("llama",))
    chosen = auto(GEMMA)
    assert chosen.engine is None
    assert (
        "the weights of model type gemma3_text in an engine have not been proven" in chosen.reason
    )
    asked = auto(GEMMA, generation__engine="Colocated")
    assert asked.engine is not None
    assert any(
        "model type gemma3_text in an engine can be proven shows only at the start" in w
        for w in asked.warnings
    )


def test_the_reason_and_the_candidates_tell_what_it_was_compared_with() -> None:
    answer = result(job(generation={"servers": {"replicas": 2}}), nodes(2, 8, H100))
    assert answer.chosen is not None
    assert "vLLM Servers, 2 engines on 2 GPUs more would take" in answer.chosen.reason
    assert "Transformers would take" in answer.chosen.reason
    assert "assumed" in answer.chosen.reason
    alike = [
        one
        for one in answer.candidates
        if (one.gpus, one.zero_stage) == (answer.chosen.gpus, answer.chosen.zero_stage)
    ]
    shown = {short_sampler_name(one): one.rejected and one.rejected.message for one in alike}
    assert {"vLLM over 4", "vLLM over 4, asleep", "Transformers", "vLLM 2 x 1 GPU"} <= set(shown)
    assert "slower" in str(shown["Transformers"])


def test_what_keeps_an_engine_away_is_told_in_numbers() -> None:
    chosen = auto(QWEN_32B, nodes(1, 1, H100))
    assert (
        "completions by Transformers: vLLM Colocated, asleep while training needs" in chosen.reason
    )
    assert "GiB per GPU at" in chosen.reason


def test_a_base_that_leaves_the_gpu_to_its_engine_is_explained() -> None:
    there = nodes(1, 1, RTX_4090, 32)
    chosen = auto(QWEN_7B, there)
    assert chosen.method == "LoRA"
    assert chosen.engine is not None
    assert chosen.engine.offload_base
    assert (
        "vLLM Colocated, asleep while training, the base in host memory while it samples: "
        "vLLM Colocated, asleep while training needs "
    ) in chosen.reason
    assert "the frozen base waits in host memory" in engine_plan.engine_numbers(chosen.engine)
    read_back = Run(chosen, job(QWEN_7B, generation__engine="Auto"), Learned())
    assert chosen.memory is not None
    assert read_back.prediction.phases == chosen.memory.phases.model_dump()
    assert read_back.sized_engine == chosen.engine
    # An engine that stays awake, or is none, has no use for it.
    for pins in ({"generation__sleep": False}, {"generation__engine": "Transformers"}):
        plain = auto(QWEN_7B, there, **pins)
        assert plain.engine is None


def test_a_share_that_is_pinned_is_obeyed_and_one_that_is_too_small_refused() -> None:
    gpus = {"min": 8, "max": 8}
    long: dict[str, Any] = {"training__maxCompletionLength": 8192, "placement__gpus": gpus}
    chosen = planned(job(generation={"engine": "Colocated", "memoryShare": 0.3}, **long), EIGHT)
    assert chosen.engine is not None
    assert chosen.engine.memory_share == 0.3
    few = planned(job(generation={"engine": "Colocated", "memoryShare": 0.08}, **long), EIGHT)
    assert few.engine is not None
    assert few.engine.max_sequences < chosen.engine.max_sequences
    assert (
        few.engine.weights_bytes + few.engine.cache_bytes + few.engine.graphs_bytes
        <= 0.08 * usable_bytes(81559)
    )
    refused = result(job(generation={"engine": "Colocated", "memoryShare": 0.05}), EIGHT)
    assert refused.reason == PlanReason.OUT_OF_DEVICE_MEMORY
    assert "spec.generation.memoryShare 0.05 of 78.9 GiB" in refused.message
    assert "spec.generation.memoryShare" in [
        change.path for fix in refused.fixes for change in fix.changes
    ]


def test_servers_have_their_own_gpus_and_take_none_that_are_not_there() -> None:
    servers = {"replicas": 2, "gpusPerReplica": 2, "gpuProduct": A100}
    chosen = planned(
        job(generation={"engine": "Servers", "servers": servers}),
        EIGHT,
        nodes(2, 4, A100, gpu_hour_price=2.5),
    )
    engine = chosen.engine
    assert engine is not None
    assert (engine.kind, engine.replicas, engine.gpus_per_replica, engine.tensor_parallel) == (
        "Servers",
        2,
        2,
        2,
    )
    assert (engine.gpu_product, engine.gpu_hour_price) == (A100, 2.5)
    assert engine.node_selector == {"nvidia.com/gpu.product": A100}
    assert engine.host_memory_bytes > 0
    assert chosen.gpu_product == H100
    assert f"by vLLM Servers, 2 engines over 2 GPUs on 4 x {A100}, as asked for" in chosen.reason
    for there, count in ((EIGHT, 8), (nodes(2, 4, A100), 5)):
        product = there.gpu_product
        for own in ({}, {"gpuProduct": product}):
            many = {"engine": "Servers", "servers": {"replicas": count} | own}
            refused = result(job(generation=many, placement={"gpus": {"min": 4}}), there)
            assert not refused.feasible
            asked = f"asks for {count} engines with 1 GPU each beside the trainer's"
            assert asked in refused.message


def test_auto_takes_servers_only_where_they_save_gpu_seconds() -> None:
    """Where generating is nearly all, and it is done on better GPUs."""
    long = {
        "training__maxCompletionLength": 8192,
        "placement": {"gpuProduct": L4, "gpus": {"min": 8, "max": 8}},
    }
    servers = {"replicas": 1, "gpuProduct": H100}
    there = nodes(1, 8, L4), EIGHT
    with_servers = auto(
        "Qwen/Qwen2.5-0.5B", *there, generation={"engine": "Auto", "servers": servers}, **long
    )
    without = auto("Qwen/Qwen2.5-0.5B", *there, **long)
    assert with_servers.engine is not None
    assert with_servers.engine.kind == "Servers"
    assert with_servers.estimated_step_seconds is not None
    assert without.estimated_step_seconds is not None
    assert 9 * with_servers.estimated_step_seconds < 8 * without.estimated_step_seconds


def test_servers_on_nodes_that_are_not_there_yet_are_of_the_product_that_is_declared() -> None:
    where: dict[str, Any] = {
        "provisioning": "CreatePods",
        "nodes": 1,
        "gpusPerNode": 8,
        "gpuProduct": H100,
    }
    where |= {"nodeSelector": {"pool": "h100"}}
    for product, expected in ((None, H100), (A100, A100)):
        servers = {"replicas": 3} | ({"gpuProduct": product} if product else {})
        chosen = planned(job(generation={"engine": "Servers", "servers": servers}, placement=where))
        assert chosen.engine is not None
        assert (chosen.gpus, chosen.engine.replicas, chosen.engine.gpu_product) == (8, 3, expected)
        assert not chosen.engine.node_selector


def test_the_cheapest_plan_counts_what_its_engines_cost() -> None:
    """Two trainer's GPUs for half of the time are no cheaper where eight engines stand beside
    them."""
    there = nodes(2, 8, H100, gpu_hour_price=3.0), nodes(1, 8, A100, gpu_hour_price=30.0)
    for product, count in ((A100, 8), (H100, 1)):
        servers = {"engine": "Servers", "servers": {"replicas": count, "gpuProduct": product}}
        where = {"objective": "Cheapest", "gpuProduct": H100}
        answer = result(job(generation=servers, placement=where), *there)
        chosen, own = answer.chosen, answer.chosen and answer.chosen.engine
        assert chosen is not None
        assert own is not None

        def cost(one: ExecutionPlan, price: float = count * (own.gpu_hour_price or 0)) -> float:
            return (one.gpus * 3.0 + price) * (one.estimated_step_seconds or 0)

        fitting = [
            one
            for one in answer.candidates
            if one.estimated_step_seconds and one.method == chosen.method
        ]
        assert cost(chosen) * risk(chosen) <= 1.01 * min(cost(one) * risk(one) for one in fitting)


@pytest.mark.parametrize("engine", ["Colocated", "Servers"])
def test_an_engine_on_cpus_is_had_only_by_asking(engine: str) -> None:
    assert auto(**CPU).engine is None
    chosen, plain = (
        planned(job(generation__engine=one, **CPU)) for one in (engine, "Transformers")
    )
    own = chosen.engine
    assert own is not None
    assert (own.kind, own.tensor_parallel, own.gpus_per_replica, own.sleep) == (engine, 1, 0, False)
    assert 0 < own.memory_share <= 1
    assert own.replicas == (engine == "Servers")
    needed = own.weights_bytes + own.cache_bytes
    if engine == "Colocated":
        assert chosen.host_memory_bytes >= plain.host_memory_bytes + own.weights_bytes
    else:
        assert own.host_memory_bytes > needed
        assert chosen.host_memory_bytes < plain.host_memory_bytes + needed
    assert f"completions by vLLM {engine}" in chosen.reason


def test_what_no_engine_can_do_is_refused_with_the_fix() -> None:
    experts = result(job(MIXTRAL, generation__engine="Colocated"), EIGHT)
    assert "has 8 experts per layer: set it to Transformers" in experts.message
    asleep = result(job(MIXTRAL, generation={"engine": "Colocated", "sleep": True}), EIGHT)
    assert asleep.message == f"{experts.message} and remove spec.generation.sleep"
    cold = result(job(generation__engine="Servers", training__temperature=0.005), EIGHT)
    assert "vLLM samples at 0.01 or above: raise it, or set spec.generation.engine" in cold.message
    short = result(job(generation={"engine": "Colocated", "maxModelLength": 512}), EIGHT)
    assert "512 is less than training.maxPromptLength 512 + maxCompletionLength" in short.message
    odd = result(job(generation={"engine": "Servers", "servers": {"gpusPerReplica": 3}}), EIGHT)
    assert "28 heads and 4 key heads can't be split over 3 GPUs; 1, 2, 4 can" in odd.message
    served = job(generation__engine="Servers").on_platform(PlatformSpec(host_network=True))
    hosted = result(served, EIGHT)
    assert "engines': set spec.generation.engine to Colocated or Transformers" in hosted.message
    answers = (experts, cold, short, odd, hosted)
    assert {answer.reason for answer in answers} == {PlanReason.INVALID_COMBINATION}


@pytest.mark.parametrize("model", [MIXTRAL, "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"])
def test_experts_that_no_engine_can_serve_are_refused_with_the_hardware_that_bears_it(
    model: str,
) -> None:
    answer = result(job(model, generation__engine="Auto"), nodes(8, 8, H100))
    assert answer.reason == PlanReason.INVALID_COMBINATION
    assert "in vLLM the weights of its" in answer.message
    assert "set spec.generation.engine to Transformers to train so" in answer.message
    (change,) = answer.fixes[0].changes
    overruled = with_value(job(model), change.path, change.value)
    assert result(overruled, nodes(8, 8, H100)).feasible
    pinned = job(model, generation={"memoryShare": 0.4, "servers": {}})
    (fix,) = result(pinned, nodes(8, 8, H100)).fixes
    for change in fix.changes:
        pinned = with_value(pinned, change.path, yaml.safe_load(change.value))
    assert result(pinned, nodes(8, 8, H100)).feasible, fix
    small = nodes(1, 1, H100, 16)
    one_gpu = result(job(model, generation__engine="Auto"), small)
    assert not result(overruled, small).feasible
    without_way, _, _ = answer.message.rpartition("; ")
    assert one_gpu.message == f"{without_way}; these nodes have no plan without one either"
    assert one_gpu.fixes == []
    hardware = answer.hardware
    bearable = "steps below 10 minutes without offload"
    if hardware is None:
        assert f"no hardware of up to 64 GPUs has {bearable}" in answer.message
        return
    gpus = hardware.nodes * hardware.gpus_per_node
    assert f"{bearable} is {gpus} x {hardware.gpu_product};" in answer.message
    fastest = with_value(overruled, "spec.placement.objective", "Fastest")
    host_gib = 128 * hardware.gpus_per_node
    there = nodes(hardware.nodes, hardware.gpus_per_node, hardware.gpu_product, host_gib)
    chosen = result(fastest, there).chosen
    assert chosen is not None
    assert (chosen.method, chosen.offload) == ("Full", "None")
    assert (chosen.estimated_step_seconds or 0) <= 600


def test_experts_whose_adapter_is_trained_are_told_of_hardware_that_bears_it() -> None:
    asked = job("unsloth/gpt-oss-20b-BF16", adapter__use="Always", generation__engine="Auto")
    refused = result(asked, EIGHT)
    hardware = refused.hardware
    assert hardware is not None, refused.message
    there = nodes(hardware.nodes, hardware.gpus_per_node, hardware.gpu_product)
    chosen = result(with_value(asked, "spec.generation.engine", "Transformers"), there).chosen
    assert chosen is not None
    assert (chosen.method, chosen.offload) == ("LoRA", "None")
    assert (chosen.estimated_step_seconds or 0) <= 600


KNOWN = [kind for kind in families() if kind in PROVEN_FAMILIES]


@pytest.mark.parametrize("kind", KNOWN)
def test_a_model_outside_the_catalogue_has_an_engine_and_exact_memory_by_whatever_says_its_shape(
    kind: str,
) -> None:
    config = {
        "model_type": kind, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 4096,
    }  # fmt: skip
    there = inventory(EIGHT)
    own = job("ours/own", generation__engine="Auto")
    architecture = architecture_of(config)
    declared = with_value(own, "spec.model.architecture", architecture.model_dump(by_alias=True))
    answers = (
        plan_job(own, there, facts=ModelFacts(config=config)),
        plan_job(own, there, learned=Learned(architecture=architecture)),
        plan_job(declared, there),
    )
    plans = [answer.chosen for answer in answers]
    first = plans[0]
    assert first is not None
    assert first.engine is not None
    assert first.architecture == "Exact"
    for plan in plans:
        assert plan is not None
        assert (plan.memory, plan.engine) == (first.memory, first.engine)
    for answer in (
        plan_job(with_value(declared, "spec.training.maxCompletionLength", 4000), there),
        plan_job(
            with_value(own, "spec.training.maxCompletionLength", 4000),
            there,
            learned=Learned(architecture=architecture),
        ),
    ):
        assert "set spec.training.maxCompletionLength to 3584" in answer.message


def test_sleep_is_obeyed() -> None:
    for sleep in (True, False):
        chosen = auto(LLAMA_1B, generation={"engine": "Colocated", "sleep": sleep})
        assert chosen.engine is not None
        assert chosen.engine.sleep == sleep


def test_an_engine_in_words() -> None:
    assert sampler_name(auto(QWEN_32B)) == "vLLM Colocated over 8 GPUs"
    servers = auto(generation={"engine": "Servers", "servers": {"replicas": 2}})
    assert sampler_name(servers) == f"vLLM Servers, 2 engines, 2 GPUs {H100} beside the trainer's"
    plain = auto(MIXTRAL, nodes(4, 8, H100), generation__engine="Transformers")
    assert sampler_name(plain) == "Transformers"
    assert all(
        model_type(name) in PROVEN_FAMILIES for name in (LLAMA_1B, QWEN_7B, QWEN_32B, LLAMA_70B)
    )


SERVERS = st.fixed_dictionaries(
    {"replicas": st.integers(1, 4)}, optional={"gpusPerReplica": st.integers(1, 4)}
)
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"maxNumSeqs": st.integers(1, 64), "enforceEager": st.booleans()}
)
ENGINES = st.fixed_dictionaries(
    {"engine": st.sampled_from(["Auto", "Transformers", "Colocated", "Servers"])},
    optional={
        "memoryShare": st.sampled_from([0.05, 0.2, 0.5, 0.9]), "sleep": st.booleans(),
        "servers": SERVERS,
        "engineArguments": ARGUMENTS,
    },
)  # fmt: skip


def allowed(wanted: dict[str, Any]) -> dict[str, Any]:
    """What the contract's rules leave of it."""
    barred = {
        "Auto": (), "Colocated": ("servers",), "Servers": ("memoryShare", "sleep"),
        "Transformers": ("servers", "memoryShare", "sleep", "engineArguments"),
    }[wanted["engine"]]  # fmt: skip
    return {name: value for name, value in wanted.items() if name not in barred}


@settings(max_examples=cases(120, gate=15))
@given(
    st.sampled_from([LLAMA_1B, QWEN_7B, QWEN_32B, GEMMA, MIXTRAL]),
    st.sampled_from([(H100, 1), (H100, 8), (A10G, 4), (L4, 8), (A100, 2)]),
    ENGINES,
    st.sampled_from([{}, {"adapter__use": "Always"}, {"training__maxCompletionLength": 4096}]),
)
def test_whatever_is_asked_for(
    model: str, cards: tuple[str, int], drawn: dict[str, Any], changes: dict[str, Any]
) -> None:
    product, count = cards
    wanted = allowed(drawn)
    spec, there = job(model, generation=wanted, **changes), inventory(nodes(2, count, product))
    answer = plan_job(spec, there)
    assert answer.model_dump_json() == plan_job(spec, there).model_dump_json()
    if answer.chosen is None:
        return
    chosen, engine = answer.chosen, answer.chosen.engine
    assert chosen.memory is not None
    assert chosen.memory.device_bytes <= chosen.memory.usable_bytes
    assert (chosen.memory.phases.sync > 0) == (engine is not None)
    if wanted["engine"] != "Auto":
        assert (engine.kind if engine else "Transformers") == wanted["engine"]
    if engine is None:
        return
    assert 0 < engine.memory_share <= 1
    own = engine.weights_bytes + engine.cache_bytes + engine.graphs_bytes
    assert own <= engine.memory_share * usable_bytes(lookup_product(product).memory_mib) + 2**20
    assert engine.max_sequences <= wanted.get("engineArguments", {}).get("maxNumSeqs", 10**6)
    assert chosen.gpus_per_node % engine.tensor_parallel == 0 or engine.kind == "Servers"
    if engine.kind == "Colocated" and "sleep" in wanted:
        assert engine.sleep == wanted["sleep"]
    if engine.kind == "Servers":
        assert chosen.gpus + engine.replicas * engine.gpus_per_replica <= 2 * count
        assert engine.replicas == wanted.get("servers", {}).get("replicas", 1)


def test_an_engine_that_fits_a_node_but_not_fewer_gpus_of_more_nodes_is_planned_elsewhere() -> None:
    # The 70B model's weights need several GPUs with half of an H200; on an L4 nothing holds them.
    pinned = {"generation__memoryShare": 0.5, "adapter__use": "Never"}
    batch = {"training__numGenerations": 12, "training__promptsPerStep": 1}
    small, large = nodes(1, 8, L4, 256), nodes(4, 8, H200, 2048)
    one = auto(LLAMA_70B, small, large, generation__engine="Colocated", **pinned, **batch)
    assert one.gpu_product == H200
