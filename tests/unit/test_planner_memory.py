"""The memory model's terms against measured engines, published counts and hand-computed cases.

tests/trainer/test_memory_truth.py compares the whole with the real code; here are the parts that a
single process can't show, such as ZeRO's partitions.
"""

from dataclasses import replace
from typing import Any, Literal

import pytest

from grpo_api.spec.model import ModelSpec
from grpo_api.text.units import GIB
from grpo_planner.hardware.products import usable_bytes
from grpo_planner.memory import states
from grpo_planner.memory.generation import cache
from grpo_planner.memory.phases import (
    CONTEXT,
    checkpoint_bytes,
    device_bytes,
    export_bytes,
    predict,
)
from grpo_planner.memory.setup import Precision, Setup, Strategy
from grpo_planner.memory.trained_tensors import persistent_elements, trained_matrices
from grpo_planner.model import catalogue
from grpo_planner.model.architecture import resolve_model
from grpo_planner.model.shapes import Shape
from grpo_planner.time.sampling import decoded_parameters
from tests.unit.planning import H100, L4, LLAMA_1B, QWEN_7B, QWEN_32B, nodes, result, spec

TINY = Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=1000)
STRATEGIES: list[Strategy] = ["Clone", "Offload", "Sharded", "Adapter", "None"]
BIG = catalogue.shapes()["qwen2.5-7b"]


def of_length(precision: Precision, tokens: int, **settings: Any) -> Setup:
    """One sequence at a time, with so many prompt tokens and as many of the completion."""
    return Setup(precision=precision, prompt=tokens, completion=tokens, micro_batch=1, **settings)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-0.5b", 0.494), ("qwen2.5-72b", 72.7), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.5),
        ("llama-3.2-1b", 1.236), ("llama-3.1-405b", 405.9), ("mistral-7b", 7.248), ("mixtral-8x7b",
        46.7),
        ("gemma-2-9b", 9.24), ("gemma-3-1b", 1.0), ("phi-4", 14.66), ("smollm2-135m", 0.1345),
    ],
)  # fmt: skip
def test_shapes_count_as_published(name: str, billions: float) -> None:
    assert catalogue.shapes()[name].counted_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_experts_count_in_all_and_active() -> None:
    assert catalogue.shapes()["qwen3-30b-a3b"].active_parameters / 1e9 == pytest.approx(
        3.35, rel=0.02
    )
    assert catalogue.shapes()["mixtral-8x7b"].active_parameters / 1e9 == pytest.approx(
        12.9, rel=0.01
    )


@pytest.mark.parametrize("size", ["1T", "1.1T"])
def test_a_rounded_size_leaves_experts_that_a_token_passes(size: str) -> None:
    widths = {"layers": 61, "hiddenSize": 7168, "intermediateSize": 2048, "attentionHeads": 64}
    experts = {"vocabSize": 163840, "experts": 384, "expertsPerToken": 8}
    model = {"name": "my/moe", "parameters": size, "architecture": widths | experts}
    shape = resolve_model(ModelSpec.model_validate(model)).shape
    assert 0.03 < shape.active_parameters / shape.counted_parameters < 0.1


def test_a_token_passes_no_more_experts_than_there_are() -> None:
    widths = {"layers": 2, "hiddenSize": 64, "intermediateSize": 128, "attentionHeads": 4}
    experts = {"vocabSize": 1000, "experts": 8, "expertsPerToken": 4096}
    model = {"name": "my/moe", "architecture": widths | experts}
    shape = resolve_model(ModelSpec.model_validate(model)).shape
    assert decoded_parameters(shape, 4096) == shape.active_parameters == shape.parameters


@pytest.mark.parametrize("model", [LLAMA_1B, QWEN_32B])
@pytest.mark.parametrize("target", ["c_attn", "query_key_value"])
def test_an_adapter_on_modules_that_are_not_known_is_planned_with_a_warning(
    model: str, target: str
) -> None:
    job = spec(model, adapter__use="Always", adapter__targetModules=[target])
    there = (nodes(2, 8, H100), nodes(1, 1, L4))
    chosen = result(job, *there).chosen
    assert chosen is not None
    assert any(f"is known as {target}" in text for text in chosen.warnings)


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter__targetModules": [f"model.layers.{n}.self_attn.q_proj" for n in range(64)]},
        {"adapter__targetModules": [f"{n}{'x' * 250}" for n in range(64)]},
        {
            "placement__accelerator": "CPU",
            "rewards": [
                {"model": {"name": f"my/judge-{n}", "parameters": "7B"}} for n in range(32)
            ],
        },
    ],
)
def test_a_plan_has_room_for_whatever_names_a_spec_has(changes: dict[str, Any]) -> None:
    chosen = result(spec(QWEN_7B, **changes), nodes(1, 1, L4, host_gib=64)).chosen
    assert chosen is not None
    assert chosen.changes or chosen.warnings


