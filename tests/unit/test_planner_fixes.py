"""Ways out of a rejection: each suggested change, applied, is planned.

A fix that doesn't work is worse than none.
"""

import re
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest

from grpo_api.effective_spec import applied_class, resolve
from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned, LearnedMemory
from grpo_api.text.units import GIB
from grpo_cli.commands.plan import with_change as what_if
from grpo_planner.explain.fixes import ACCESS_MODE, with_value
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.hardware.inventory_file import parse_gpus
from grpo_planner.hardware.products import lookup_product
from grpo_planner.model.catalogue import lookup_positions
from grpo_planner.plan import plan_job
from grpo_planner.result.result import Fix, PlanReason
from tests.unit.planning import (
    A100,
    H100,
    H200,
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

ONE = {"min": 1, "max": 1}
A100_40 = "NVIDIA-A100-SXM4-40GB"
ONCE = {"size": "1Ti", "accessMode": "ReadWriteOnce"}
REJECTED = {
    "spec.reference.strategy": spec(QWEN_32B, adapter__use="Never", reference__strategy="Clone"),
    "spec.training.gradientCheckpointing": spec(
        LLAMA_1B, training__gradientCheckpointing="Disabled", training__maxCompletionLength=65536
    ),
    "spec.training.perDeviceTrainBatchSize": spec(
        QWEN_7B,
        training__perDeviceTrainBatchSize=256,
        training__promptsPerStep=32,
        placement__gpus=ONE,
    ),
    "spec.placement.gpus.max": spec(
        QWEN_32B, placement__gpus=ONE, adapter__use="Never", reference__strategy="Sharded"
    ),
    "spec.placement.gpuProduct": spec(QWEN_32B, placement__gpuProduct=L4, adapter__use="Never"),
    "spec.resources.limits.memory": spec(LLAMA_1B, resources__limits={"memory": "2Gi"}),
    "spec.resources.requests.memory": spec(LLAMA_1B, resources__requests={"memory": "2Gi"}),
    "spec.adapter.use": spec(
        QWEN_7B, placement__gpus=ONE, placement__gpuProduct=L4, adapter__use="Never"
    ),
    "spec.training.maxCompletionLength": spec(
        LLAMA_70B, training__maxCompletionLength=130000, adapter__use="Always"
    ),
}
THERE = inventory(nodes(1, 8, A100), nodes(1, 4, L4, host_gib=64))


def applied(job: GRPOJobSpec, fix: Fix) -> GRPOJobSpec:
    """The job with a fix, each of its changes as `--what-if` takes it."""
    for change in fix.changes:
        job = what_if(job, f"{change.path}={change.value}")
    return job


@pytest.mark.parametrize("path", REJECTED)
def test_each_fix_when_applied_is_planned(path: str) -> None:
    job: GRPOJobSpec = REJECTED[path]
    answer = plan_job(job, THERE)
    assert not answer.feasible
    assert path in [change.path for fix in answer.fixes for change in fix.changes], answer.message
    assert len(answer.fixes) <= 3
    for fix in answer.fixes:
        changed = plan_job(applied(job, fix), THERE).chosen
        assert changed is not None, fix
        (seconds,) = re.findall(r", ([0-9]+) s per step$", fix.message)
        assert int(seconds) == pytest.approx(changed.estimated_step_seconds, abs=0.51)
        assert fix.message in answer.message


def test_completions_are_shortened_no_further_than_their_expected_length() -> None:
    limits: dict[str, Any] = {
        "training__maxCompletionLength": 130000,
        "training__expectedCompletionLength": 1000,
    }
    answer = plan_job(spec(LLAMA_70B, adapter__use="Always", **limits), THERE)
    lengths = [
        int(change.value)
        for fix in answer.fixes
        for change in fix.changes
        if change.path == "spec.training.maxCompletionLength"
    ]
    assert lengths, answer.message
    assert min(lengths) >= 1000


def test_engines_in_pods_that_have_no_room_may_be_others() -> None:
    there = inventory(nodes(1, 8, A100))
    for servers, missing in (
        ({"replicas": 1, "gpusPerReplica": 8}, "these nodes have too few GPUs; set"),
        ({"replicas": 9}, "these nodes have too few GPUs; lower servers.replicas or set"),
        ({"replicas": 1, "gpuProduct": L4}, f"of product {L4}: these nodes have too few GPUs; set"),
    ):
        job = spec(LLAMA_1B, generation={"engine": "Servers", "servers": servers})
        answer = plan_job(job, there)
        assert missing in answer.message
        path = "spec.generation.engine"
        assert (path, "Auto") in [
            (change.path, change.value) for fix in answer.fixes for change in fix.changes
        ]
        assert plan_job(what_if(job, f"{path}=Auto"), there).feasible
    large = spec(LLAMA_70B, generation={"engine": "Servers", "servers": {"replicas": 1}})
    text = plan_job(large, there).message
    assert "each beside the trainer's: one takes 1" in text
    assert "; raise servers.gpusPerReplica or set spec.generation.engine to Auto" in text


def test_an_engine_that_its_gpus_are_too_small_for_gets_more_of_them() -> None:
    job = spec(LLAMA_70B, generation={"engine": "Servers", "servers": {"replicas": 1}})
    answer = plan_job(job, inventory(nodes(2, 8, A100)))
    changes = {change.path: (change.value, fix) for fix in answer.fixes for change in fix.changes}
    more, fix = changes["spec.generation.servers.gpusPerReplica"]
    changed = plan_job(applied(job, fix), inventory(nodes(2, 8, A100))).chosen
    assert changed is not None
    assert changed.engine is not None
    assert changed.engine.gpus_per_replica == int(more) > 1


def test_a_job_for_which_no_gpu_has_a_price_may_have_another_objective() -> None:
    job = spec(LLAMA_1B, placement__objective="Cheapest")
    answer = plan_job(job, THERE)
    assert answer.reason == "NoGPUs"
    (fix,) = answer.fixes
    assert fix.changes[0].path == "spec.placement.objective"
    assert plan_job(applied(job, fix), THERE).feasible


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"generation__engine": "Transformers"}, "spec.generation.engine"),
        ({"placement__gpus": ONE}, "spec.placement.gpus.max"),
        ({"training__maxSteps": 10_000_000}, "spec.training.maxSteps"),
        ({"training__promptsPerStep": 512}, "spec.training.maxCompletionLength"),
    ],
)
def test_what_takes_too_long_gets_verified_changes_that_make_it_faster(
    changes: dict[str, Any], path: str
) -> None:
    sizes = {"maxCompletionLength": 30_000, "numGenerations": 64, "promptsPerStep": 64}
    job = spec(QWEN_7B, training=sizes)
    for field, value in changes.items():
        job = with_value(job, field.replace("__", "."), value)
    there = inventory(nodes(1, 8, H100))
    answer = plan_job(job, there)
    assert answer.reason == "TooSlow", answer.message
    paths = {change.path for fix in answer.fixes for change in fix.changes}
    assert path in paths, answer.message
    for fix in answer.fixes:
        assert plan_job(applied(job, fix), there).feasible, fix
        assert fix.message in answer.message


