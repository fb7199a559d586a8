"""CPU jobs: the split of the batch, the reference, and the pods' memory."""

from typing import Any

import pytest

from grpo_api.text.units import GIB
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import plan_job
from grpo_planner.result.result import PlanReason, PlanResult
from tests.unit.planning import H100, LLAMA_1B, nodes, plan, spec


def cpu(**changes: Any) -> PlanResult:
    """The plan of a small model on CPUs."""
    values = {"model__parameters": "77K", "placement__accelerator": "CPU"} | changes
    return plan_job(spec("demo", **values), Inventory())


def test_two_nodes_of_two_processes_share_the_batch() -> None:
    chosen = cpu(placement__nodes=2, placement__processesPerNode=2).chosen
    assert chosen is not None
    assert (chosen.world_size, chosen.micro_batch, chosen.gradient_accumulation) == (4, 16, 1)
    assert (chosen.dtype, chosen.gpus, chosen.memory, chosen.autocast) == (
        "float32",
        0,
        None,
        False,
    )
    assert GIB < chosen.host_memory_bytes < 8 * GIB


def test_a_batch_that_does_not_divide_is_rejected() -> None:
    answer = cpu(placement__nodes=3)
    assert answer.reason == PlanReason.INVALID_BATCH_SPLIT
    assert "3 nodes" in answer.message
    assert "set spec.training.promptsPerStep to 9" in answer.message


def test_a_pinned_micro_batch_that_does_not_divide_is_rejected() -> None:
    answer = cpu(placement__nodes=4, training__perDeviceTrainBatchSize=32)
    assert "with perDeviceTrainBatchSize 32" in answer.message


def test_the_entropies_of_a_micro_batch_are_no_more_than_torch_ranks() -> None:
    """torch.quantile takes 2^24 numbers: here 4 completions of 2^20 tokens on each of 4 ranks."""
    long = {"training__maxCompletionLength": 1 << 20, "training__topEntropyQuantile": 0.2}
    ranks = {"placement__nodes": 2, "placement__processesPerNode": 2}
    chosen = cpu(**long, **ranks).chosen
    assert chosen is not None
    assert (chosen.world_size, chosen.micro_batch, chosen.gradient_accumulation) == (4, 4, 4)
    refused = cpu(**long, **ranks, training__perDeviceTrainBatchSize=8)
    assert refused.reason == PlanReason.INVALID_BATCH_SPLIT
    assert "spec.training.topEntropyQuantile 0.2" in refused.message
    assert "at most 16,777,216" in refused.message
    unlimited = cpu(**(long | ranks | {"training__topEntropyQuantile": 1}))
    assert unlimited.chosen is not None
    assert unlimited.chosen.micro_batch == 16


@pytest.mark.parametrize(
    ("changes", "strategy", "stage", "method"),
    [
        ({}, "Clone", 0, "Full"),
        ({"training__beta": 0.0}, "None", 0, "Full"),
        ({"adapter__use": "Always"}, "Adapter", 0, "LoRA"),
        ({"reference__strategy": "Adapter"}, "Adapter", 0, "LoRA"),
        ({"reference__strategy": "Sharded", "placement__nodes": 2}, "Sharded", 3, "Full"),
        ({"reference__strategy": "Offload"}, "Offload", 0, "Full"),
        ({"reference__offload": {}}, "Offload", 0, "Full"),
        ({"reference__offload": {}, "reference__strategy": "Sharded"}, "Sharded", 3, "Full"),
    ],
)
def test_the_reference_follows_what_was_asked(
    changes: dict[str, Any], strategy: str, stage: int, method: str
) -> None:
    chosen = cpu(**changes).chosen
    assert chosen is not None
    assert (chosen.strategy, chosen.zero_stage, chosen.method) == (strategy, stage, method)