def test_a_small_shape_by_hand() -> None:
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    assert TINY.counted_parameters == 2 * layer + 2 * 64_000 + 64
    assert TINY.adapter_parameters(8) == 2 * 8 * ((64 + 64) * 2 + (64 + 32) * 2 + 3 * (64 + 128))


@pytest.mark.parametrize(
    ("zero", "accumulation", "between", "backward", "step"),
    [(2, 1, 8.00, 9.22, 12.00), (2, 2, 8.00, 10.22, 12.00), (3, 1, 8.03, 10.26, 11.03)],
)
def test_zero_rows_as_measured_on_two_ranks(
    zero: Literal[2, 3], accumulation: int, between: float, backward: float, step: float
) -> None:
    """Bytes per parameter of live storages of the real engine with world 2; no activations, 5 % for
    its buckets."""
    shape = Shape(
        hidden=1024, layers=64, heads=8, kv_heads=8, head_dim=128, intermediate=4096, vocab=2000
    )
    setup = of_length("bfloat16", 1, accumulation=accumulation, world=2, zero=zero)
    count = shape.parameters
    resting = states.weights(shape, setup) + states.optimizer_state(shape, setup)
    resting += states.permanent_gradients(shape, setup)
    floor = between - (0 if zero == 2 else 0.03)
    assert resting / count == pytest.approx(floor if zero == 2 else 8.0, abs=0.05)
    prediction = predict(shape, setup)
    gathered = states.live_parameters(shape, setup) if zero == 3 else 0
    assert (prediction.phases["step"]) / count == pytest.approx(step, rel=0.05)
    assert (prediction.phases["backward"] - gathered) / count <= backward * 1.05


def test_an_offloaded_reference_visits_for_its_pass_only() -> None:
    setup = of_length("mixed", 64, reference="Clone")
    clone, offloaded = predict(BIG, setup), predict(BIG, replace(setup, reference="Offload"))
    whole = 4 * BIG.parameters
    assert clone.phases["backward"] - offloaded.phases["backward"] == whole
    assert clone.phases["reference"] == offloaded.phases["reference"]


def test_loading_holds_policy_and_reference_at_once() -> None:
    """An offloaded reference is on the GPU beside the policy until TRL has wrapped it: more than
    8-bit moments take."""
    whole = 4 * BIG.parameters
    for strategy in STRATEGIES:
        load = predict(BIG, of_length("mixed", 64, eight_bit=True, reference=strategy)).phases[
            "load"
        ]
        assert load > whole * (2 if strategy in {"Clone", "Offload"} else 1)


def test_loading_under_zero_3_holds_a_whole_module_or_the_optimizers_first_gradients() -> None:
    setup = of_length("bfloat16", 64, world=64, zero=3, offload=True, reference="Sharded")
    offloaded, kept = predict(BIG, setup), predict(BIG, replace(setup, offload=False))
    share = BIG.parameters / 64
    assert offloaded.phases["load"] > 2 * 2 * share + 2 * BIG.head
    assert kept.phases["load"] >= kept.static + 4 * share - 1
    experts = catalogue.shapes()["qwen3-235b-a22b"]
    assert states.live_parameters(experts, setup) > 2 * 3 * 128 * 4096 * 1536


def test_zero_2_has_whole_gradients_of_the_tensors_that_lie_across_partitions() -> None:
    """On 64 GPUs a partition of 7B is smaller than the embedding, and every rank with a piece of
    that has the whole."""
    setup = of_length("bfloat16", 64, world=64, zero=2)
    share = 2 * BIG.parameters / 64
    assert states.gradients(BIG, setup) > 2 * BIG.head > share
    # A rank with a part of the embedding alone has the largest norm, another one most gradients.
    step = states.step_buffers(BIG, setup)
    assert 2 * BIG.head + 4 * share <= step < states.gradients(BIG, setup) + 4 * share


def test_zero_2_with_offload_keeps_large_gradients_until_a_micro_batch_is_over() -> None:
    """Of a micro-batch before the last; those that fit into a bucket (Qwen2.5's keys and values)
    are part of it."""
    setup = of_length("bfloat16", 64, world=2, zero=2, offload=True, accumulation=2)
    kept = states.kept_gradients(BIG, setup)
    assert 0.4 * 2 * BIG.parameters < kept < 0.55 * 2 * BIG.parameters
    assert states.kept_gradients(BIG, replace(setup, accumulation=1)) == 0
    once, twice = (
        predict(BIG, replace(setup, accumulation=steps)).phases["backward"] for steps in (1, 2)
    )
    assert twice - once == pytest.approx(kept - states.gradient_norm(BIG, setup), rel=0.1)