SMALLER = {
    "spec.adapter.rank": spec(QWEN_7B, adapter__use="Always", adapter__rank=512,
    placement__gpuProduct=L4,
                              placement__gpus=ONE),
    "spec.training.dtype": spec(LLAMA_1B, adapter__use="Never", training__optimizer="AdamW",
                                resources__limits={"memory": "8Gi"}, placement__gpuProduct=L4,
                                placement__gpus=ONE),
}  # fmt: skip


@pytest.mark.parametrize("path", SMALLER)
def test_rank_and_dtype_are_tried(path: str) -> None:
    job, there = SMALLER[path], inventory(nodes(1, 1, L4, host_gib=60))
    answer = plan_job(job, there)
    (fix,) = [fix for fix in answer.fixes if fix.changes[0].path == path]
    assert plan_job(applied(job, fix), there).feasible


def test_fewer_targets_are_tried_where_the_model_has_them() -> None:
    there = inventory(nodes(1, 1, L4, host_gib=60))

    def job(tokens: int) -> GRPOJobSpec:
        return spec(
            QWEN_7B,
            adapter__use="Always",
            adapter__rank=7,
            training__maxCompletionLength=tokens,
            placement__allowSlow=True,
        )

    first = bisect_left(
        range(1 << 16),
        True,
        key=lambda tokens: tokens > 0 and not plan_job(job(tokens), there).feasible,
    )
    fix = plan_job(job(first), there).fixes[0]
    assert [(change.path, change.value) for change in fix.changes] == [
        ("spec.adapter.targetModules", "[q_proj, v_proj]")
    ]
    assert plan_job(applied(job(first), fix), there).feasible


