"""What the planner chooses: strategies, pins, consent, objectives, busy nodes, rejections and
fixes."""

from typing import Any

import pytest

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.text.messages import MAX_MESSAGE
from grpo_api.text.units import GIB
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import plan_job
from grpo_planner.result.result import PlanReason, PlanResult
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
    plan,
    result,
    spec,
)  # fmt: skip

OWN = {"image": "trainer:1"}
"""An image of the user's own, which may compute on cards that the trainer's is not shown to."""


def how(plan: ExecutionPlan) -> tuple[str, str, int, str]:
    """Method, reference strategy, ZeRO stage and offload."""
    return plan.method, plan.strategy, plan.zero_stage, plan.offload


def test_ample_memory_means_a_clone() -> None:
    assert how(plan(spec(LLAMA_1B), nodes(1, 1, A100))) == ("Full", "Clone", 0, "None")


def test_over_20b_is_reloaded_and_sharded() -> None:
    assert how(plan(spec(QWEN_32B), nodes(1, 8, A100)))[:3] == ("Full", "Sharded", 3)
    assert how(plan(spec(QWEN_32B), nodes(1, 8, H100)))[:3] == ("Full", "Sharded", 3)


def test_little_memory_means_an_adapter_and_says_so() -> None:
    answer = result(spec(QWEN_7B), nodes(1, 1, L4, host_gib=60))
    assert answer.chosen is not None
    assert how(answer.chosen) == ("LoRA", "Adapter", 0, "None")
    assert "LoRA adapter of rank 16" in answer.changes[0]
    assert "0.53%" in answer.changes[0]
    assert answer.changes == answer.chosen.changes
    assert "learningRate 1e-06 is usually ten times too small" in answer.changes[0]
    assert "write adapter.learningRate: 1e-05;" in answer.changes[0]
    assert len(answer.changes[0]) <= MAX_MESSAGE, "it is the message of a condition"
    answered = spec(QWEN_7B, adapter__learningRate=2e-5)
    change = result(answered, nodes(1, 1, L4, host_gib=60)).changes[0]
    assert "trains a LoRA adapter" in change
    assert "earningRate" not in change


def test_7b_on_four_24_gb_cards_trains_all_parameters_offloaded() -> None:
    assert how(plan(spec(QWEN_7B), nodes(1, 4, A10G, host_gib=192))) == (
        "Full",
        "Offload",
        3,
        "CPU",
    )


def test_32b_adapter_fits_one_80_gb_card() -> None:
    chosen = plan(spec(QWEN_32B, adapter__use="Always"), nodes(1, 1, H100))
    assert how(chosen) == ("LoRA", "Adapter", 0, "None")
    assert chosen.changes == []


def test_70b_needs_no_gather_on_80_gb_cards() -> None:
    chosen = plan(spec(LLAMA_70B, generation__engine="Transformers"), nodes(4, 8, H100))
    assert how(chosen)[:3] == ("Full", "Sharded", 3)
    assert not chosen.gather_for_generation


def test_beta_0_has_no_reference() -> None:
    assert plan(spec(LLAMA_1B, training__beta=0.0), nodes(1, 1, H100)).strategy == "None"


@pytest.mark.parametrize(
    ("strategy", "stages"), [("Clone", {0, 2}), ("Sharded", {3}), ("Offload", {0, 2, 3})]
)
def test_an_explicit_strategy_is_obeyed(strategy: str, stages: set[int]) -> None:
    answer = result(spec(QWEN_7B, reference__strategy=strategy), nodes(1, 8, H100))
    assert {candidate.strategy for candidate in answer.candidates} == {strategy}
    assert {candidate.zero_stage for candidate in answer.candidates} <= stages
    assert answer.feasible


def test_an_explicit_strategy_that_cannot_fit_is_rejected_with_numbers_and_never_replaced() -> None:
    answer = result(spec(QWEN_7B, reference__strategy="Clone", **OWN), nodes(1, 1, T4, host_gib=60))
    assert answer.reason == PlanReason.OUT_OF_DEVICE_MEMORY
    assert "Clone on 1 x Tesla-T4" in answer.message
    assert "14.5 GiB are usable" in answer.message


def test_an_adapter_strategy_trains_an_adapter_without_a_warning() -> None:
    chosen = plan(spec(LLAMA_1B, reference__strategy="Adapter"), nodes(1, 1, H100))
    assert (chosen.method, chosen.strategy, chosen.changes) == ("LoRA", "Adapter", [])