def test_zero_3_gathers_ahead_unless_generation_gathers_nothing() -> None:
    setup = of_length("bfloat16", 64, world=8, zero=3)
    down = BIG.hidden * BIG.intermediate
    assert states.gathering_buffers(BIG, setup) == pytest.approx(2 * (0.9 * BIG.hidden**2 + down))
    assert states.gathering_buffers(BIG, replace(setup, gather=False)) == 0
    experts = catalogue.shapes()["qwen3-30b-a3b"]
    assert states.gathering_buffers(experts, setup) == 2 * 128 * 3 * 2048 * 768, (
        "all experts of a layer come together"
    )


def test_a_sharded_reference_keeps_whole_what_deepspeeds_own_threshold_allows() -> None:
    """The policy's threshold, 10 * hidden, never reaches the reference's engine: TRL names it in a
    form that DeepSpeed does not read."""
    setup = of_length("bfloat16", 64, world=8, zero=3, reference="Sharded")
    small = Shape(
        hidden=256, layers=1, heads=4, kv_heads=4, head_dim=64, intermediate=500, vocab=390
    )
    norms, attention, head = 3 * 256, 4 * 256 * 256, 256 * 390
    assert persistent_elements(small, 0) == norms
    kept = norms + attention + 2 * head
    assert states.reference_weights(small, setup) == 2 * (small.parameters / 8 + kept)
    larger = replace(small, vocab=391)
    kept_of_larger = norms + attention
    assert states.reference_weights(larger, setup) == 2 * (larger.parameters / 8 + kept_of_larger)


def test_zero_2_steps_on_the_rank_whose_gradients_and_norm_are_most() -> None:
    """Of two ranks the first holds the embedding alone, a part of which makes the norm."""
    tied = replace(BIG, tied=True, vocab=BIG.vocab * 16)
    setup = of_length("bfloat16", 64, world=2, zero=2)
    own = tied.parameters / 2
    assert tied.head > own
    on_first = 2 * tied.head + 8 * own
    assert states.step_buffers(tied, setup) == pytest.approx(on_first, rel=1e-3)
    assert states.gradients(tied, setup) > 2 * tied.head


def test_zero_3_keeps_small_factors_of_an_adapter_whole() -> None:
    """Factors of rank 8 up to 10 * hidden elements: all but those on the wide side of the
    feed-forward part."""
    shape = Shape(
        hidden=512,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=128,
        intermediate=1024,
        vocab=200,
        qkv_bias=True,
    )
    setup = of_length("float32", 1, world=4, zero=3, lora_rank=8)
    attention, down_up_and_gate = 8 * (4 * 512 + 2 * (512 + 256)), 8 * 3 * 512
    factors, vectors = (
        4 * (attention + down_up_and_gate),
        shape.layers * shape.layer_vectors + shape.hidden,
    )
    assert states.persistent_parameters(shape, setup) == 4 * (factors + vectors) == 690_176, (
        "measured on live ranks"
    )
    assert states.persistent_parameters(shape, replace(setup, lora_rank=0)) == 4 * vectors
    assert states.persistent_parameters(shape, replace(setup, zero=2)) == 0


def test_a_step_takes_its_buffers_or_gathers_anew_what_stays_whole() -> None:
    shape = Shape(
        hidden=512, layers=4, heads=4, kv_heads=2, head_dim=128, intermediate=1024, vocab=200
    )
    small, large = (of_length("float32", 1, world=4, zero=3, lora_rank=rank) for rank in (8, 512))
    assert predict(shape, small).phases["step"] == predict(shape, small).static
    kept = states.persistent_parameters(shape, large)
    flat = 4 * states.trained_parameters(shape, large) / 4
    assert predict(shape, large).phases["step"] == predict(shape, large).static - kept + flat


def test_the_threshold_is_inclusive_and_for_all_parameters() -> None:
    """Rank 10 on a square map is just small enough, 11 is not; 8 experts have a router that stays
    whole, 16 don't."""
    square = Shape(
        hidden=64, layers=1, heads=4, kv_heads=4, head_dim=16, intermediate=64, vocab=1000
    )
    assert [
        persistent_elements(square, rank) - persistent_elements(square, 0) for rank in (10, 11)
    ] == [14 * 640, 0]
    few, many = (replace(square, experts=experts, active_experts=2) for experts in (8, 16))
    assert (persistent_elements(few, 0), persistent_elements(many, 0)) == (3 * 64 + 8 * 64, 3 * 64)