def test_where_no_change_helps_alone_two_do_and_each_is_needed() -> None:
    job = spec("Qwen/Qwen2.5-7B", adapter__use="Never", training__maxCompletionLength=32768)
    there = inventory(nodes(1, 1, L4, host_gib=40))
    (fix,) = plan_job(job, there).fixes
    assert [change.path for change in fix.changes] == [
        "spec.adapter.use",
        "spec.training.maxCompletionLength",
    ]
    assert plan_job(applied(job, fix), there).feasible
    for change in fix.changes:
        assert not plan_job(what_if(job, f"{change.path}={change.value}"), there).feasible


@pytest.mark.parametrize("model", ["my/Qwen2.5-7B-Instruct-tuned", "my/Llama-3-8B-tuned"])
@pytest.mark.parametrize("tokens", [40_000, 200_000, 1_048_576])
def test_no_length_is_advised_that_the_model_was_not_made_for(model: str, tokens: int) -> None:
    job = spec(model, training__maxCompletionLength=tokens)
    answer = plan_job(job, THERE)
    made_for = lookup_positions(model).tokens
    assert made_for
    if answer.chosen:
        assert any(f"were made for {made_for}" in text for text in answer.chosen.warnings)
    for fix in answer.fixes:
        shorter = applied(job, fix).training
        length = shorter.max_prompt_length + shorter.max_completion_length
        assert length <= made_for or shorter == job.training