@pytest.mark.parametrize("accelerator", ["GPU", "CPU"])
@pytest.mark.parametrize(
    ("asked", "warns"),
    [
        ({"adapter__use": "Always"}, True),
        ({"reference__strategy": "Adapter"}, True),
        ({"adapter__use": "Always", "adapter__learningRate": 1e-6}, False),
        ({"adapter__use": "Always", "training__learningRate": 5e-6}, False),
        ({"adapter__use": "IfNeeded"}, False),
    ],
)
def test_an_adapter_with_the_default_rate_of_full_training_is_warned_about(
    accelerator: str, asked: dict[str, Any], warns: bool
) -> None:
    chosen = plan(spec(LLAMA_1B, placement__accelerator=accelerator, **asked), nodes(1, 1, H100))
    warned = [text for text in chosen.warnings if "too small for LoRA" in text]
    assert len(warned) == warns
    assert all("write adapter.learningRate: 1e-05" in text for text in warned)


def test_never_means_no_adapter_and_a_fix_that_names_the_field() -> None:
    answer = result(spec(QWEN_7B, adapter__use="Never"), nodes(1, 1, L4, host_gib=60))
    assert answer.reason == PlanReason.ONLY_ADAPTER_FITS
    assert [change.path for fix in answer.fixes for change in fix.changes] == ["spec.adapter.use"]
    assert all(candidate.method == "Full" for candidate in answer.candidates)


def test_a_moving_reference_excludes_the_adapter() -> None:
    job = spec(QWEN_7B, reference__sync={"everySteps": 10})
    assert {c.strategy for c in result(job, nodes(1, 8, H100)).candidates} == {
        "Clone",
        "Offload",
        "Sharded",
    }


def test_pins_that_exclude_one_another_are_rejected() -> None:
    job = spec(QWEN_7B, reference__strategy="Sharded", training__optimizer="AdamW8bit")
    answer = result(job, nodes(1, 8, H100))
    assert answer.reason == PlanReason.INVALID_COMBINATION
    assert "bitsandbytes can't keep embeddings and small tensors in 32 bits" in answer.message


def test_pins_are_obeyed() -> None:
    job = spec(
        LLAMA_1B, training__optimizer="AdamW8bit", training__gradientCheckpointing="Enabled",
        training__perDeviceTrainBatchSize=2, training__dtype="bfloat16",
    )  # fmt: skip
    chosen = plan(job, nodes(1, 2, H100))
    assert (chosen.optimizer, chosen.gradient_checkpointing, chosen.micro_batch) == (
        "AdamW8bit",
        True,
        2,
    )
    assert chosen.dtype == "bfloat16"
    assert any("round away" in text for text in chosen.warnings)
    assert chosen.changes == []


def test_gather_pins_are_obeyed() -> None:
    job = spec(
        QWEN_32B,
        training__ds3GatherForGeneration="Disabled",
        reference__strategy="Sharded",
        generation__engine="Transformers",
    )
    assert not plan(job, nodes(2, 8, H100)).gather_for_generation


def test_full_training_without_zero_keeps_float32_weights_under_autocast() -> None:
    chosen = plan(spec(LLAMA_1B), nodes(1, 1, H100))
    assert (chosen.dtype, chosen.autocast) == ("float32", True)


def test_cards_without_bfloat16_train_in_float32() -> None:
    chosen = plan(spec(LLAMA_1B, **OWN), nodes(1, 4, T4))
    assert (chosen.dtype, chosen.autocast) == ("float32", False)
    assert any("no bfloat16" in text for text in chosen.warnings)
    rejected = result(spec(LLAMA_1B, training__dtype="bfloat16", **OWN), nodes(1, 4, T4))
    assert rejected.reason == PlanReason.INVALID_COMBINATION
    assert "compute capability 8.0" in rejected.message


def test_an_old_compute_capability_beats_an_unknown_product() -> None:
    chosen = plan(
        spec(LLAMA_1B, **OWN),
        nodes(1, 1, "NVIDIA-Future", gpu_memory_mib=81559, compute_capability=(7, 5)),
    )
    assert (chosen.dtype, chosen.autocast) == ("float32", False)
    assert any("is unknown" in text for text in chosen.warnings)