def test_factors_of_fused_experts_are_one_tensor() -> None:
    """As PEFT makes them: inner and outer, of gate and up with twice the rank, between four maps'
    and the router's."""
    shape = Shape(
        hidden=64,
        layers=1,
        heads=4,
        kv_heads=4,
        head_dim=16,
        intermediate=32,
        vocab=1000,
        experts=8,
        active_experts=2,
    )
    gate_up, down = (2 * 8 * 64, 2 * 8 * 2 * 32), (8 * 32, 8 * 64)
    assert trained_matrices(shape, 1) == (*8 * (64,), *gate_up, *down, 64, 8)
    assert (
        persistent_elements(shape, 1) - persistent_elements(shape, 0)
        == 8 * 64 + 64 + 8 + 8 * 32 + 8 * 64
    )


def test_no_reference_and_on_policy_has_no_scoring_pass() -> None:
    setup = of_length("bfloat16", 64)
    assert predict(BIG, setup).phases["reference"] == predict(BIG, setup).static
    scored = predict(BIG, replace(setup, scores_old_policy=True))
    assert scored.phases["reference"] > scored.static


def test_the_old_policy_and_the_reference_score_one_after_the_other() -> None:
    def bytes_of_scoring(**options: Any) -> int:
        return predict(BIG, replace(of_length("mixed", 64), **options)).phases["reference"]

    passes = bytes_of_scoring(reference="Clone"), bytes_of_scoring(reference="Offload")
    own = bytes_of_scoring(scores_old_policy=True)
    static = predict(BIG, replace(of_length("mixed", 64), reference="Clone")).static
    clone = static - predict(BIG, of_length("mixed", 64)).static
    both = [
        bytes_of_scoring(reference=where, scores_old_policy=True) for where in ("Clone", "Offload")
    ]
    assert both == [max(passes[0], own + clone), max(passes[1], own)]


def test_the_cache_is_as_wide_as_the_weights_and_windows_bound_it() -> None:
    setup = of_length("mixed", 1024, generation_batch=3)
    assert cache(BIG, setup, 2048) == 2 * 28 * 2048 * 4 * 128 * 4 * 3
    gemma = catalogue.shapes()["gemma-3-1b"]
    assert cache(gemma, setup, 2048) == 2 * (4 * 2048 + 22 * 512) * 256 * 4 * 3


def test_gathering_for_generation_costs_the_whole_model_beside_the_partition() -> None:
    setup = of_length("bfloat16", 64, world=8, zero=3)
    gathered, kept = predict(BIG, setup), predict(BIG, replace(setup, gather=False))
    live = states.live_parameters(BIG, setup)
    missing = 2 * BIG.parameters - states.persistent_parameters(BIG, setup)
    assert gathered.phases["generate"] - kept.phases["generate"] == pytest.approx(
        missing - live, abs=2
    )


def test_usable_memory_is_what_torch_reports() -> None:
    for label, torch_gib in (
        (81559, 79.1),
        (143771, 139.8),
        (23034, 22.03),
        (183359, 178.35),
        (15360, 14.6),
    ):
        assert usable_bytes(label) / GIB == pytest.approx(torch_gib, abs=0.5)
    assert usable_bytes(0) == 0


def test_the_device_needs_margin_context_and_communicator() -> None:
    prediction = predict(TINY, of_length("bfloat16", 8))
    alone, together = (device_bytes(prediction, world, 0.05, expandable=True) for world in (1, 2))
    assert alone > prediction.peak * 1.05 + CONTEXT - 1
    assert together - alone == round(0.4 * GIB)
    fixed = device_bytes(prediction, 1, 0.05, expandable=False)
    assert fixed - alone == pytest.approx(0.09 * prediction.dynamic, abs=2)


def test_checkpoints_hold_weights_state_and_a_drifted_reference() -> None:
    full = of_length("mixed", 8)
    assert checkpoint_bytes(BIG, full, False) == 12 * BIG.parameters
    assert checkpoint_bytes(BIG, full, True) == 16 * BIG.parameters
    lora = replace(full, lora_rank=16)
    assert checkpoint_bytes(BIG, lora, False) == 12 * BIG.adapter_parameters(16)
    assert (
        checkpoint_bytes(BIG, replace(full, precision="bfloat16", zero=3), False)
        == 14 * BIG.parameters
    )


def test_an_export_holds_what_was_trained_or_the_model_that_it_was_merged_into() -> None:
    full = of_length("mixed", 8)
    lora = replace(full, lora_rank=16)
    assert export_bytes(BIG, full, merged=False) == 4 * BIG.parameters
    assert export_bytes(BIG, replace(full, precision="bfloat16"), merged=True) == 2 * BIG.parameters
    assert export_bytes(BIG, lora, merged=False) == 4 * BIG.adapter_parameters(16)
    assert export_bytes(
        BIG, replace(lora, precision="bfloat16", zero=3), merged=False
    ) == 2 * BIG.adapter_parameters(16)
    assert export_bytes(BIG, lora, merged=True) == 4 * BIG.parameters