@pytest.mark.parametrize(
    "changes",
    [
        {"reference__strategy": "Sharded", "training__optimizer": "AdamW8bit"},
        {"reference": {"strategy": "Sharded", "offload": {}}, "training__optimizer": "AdamW8bit"},
    ],
)
def test_pins_that_exclude_one_another_are_rejected_as_on_gpus(changes: dict[str, Any]) -> None:
    answer = cpu(**changes)
    assert answer.reason == PlanReason.INVALID_COMBINATION
    assert "set one of them to its default" in answer.message


def test_pins_are_obeyed() -> None:
    chosen = cpu(
        training__optimizer="AdamW8bit", training__gradientCheckpointing="Enabled",
        training__dtype="bfloat16",
        resources__limits={"memory": "3Gi"},
    ).chosen  # fmt: skip
    assert chosen is not None
    assert (chosen.optimizer, chosen.gradient_checkpointing, chosen.dtype) == (
        "AdamW8bit",
        True,
        "bfloat16",
    )
    assert chosen.host_memory_bytes == 3 * GIB


def test_a_generation_for_several_steps_leaves_checkpoints_where_they_are() -> None:
    answer = cpu(
        training__generationBatchSize=128, training__numIterations=3, checkpoint__everySteps=10
    )
    assert answer.chosen is not None
    assert (answer.chosen.steps_per_generation, answer.chosen.save_every_steps) == (8, 10)


def test_a_bigger_model_needs_more_memory() -> None:
    small, big = cpu().chosen, cpu(model__parameters="494M").chosen
    assert small is not None
    assert big is not None
    assert big.host_memory_bytes - small.host_memory_bytes > 20 * 0.49e9


def test_fewer_completions_at_a_time_need_less_memory() -> None:
    long = {
        "model__parameters": "494M",
        "training__maxCompletionLength": 2048,
        "training__generationBatchSize": 4096,
        "training__perDeviceTrainBatchSize": 1,
    }
    whole = cpu(**long).chosen
    one = cpu(**long, generation__sequencesAtATime=1).chosen
    assert whole is not None
    assert one is not None
    assert one.generation_sub_batch == 1
    assert one.host_memory_bytes < 0.9 * whole.host_memory_bytes


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({"training__delta": 1.2}, "training.delta 1.2 cuts ratios off"),
        ({"training__delta": 1.5}, ""),
        ({"training__delta": 1.5, "training__epsilonHigh": 0.5}, "1 + epsilonHigh (1.5)"),
        (
            {"training__multiObjectiveAggregation": "normalize_then_sum"},
            "whatever scaleRewards says (group)",
        ),
        (
            {
                "training__multiObjectiveAggregation": "normalize_then_sum",
                "training__scaleRewards": "batch",
            },
            "",
        ),
    ],
)
def test_settings_that_trl_passes_over_are_warned_of(
    settings: dict[str, Any], warning: str
) -> None:
    chosen = cpu(**settings).chosen
    assert chosen is not None
    about = [text for text in chosen.warnings if "delta" in text or "scaleRewards" in text]
    assert len(about) == bool(warning)
    assert not warning or warning in about[0]


@pytest.mark.parametrize(
    "kind", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratios_that_are_not_of_the_losss_level_are_warned_of(level: str, kind: str) -> None:
    settings = {
        "training__importanceSamplingLevel": level,
        "training__lossType": kind,
        "training__importanceSampling": {"level": "token"},
    }
    chosen = cpu(**settings).chosen
    on_gpu = plan(spec(LLAMA_1B, **settings), nodes(1, 1, H100))
    assert chosen is not None
    for warnings in (chosen.warnings, on_gpu.warnings):
        assert any(f"lossType {kind} is not GSPO" in text for text in warnings) == (
            level == "sequence" and kind in ("bnpo", "dr_grpo", "dapo", "cispo")
        )
        made_for = {"luspo": "sequence", "vespo": "token"}.get(kind, level)
        assert any("is made for ratios" in text for text in warnings) == (level != made_for)