def test_8_bit_moments_only_where_32_bit_ones_do_not_fit() -> None:
    job = spec(LLAMA_1B, adapter__use="Never", reference__strategy="Clone")
    answer = result(job, nodes(1, 1, "NVIDIA-A30", host_gib=16, gpu_memory_mib=24576))
    assert answer.chosen is not None
    assert answer.chosen.optimizer == "AdamW8bit"
    assert "8 bits" in answer.changes[0]


def test_min_max_and_nodes_are_obeyed() -> None:
    assert plan(spec(LLAMA_1B, placement__gpus={"min": 4, "max": 4}), nodes(1, 8, H100)).gpus == 4
    chosen = plan(spec(LLAMA_1B, placement__nodes=2), nodes(2, 8, H100))
    assert (chosen.nodes, chosen.gpus_per_node * 2) == (2, chosen.gpus)


def test_a_product_can_be_asked_for_by_its_beginning() -> None:
    groups = nodes(1, 8, H100), nodes(4, 4, L4)
    chosen = plan(spec(LLAMA_1B, placement__gpuProduct="NVIDIA-L"), *groups)
    assert chosen.gpu_product == L4
    assert chosen.node_selector == {"nvidia.com/gpu.product": L4}
    assert result(spec(placement__gpuProduct="NVIDIA-B200"), *groups).reason == PlanReason.NO_GPUS


def test_busy_gpus_are_waited_for() -> None:
    busy = nodes(1, 8, H100, gpus_free=1)
    job = spec(QWEN_7B, placement__gpus={"min": 8})
    answer = result(job, busy)
    assert (answer.feasible, answer.fits_now, answer.reason) == (
        True,
        False,
        PlanReason.WAITING_FOR_GPUS,
    )
    assert answer.message.startswith(f"needs 8 x {H100} on 1 node, which are taken now")
    assert result(spec(LLAMA_1B), busy).fits_now


def test_unseen_pods_leave_the_fit_to_the_scheduler() -> None:
    hidden = Inventory(
        (nodes(1, 8, H100, gpus_free=0),), ("other namespaces can't be seen",), visible=False
    )
    answer = plan_job(spec(LLAMA_1B), hidden)
    assert answer.fits_now
    assert answer.chosen is not None
    assert "other namespaces can't be seen" in answer.chosen.warnings


def test_host_memory_bounds_offload() -> None:
    job = spec(QWEN_7B, adapter__use="Never", reference__sync={})
    assert plan(job, nodes(1, 1, H100, host_gib=192)).host_memory_bytes > 145 * GIB
    answer = result(job, nodes(1, 1, H100, host_gib=150))
    assert answer.reason == PlanReason.OUT_OF_HOST_MEMORY
    assert "150.0 GiB are there" in answer.message


@pytest.mark.parametrize("kind", ["requests", "limits"])
def test_a_pinned_pod_memory_is_the_request_and_must_do(kind: str) -> None:
    job = spec(LLAMA_1B, resources={kind: {"memory": "32Gi"}})
    assert plan(job, nodes(1, 1, H100)).host_memory_bytes == 32 * GIB
    answer = result(spec(LLAMA_1B, resources={kind: {"memory": "1Gi"}}), nodes(1, 1, H100))
    assert answer.reason == PlanReason.OUT_OF_HOST_MEMORY


def test_a_pod_may_use_up_to_its_limit() -> None:
    job = spec(LLAMA_1B, resources={"requests": {"memory": "1Gi"}, "limits": {"memory": "32Gi"}})
    assert plan(job, nodes(1, 1, H100)).host_memory_bytes == GIB


def test_cpus_bound_the_pods() -> None:
    assert plan(spec(LLAMA_1B), nodes(1, 8, H100, cpu_free=0.5, cpu_total=0.5)).gpus <= 2
    answer = result(spec(LLAMA_1B, resources__requests={"cpu": "256"}), nodes(1, 8, H100))
    assert answer.reason == PlanReason.NOT_ENOUGH_GPUS
    assert (
        plan(
            spec(LLAMA_1B, resources__requests={"cpu": "500m"}),
            nodes(1, 8, H100, cpu_free=0.5, cpu_total=0.5),
        ).gpus
        >= 1
    )