@pytest.mark.parametrize("model", [LLAMA_1B, QWEN_7B, QWEN_32B, LLAMA_70B])
@pytest.mark.parametrize("use", ["Never", "Always"])
def test_the_hardware_that_would_do_does(model: str, use: str) -> None:
    job = spec(model, adapter__use=use, placement__gpuProduct=L4, placement__gpus=ONE)
    answer = plan_job(job, inventory(nodes(1, 1, L4, host_gib=16)))
    if answer.feasible:
        return
    assert answer.hardware is not None
    assert answer.hardware.message in answer.message
    would_do = answer.hardware
    there = nodes(would_do.nodes, would_do.gpus_per_node, would_do.gpu_product,
                  host_gib=would_do.host_memory_bytes // GIB + 1)  # fmt: skip
    unbound = spec(model, adapter__use=use, placement__objective="FewestGPUs")
    assert plan_job(unbound, inventory(there)).feasible
    less = replace(
        there, gpus_total=would_do.gpus_per_node // 2, gpus_free=would_do.gpus_per_node // 2
    )
    smaller = plan_job(unbound, inventory(less)).chosen
    if smaller:
        assert smaller.memory is not None
        is_full = smaller.memory.device_bytes > 0.9 * smaller.memory.usable_bytes
        assert is_full or (smaller.estimated_step_seconds or 0) > 600


def test_less_that_would_be_full_hides_no_hardware_with_room() -> None:
    """The fewest GPUs that fit may be full, where one GPU more of the same product has room."""
    job = spec("google/gemma-3-27b-it", adapter__use="Never")
    hardware = result(job, nodes(1, 1, L4, host_gib=16)).hardware
    assert hardware is not None
    memory = (
        hardware.nodes * hardware.gpus_per_node * lookup_product(hardware.gpu_product).memory_mib
    )
    there = nodes(1, 8, A100_40, host_gib=1024)
    chosen = plan(job, there)
    assert chosen.memory is not None
    assert chosen.memory.device_bytes < 0.9 * chosen.memory.usable_bytes
    assert memory <= 8 * 40960


def test_the_hardware_that_would_do_has_no_long_steps_where_any_has_none() -> None:
    long = {"maxCompletionLength": 16000, "promptsPerStep": 32, "numGenerations": 16}
    for model, is_short in (
        ("meta-llama/Llama-3.1-8B", True),
        ("meta-llama/Llama-3.1-405B", False),
    ):
        job = spec(model, training=long, placement__gpuProduct=L4)
        hardware = result(job, nodes(1, 1, L4, host_gib=16)).hardware
        assert hardware is not None
        (seconds,) = re.findall(r", ([0-9]+) s per step$", hardware.message)
        assert (int(seconds) <= 600) == is_short, hardware.message
        there = nodes(hardware.nodes, hardware.gpus_per_node, hardware.gpu_product)
        chosen = plan(spec(model, training=long), there)
        assert (chosen.estimated_step_seconds or 0) <= int(seconds) + 1


def test_numbers_of_a_guessed_shape_are_called_so() -> None:
    unknown = result(spec("acme/house-7b"), nodes(1, 1, L4))
    assert "from which the shape of a dense model is guessed" in unknown.message
    slow = {"maxCompletionLength": 30000, "promptsPerStep": 512}
    for training, reason in (({}, "OutOfDeviceMemory"), (slow, "TooSlow")):
        job = spec("acme/house-34b", model__parameters="34B", training=training)
        answer = result(job, nodes(1, 1, H200 if training else L4))
        assert answer.reason == reason, answer.message
        assert "(the shape is a guess: acme/house-34b: shape estimated from 34B" in answer.message


def test_the_hardware_that_would_do_has_host_memory_for_the_kubelet_too() -> None:
    answer = plan_job(spec("meta-llama/Llama-3.1-405B"), parse_gpus("4x8xH100"))
    assert answer.hardware is not None
    there = f"{answer.hardware.nodes}x8x{answer.hardware.gpu_product}"
    assert plan_job(spec("meta-llama/Llama-3.1-405B"), parse_gpus(there)).feasible


def test_the_hardware_that_would_do_counts_on_what_was_learned() -> None:
    job = spec(QWEN_7B, adapter__use="Never")
    small = inventory(nodes(1, 1, L4, host_gib=16))
    learned = Learned(memory={"backward": LearnedMemory(predicted_bytes=GIB, needed_bytes=3 * GIB)})
    before, after = plan_job(job, small).hardware, plan_job(job, small, learned=learned).hardware
    assert before is not None
    assert after is not None
    assert after != before
    there = nodes(after.nodes, after.gpus_per_node, after.gpu_product, host_gib=2048)
    assert plan_job(job, inventory(there), learned=learned).feasible


def test_a_lower_bound_stays_and_what_nothing_can_run_says_so() -> None:
    answer = result(spec(LLAMA_1B, placement__gpus={"min": 16}), nodes(1, 8, H100))
    assert answer.hardware is not None
    assert answer.hardware.nodes * answer.hardware.gpus_per_node == 16
    long = spec("my/own", model__parameters="70B", training__maxCompletionLength=1048576)
    never = result(long, nodes(1, 8, H100))
    assert never.hardware is None
    assert "no usual hardware of up to 64 GPUs, with 128 GiB of host memory for" in never.message
    large = result(spec(LLAMA_1B, placement__nodes=16), nodes(1, 8, H100))
    assert large.hardware is None
    assert "without spec.placement.nodes, gpus.min and spec.resources the smallest" in large.message
    assert plan_job(spec(LLAMA_1B), Inventory()).hardware is not None


def test_hardware_that_the_placement_leaves_out_says_so() -> None:
    path = "spec.placement"
    for placement, pins in (
        ({}, ""),
        ({"gpuProduct": A100}, f"without {path}.gpuProduct "),
        ({"gpuProduct": L4, "gpus": ONE}, f"without {path}.gpuProduct and {path}.gpus.max "),
    ):
        job = spec(adapter__use="Never", placement=placement)
        answer = result(job, nodes(1, 1, L4, host_gib=16))
        assert answer.hardware is not None
        assert f"; {pins}the smallest hardware that would do: " in answer.message
    large = result(spec(placement={"nodes": 16, "gpuProduct": L4}), nodes(1, 8, L4))
    assert "without spec.placement.gpuProduct, nodes, gpus.min and spec." in large.message


def test_no_more_gpus_are_advised_than_the_batch_can_be_split_over() -> None:
    job = spec(placement__gpus={"min": 3, "max": 3})
    (fix,) = result(job, nodes(1, 8, H100)).fixes
    assert (fix.changes[0].path, fix.changes[0].value) == ("spec.placement.gpus.max", "4")


def test_too_few_gpus_offers_fewer() -> None:
    answer = result(spec(LLAMA_1B, placement__gpus={"min": 16}), nodes(1, 8, H100))
    assert answer.reason == PlanReason.NOT_ENOUGH_GPUS
    assert [(fix.changes[0].path, fix.changes[0].value) for fix in answer.fixes] == [
        ("spec.placement.gpus.min", "8")
    ]


def test_a_claim_that_keeps_the_gang_on_one_node_is_named() -> None:
    job = spec(LLAMA_1B, placement__gpus={"min": 16}, checkpoint__volumeClaimTemplate=ONCE)
    answer = result(job, nodes(2, 8, H100))
    (change,) = answer.fixes[0].changes
    assert (change.path, change.value) == (ACCESS_MODE, "ReadWriteMany")
    assert f"{ACCESS_MODE} ReadWriteOnce keeps the gang on one node" in answer.message
    assert answer.message.count("ReadWriteMany") == 1
    large = spec(LLAMA_70B, adapter__use="Never", checkpoint__volumeClaimTemplate=ONCE)
    assert result(large, nodes(4, 4, A100)).message.count("ReadWriteMany") == 1
    assert plan_job(
        with_value(job, ACCESS_MODE, "ReadWriteMany"), inventory(nodes(2, 8, H100))
    ).feasible


def test_a_batch_that_the_nodes_cannot_share_is_named() -> None:
    job = spec(LLAMA_1B, placement__nodes=3)
    answer = result(job, nodes(4, 8, H100))
    assert answer.reason == PlanReason.INVALID_BATCH_SPLIT
    assert "can't be split over as many GPUs on each of 3 nodes" in answer.message
    assert "set spec.training.promptsPerStep to 9" in answer.message
    seven = result(spec(LLAMA_1B, placement__gpus={"min": 7, "max": 7}), nodes(1, 8, H100))
    assert "can't be split over 7 GPUs: it must be" in seven.message
    assert plan_job(
        with_value(job, "spec.training.promptsPerStep", 9), inventory(nodes(4, 8, H100))
    ).feasible


def test_another_number_of_prompts_comes_with_a_generation_batch_of_whole_steps() -> None:
    job = spec(LLAMA_1B, placement__nodes=3, training__generationBatchSize=128)
    answer = result(job, nodes(4, 8, H100))
    assert "set spec.training.promptsPerStep to 9 and generationBatchSize to 144" in answer.message
    training = {"promptsPerStep": 9, "generationBatchSize": 144}
    assert result(with_value(job, "spec.training", training), nodes(4, 8, H100)).feasible


def test_no_more_gpus_are_advised_than_the_class_allows() -> None:
    job = spec(QWEN_32B, adapter__use="Never", reference__strategy="Sharded")
    for most, advised in ((1, False), (None, True)):
        limits = {"limits": {"gpus": most}} if most else {}
        effective = resolve(job, applied_class("small", 1, limits), {}).spec
        assert effective is not None
        if not most:
            effective = with_value(effective, "spec.placement.gpus", ONE)
        paths = [change.path for fix in plan_job(effective, THERE).fixes for change in fix.changes]
        assert ("spec.placement.gpus.max" in paths) == advised


def test_what_is_faster_but_dearer_says_by_how_much() -> None:
    answer = result(spec(LLAMA_1B, placement__objective="FewestGPUs"), nodes(1, 8, H100))
    assert answer.chosen is not None
    dearer = next(
        c
        for c in answer.candidates
        if c.gpus == 8 and c.method == "Full" and c.optimizer == "AdamW"
    )
    assert dearer.rejected is not None
    assert dearer.rejected.reason == "NoBetter"
    assert dearer.rejected.message.endswith("% faster, but 8 GPUs instead of 1")


def test_a_batch_taken_at_once_fits_where_accumulating_it_would_not() -> None:
    settings = {"training__optimizer": "AdamW8bit", "placement__gpus": {"min": 8, "max": 8}}
    settings["placement__objective"] = "Fastest"
    at_once = result(spec("microsoft/Phi-4-mini", **settings), nodes(1, 8, H100)).chosen
    accumulated = spec("microsoft/Phi-4-mini", training__perDeviceTrainBatchSize=1, **settings)
    bit_by_bit = result(accumulated, nodes(1, 8, H100)).chosen
    assert at_once is not None
    assert bit_by_bit is not None
    assert (at_once.strategy, at_once.gradient_accumulation) == ("Clone", 1)
    assert (bit_by_bit.strategy, bit_by_bit.gradient_accumulation) == ("Offload", 8)


def test_pins_that_exclude_one_another_name_them_all() -> None:
    job = spec(
        reference__strategy="Sharded", reference__sync={"everySteps": 5},
        training__optimizer="AdamW8bit",
        reference__offload={},
    )  # fmt: skip
    answer = result(job, nodes(1, 8, H100))
    assert answer.reason == PlanReason.INVALID_COMBINATION
    for pin in (
        "reference.strategy Sharded",
        "training.optimizer AdamW8bit",
        "reference.offload",
        "reference.sync",
    ):
        assert pin in answer.message
    assert "IfNeeded" not in answer.message


def test_an_offloaded_reference_under_zero_3_and_on_the_host() -> None:
    answer = result(spec(reference__strategy="Sharded", reference__offload={}), nodes(1, 8, H100))
    assert {candidate.strategy for candidate in answer.candidates} == {"Sharded"}
    host = result(spec(reference__offload={}), nodes(1, 8, H100))
    assert {candidate.strategy for candidate in host.candidates} == {"Offload", "Sharded"}
    gathered = result(
        spec(
            QWEN_32B,
            adapter__use="Never",
            training__ds3GatherForGeneration="Enabled",
            placement__gpuProduct=L4,
        ),
        nodes(1, 4, L4),
    )
    assert gathered.reason == PlanReason.OUT_OF_DEVICE_MEMORY


def test_nodes_too_uneven_for_the_gang_are_named() -> None:
    job = spec(LLAMA_1B, placement__gpus={"min": 12, "max": 12}, training__promptsPerStep=12)
    answer = result(job, nodes(1, 8, H100), nodes(1, 4, H100))
    assert answer.reason == PlanReason.NOT_ENOUGH_GPUS
    assert "any number of nodes with the same GPU, as many for every pod, and" in answer.message


def test_an_engine_that_has_room_on_gpus_of_its_own_only_is_advised() -> None:
    size: dict[str, Any] = {"adapter__use": "Always", "training__maxCompletionLength": 2048}
    model, there = "meta-llama/Llama-3.1-405B", nodes(4, 8, H200, host_gib=1900)
    slow = plan(spec(model, **size), there)
    assert slow.engine is None
    (text,) = (text for text in slow.warnings if "with an engine a step would take" in text)
    assert text.endswith(
        "set spec.generation.engine to Servers and spec.generation.servers.gpusPerReplica to 8"
    )
    servers = {"engine": "Servers", "servers": {"gpusPerReplica": 8}}
    obeyed = plan(spec(model, generation=servers, **size), there).estimated_step_seconds or 0
    assert f" a step would take {obeyed:.0f} s;" in text
    assert 2 * obeyed <= (slow.estimated_step_seconds or 0)