def test_reward_models_take_their_share() -> None:
    reward = [{"model": {"name": "judge", "parameters": "8B"}}]
    alone, judged = (
        plan(spec(LLAMA_1B), nodes(1, 1, H100)),
        plan(spec(LLAMA_1B, rewards=reward), nodes(1, 1, H100)),
    )
    assert alone.memory is not None
    assert judged.memory is not None
    assert judged.memory.phases.load - alone.memory.phases.load == pytest.approx(16e9, rel=0.01)
    unknown = result(spec(LLAMA_1B, rewards=[{"model": {"name": "judge"}}]), nodes(1, 1, H100))
    assert unknown.reason == PlanReason.UNKNOWN_MODEL
    assert "spec.rewards[0].model.parameters" in unknown.message


def test_unknown_gpu_memory_asks_for_it() -> None:
    nameless = nodes(1, 2, "", name="gpu-1")
    rejected = result(spec(LLAMA_1B), nameless)
    assert rejected.reason == PlanReason.NO_GPUS
    assert "node gpu-1" in rejected.message
    assert "spec.placement.gpuMemory" in rejected.message
    assert plan(spec(LLAMA_1B, placement__gpuMemory="80Gi"), nameless).gpus >= 1


def test_a_missing_label_is_filled_in_by_product() -> None:
    chosen = plan(spec(LLAMA_1B), nodes(1, 1, H200, gpu_memory_mib=0))
    assert chosen.memory is not None
    assert chosen.memory.usable_bytes / GIB == pytest.approx(139.8, rel=0.01)


def test_a_batch_that_cannot_be_split_names_the_next_that_can() -> None:
    job = spec(
        LLAMA_1B,
        training__promptsPerStep=3,
        training__numGenerations=3,
        placement__gpus={"min": 2, "max": 2},
    )
    answer = result(job, nodes(1, 8, H100))
    assert answer.reason == PlanReason.INVALID_BATCH_SPLIT
    assert "set spec.training.promptsPerStep to 4" in answer.message


def test_every_rejected_candidate_keeps_its_number() -> None:
    answer = result(spec(QWEN_7B), nodes(1, 4, A10G, host_gib=192), nodes(1, 8, H100))
    assert answer.candidates[0].rejected is None
    for candidate in answer.candidates[1:]:
        assert candidate.rejected is not None
        assert candidate.rejected.need_bytes > 0
        assert candidate.rejected.phase
        if candidate.rejected.reason in ("DeviceMemory", "HostMemory"):
            assert candidate.rejected.need_bytes > candidate.rejected.have_bytes


def test_a_declared_size_alone_is_an_estimate_with_a_wider_margin() -> None:
    declared = plan(spec("my/own", model__parameters="7.6B"), nodes(1, 8, H100))
    known = plan(spec(QWEN_7B), nodes(1, 8, H100))
    assert (declared.architecture, known.architecture) == ("Estimated", "Catalogue")
    assert any("shape estimated" in text for text in declared.warnings)


def test_an_unknown_model_is_rejected() -> None:
    answer = result(spec("my/own"), nodes(1, 8, H100))
    assert answer.reason == PlanReason.UNKNOWN_MODEL
    assert "spec.model.parameters" in answer.message


def test_off_policy_batches() -> None:
    job = spec(
        LLAMA_1B,
        training__generationBatchSize=256,
        training__numIterations=2,
        checkpoint__everySteps=9,
    )
    chosen = plan(job, nodes(1, 1, H100))
    assert chosen.steps_per_generation == 4 * chosen.gradient_accumulation
    assert chosen.save_every_steps == 9


def test_no_gpus_at_all_is_a_plain_sentence() -> None:
    answer: PlanResult = plan_job(
        spec(LLAMA_1B), Inventory(warnings=("node a: its GPUs are shared",))
    )
    assert answer.reason == PlanReason.NO_GPUS
    assert (
        answer.message.split("; the smallest")[0]
        == "no node has GPUs that this job may use: node a: its GPUs are shared"
    )


@pytest.mark.parametrize("gpus", [6, 7, 8, 10])
def test_a_batch_that_whole_nodes_cannot_share_takes_most_of_each(gpus: int) -> None:
    """64 completions over nodes of 10 GPUs: 8 of each, so that 32 are not left out."""
    job = spec(QWEN_7B, placement={"gpus": {"min": 20, "max": 63}, "objective": "FewestGPUs"})
    chosen = plan(job, nodes(8, gpus, H100))
    assert chosen.gpus == 32
    assert chosen.gpus_per_node == (4 if gpus < 8 else 8)
