"""What the planner warns of although the plan stands: what it has assumed, and what may not go as
it estimates."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.dataset import DatasetSpec
from grpo_planner.explain.fixes import with_value
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.memory.phases import Prediction, Predictor
from grpo_planner.memory.setup import Setup
from grpo_planner.model.architecture import ModelFacts
from grpo_planner.model.catalogue import lookup_positions
from grpo_planner.plan import Planner, plan_job
from grpo_planner.result.result import PlanReason
from grpo_planner.search.notes import spec_notes
from grpo_planner.time.constants import stored_fit
from tests.generated import cases
from tests.unit.planning import (
    A10G,
    A100,
    H100,
    L4,
    LLAMA_1B,
    LLAMA_70B,
    QWEN_7B,
    QWEN_32B,
    nodes,
    plan,
    result,
    spec,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
    "tie_word_embeddings": True,
}  # fmt: skip
FASTEST: dict[str, Any] = {"placement__objective": "Fastest"}


def seconds(plan: ExecutionPlan) -> float:
    """The estimated time of a step."""
    assert plan.estimated_step_seconds is not None
    return plan.estimated_step_seconds


def test_a_step_that_is_estimated_near_the_hang_limit_is_warned_of() -> None:
    slow = spec(LLAMA_1B, guard__hangTimeoutSeconds=10, training__promptsPerStep=512)
    seconds = plan(slow, nodes(1, 1, H100)).estimated_step_seconds or 0.0
    assert 3 * seconds > 10
    assert any(
        f"a hang only after {3 * seconds:.0f} s" in text
        for text in plan(slow, nodes(1, 1, H100)).warnings
    )
    calm = spec(LLAMA_1B, guard__hangTimeoutSeconds=86400, training__promptsPerStep=512)
    assert not any("a hang" in text for text in plan(calm, nodes(1, 1, H100)).warnings)


def test_a_plan_on_several_nodes_without_rdma_cards_says_that_its_network_is_assumed() -> None:
    groups, wanted = (
        nodes(2, 8, H100),
        {"placement__nodes": 2, "placement__gpus": {"min": 16, "max": 16}},
    )

    def warned(**more: object) -> bool:
        chosen = plan(spec(LLAMA_1B, **wanted, **more), groups)
        assert chosen.nodes == 2
        return any("assume 400 GB/s between nodes" in text for text in chosen.warnings)

    assert warned()
    assert not warned(resources__limits={"rdma/hca_shared_devices_a": 1})
    declared = plan(spec(LLAMA_1B, **wanted), replace(groups, node_gbps=25.0))
    assert not any("between nodes" in text for text in declared.warnings)
    assert not any(
        "between nodes" in text for text in plan(spec(LLAMA_1B), nodes(1, 8, H100)).warnings
    )


def test_a_plan_says_what_it_assumes_of_the_links_between_its_processes() -> None:
    wanted = {"placement__nodes": 2, "placement__gpus": {"min": 16, "max": 16}}
    two_nodes = plan(spec(LLAMA_1B, **wanted), nodes(2, 8, H100))
    assert two_nodes.link_bytes_per_second == 280_000_000_000, "eight cards of 50 GB/s, 70 % of it"
    declared = plan(spec(LLAMA_1B, **wanted), replace(nodes(2, 8, H100), node_gbps=25.0))
    assert declared.link_bytes_per_second == 17_500_000_000
    one_node = plan(spec(LLAMA_1B, **FASTEST), nodes(1, 8, H100))
    assert one_node.gpus > 1
    assert one_node.link_bytes_per_second == 315_000_000_000
    assert plan(spec(LLAMA_1B), nodes(1, 1, H100)).link_bytes_per_second is None
    assert (declared.has_slow_links(8.7e9), declared.has_slow_links(8.8e9)) == (True, False)


def test_gpus_that_the_batch_leaves_idle_are_explained() -> None:
    six = nodes(1, 6, A10G)
    job = {"training__promptsPerStep": 8, "placement__objective": "Fastest"}
    chosen = plan(spec(LLAMA_1B, **job), six)
    said = (
        "2 of 6 GPUs stay idle: 64 completions per step can't be split over 6; "
        "spec.training.promptsPerStep: 6"
    )
    assert chosen.gpus == 4
    assert [text for text in chosen.warnings if "idle" in text] == [f"{said} would use all 6"]
    obeyed = plan(spec(LLAMA_1B, **job | {"training__promptsPerStep": 6}), six)
    assert obeyed.gpus == 6
    ahead = job | {"training__generationBatchSize": 128}
    (text,) = [text for text in plan(spec(LLAMA_1B, **ahead), six).warnings if "idle" in text]
    assert "spec.training.promptsPerStep: 6 with generationBatchSize: 96 would use" in text
    ahead |= {"training__promptsPerStep": 6, "training__generationBatchSize": 96}
    assert plan(spec(LLAMA_1B, **ahead), six).gpus == 6
    few = plan(
        spec(LLAMA_1B, training__promptsPerStep=1, training__numGenerations=2, **FASTEST), six
    )
    assert any("spec.training.promptsPerStep: 3 would use all 6" in text for text in few.warnings)
    assert not any(
        "idle" in text
        for text in [*obeyed.warnings, *plan(spec(LLAMA_1B), nodes(1, 8, H100)).warnings]
    )


PROMPTS = re.compile(
    r"; spec\.training\.promptsPerStep: (\d+)(?: with generationBatchSize: (\d+))? would use all "
    r"(\d+)"
)
BATCHES = st.fixed_dictionaries(
    {
        "training__promptsPerStep": st.integers(1, 12),
        "training__numGenerations": st.sampled_from([2, 4, 8]),
        "placement__objective": st.sampled_from(["Balanced", "Fastest", "FewestGPUs"]),
    },
    optional={"training__perDeviceTrainBatchSize": st.sampled_from([2, 4, 16])},
)


@settings(max_examples=cases(200, gate=40))
@given(
    batch=BATCHES,
    ahead=st.integers(0, 2),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    engines=st.integers(0, 2),
)
@example({"training__promptsPerStep": 1, "training__numGenerations": 2}, 0, [1, 2], 0)
def test_gpus_that_the_batch_leaves_idle_are_named_with_a_batch_that_takes_them(
    batch: dict[str, Any], ahead: int, sizes: list[int], engines: int
) -> None:
    completions = batch["training__promptsPerStep"] * batch["training__numGenerations"]
    micro_batch = batch.get("training__perDeviceTrainBatchSize", 1)
    assume(completions % micro_batch == 0)
    if ahead:
        batch["training__generationBatchSize"] = ahead * completions
    if engines:
        batch["generation"] = {"engine": "Servers", "servers": {"replicas": engines}}
    there = Inventory(tuple(nodes(1, size, A10G) for size in sizes))

    def chosen() -> ExecutionPlan | None:
        return Planner(spec(LLAMA_1B, **batch), brief=True).plan(there).chosen

    before = chosen()
    assume(before is not None)
    assert before is not None
    gangs = {
        (count, count * gpus)
        for count, gpus in product((1, 2, 3), range(1, 9))
        if sum(size >= gpus for size in sizes) >= count and count * gpus <= sum(sizes) - engines
    }
    counts = {before.nodes}
    if len(sizes) == before.nodes + 1:
        counts.add(len(sizes))
    most = max(world for count, world in gangs if count in counts)
    larger = {world for _, world in gangs if before.gpus < world <= most}
    is_batch = not any(completions % (world * micro_batch) == 0 for world in larger)
    # A node of fewer GPUs than the others leaves some idle, too, whatever the batch.
    text = next((text for text in before.warnings if "per step can't be split" in text), "")
    if not (larger and is_batch):
        assert not text
    elif text or batch["placement__objective"] != "FewestGPUs":
        assert text.startswith(f"{most - before.gpus} of {most} GPUs")
    for prompts, size, used in PROMPTS.findall(text):
        assert int(used) == most
        batch["training__promptsPerStep"] = int(prompts)
        if size:
            batch["training__generationBatchSize"] = int(size)
        after = chosen()
        assert after
        assert after.gpus == most


def test_a_plan_far_slower_than_a_sensible_one_names_it() -> None:
    """32B with offload, and without room to gather it for generation; an adapter leaves that."""
    there = nodes(1, 1, H100)
    slow = plan(spec(QWEN_32B), there)
    text = next(text for text in slow.warnings if " would take " in text)
    assert text.startswith(f"a step is estimated at {seconds(slow):.0f} s: LoRA")
    assert "set spec.adapter.use to Always, which trains an adapter only" in text
    assert 2 * seconds(plan(spec(QWEN_32B, adapter__use="Always"), there)) <= seconds(slow)
    quick = plan(spec(LLAMA_1B), nodes(1, 8, H100))
    assert not any("a step is estimated at" in text for text in quick.warnings)


def test_a_faster_plan_on_fewer_gpus_is_advised_without_a_least_number_of_them() -> None:
    job: dict[str, Any] = {
        "training__dtype": "float32",
        "training__promptsPerStep": 24,
        "generation__sequencesAtATime": 16,
    }
    there = nodes(9, 8, "NVIDIA-L40S", host_gib=64)
    slow = plan(spec("meta-llama/Llama-3.1-8B", **job), there)
    text = next(text for text in slow.warnings if " would take " in text)
    assert text.endswith("set spec.adapter.use to Always, which trains an adapter only")
    obeyed = plan(spec("meta-llama/Llama-3.1-8B", adapter__use="Always", **job), there)
    assert obeyed.gpus < slow.gpus
    assert 2 * seconds(obeyed) <= seconds(slow)


def test_a_plan_that_nobody_would_wait_for_says_what_it_spends_its_time_on() -> None:
    hopeless = plan(spec(LLAMA_70B, adapter__use="Always"), nodes(16, 1, H100))
    assert seconds(hopeless) > 600
    text = next(text for text in hopeless.warnings if "a smaller model or larger GPUs" in text)
    assert "s of it for sending the model between GPUs to generate" in text


def test_where_only_the_spec_keeps_an_engine_away_a_long_generation_says_so() -> None:
    there = nodes(2, 8, H100)
    advice = "set spec.generation.engine to Auto"
    for model, generation, has_advice in (
        (QWEN_7B, {}, True),
        ("Qwen/Qwen3-30B-A3B", {}, False),
        (QWEN_7B, {"kwargs": {"typical_p": 0.9}}, False),
    ):
        job = spec(
            model,
            generation={"engine": "Transformers"} | generation,
            training__maxCompletionLength=30000,
        )
        slow = plan(job, there)
        (text,) = (text for text in slow.warnings if " s of it for " in text)
        assert (advice in text) == has_advice, text
        if has_advice:
            obeyed = plan(spec(model, training__maxCompletionLength=30000), there)
            assert f"with an engine a step would take {seconds(obeyed):.0f} s" in text
            assert 2 * seconds(obeyed) <= seconds(slow)


def test_an_engine_is_advised_only_where_the_objective_would_be_faster_with_it() -> None:
    """With an engine two GPUs are cheaper than eight without, and slower."""
    job: dict[str, Any] = {
        "training__maxCompletionLength": 30000,
        "training__promptsPerStep": 2,
        "placement__objective": "Cheapest",
    }
    there = nodes(4, 2, L4, gpu_hour_price=1.0)
    slow = plan(spec(LLAMA_1B, generation__engine="Transformers", **job), there)
    engined = plan(spec(LLAMA_1B, **job), there)
    assert 600 < seconds(slow) < seconds(engined)
    assert not any("with an engine" in text for text in slow.warnings)
    assert any("fewer or shorter completions" in text for text in slow.warnings)


def test_more_nodes_that_would_be_far_faster_are_named() -> None:
    job: dict[str, Any] = {
        "training__promptsPerStep": 128,
        "adapter__use": "Never",
        "placement__objective": "FewestGPUs",
    }
    there = nodes(16, 1, H100)
    few = plan(spec(QWEN_7B, **job), there)
    text = next(text for text in few.warnings if " would take " in text)
    wanted = int(text.rsplit("spec.placement.gpus.min to ", 1)[1])
    obeyed = plan(spec(QWEN_7B, **job, placement__gpus={"min": wanted}), there)
    assert 2 * seconds(obeyed) <= seconds(few)


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 8192))
def test_sequences_beyond_the_models_positions_are_refused_with_the_length_that_fits(
    prompt: int, completion: int, positions: int
) -> None:
    there = Inventory((nodes(1, 1, H100),))
    lengths = {"maxPromptLength": prompt, "maxCompletionLength": completion}
    facts = ModelFacts(config=LLAMA | {"max_position_embeddings": positions})
    job = spec("my/own", training=lengths)
    answer = plan_job(job, there, facts=facts)
    if prompt + completion <= positions:
        assert "max_position_embeddings" not in answer.message
        return
    assert answer.reason == PlanReason.INVALID_COMBINATION
    message = answer.message
    assert f"= {prompt + completion} tokens, and my/own was made for {positions}" in message
    if prompt >= positions:
        assert message.endswith("lower both")
        return
    path, _, length = message.rsplit("set ", 1)[1].rpartition(" to ")
    shorter = with_value(job, path, int(length)).training
    assert shorter.max_prompt_length + shorter.max_completion_length == positions


@pytest.mark.parametrize(
    ("name", "tokens", "certain"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 32768, True),
        ("unsloth/Qwen2.5-7B-Instruct", 32768, True),
        ("Qwen/Qwen2.5-7B", 131072, True),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 131072, True),
        ("google/gemma-3-1b-it", 32768, True),
        ("my/Qwen2.5-7B-Instruct-tuned", 32768, False),
        ("/models/Qwen2.5-7B-Instruct", 32768, False),
        ("my/own", 0, False),
    ],
)
def test_positions_are_certain_for_names_of_the_hub(name: str, tokens: int, certain: bool) -> None:
    assert lookup_positions(name) == (tokens, certain)
    size = {} if tokens else {"model__parameters": "7.6B"}
    refused = plan_job(
        spec(name, **size, training__maxCompletionLength=200_000),
        Inventory((nodes(1, 8, H100),)),
    )
    assert ("(max_position_embeddings)" in refused.message) is certain


@pytest.mark.parametrize(
    ("model", "dataset", "warns"),
    [
        ("meta-llama/Llama-3.2-1B-Instruct", {"promptColumn": "question"}, True),
        ("google/gemma-3-1b-it", {"columns": {"prompt": "problem"}}, True),
        ("Qwen/Qwen3-0.6B", {"promptColumn": "text"}, True),
        ("Qwen/Qwen3-30B-A3B", {"promptColumn": "text"}, True),
        ("Qwen/Qwen3-0.6B-Base", {"promptColumn": "question"}, False),
        ("meta-llama/Llama-3.2-1B", {"promptColumn": "question"}, False),
        ("org/model-italian", {"promptColumn": "question"}, False),
        ("meta-llama/Llama-3.2-1B-Instruct", {}, False),
        ("meta-llama/Llama-3.2-1B-Instruct", {"promptColumn": "messages"}, False),
        (
            "meta-llama/Llama-3.2-1B-Instruct",
            {"promptColumn": "question", "systemPrompt": "Be brief."},
            False,
        ),
    ],
)
def test_text_for_a_chat_model_is_warned_of(
    model: str, dataset: dict[str, object], warns: bool
) -> None:
    rows = DatasetSpec.model_validate({"name": "team/rows", **dataset})
    job = spec(model).model_copy(update={"dataset": rows})
    warned = [text for text in spec_notes(job) if "spec.dataset.promptColumn" in text]
    assert len(warned) == warns
    assert all("set spec.dataset.systemPrompt" in text for text in warned)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lrSchedulerType": "constant", "warmupRatio": 0.1}, "constant_with_warmup"),
        ({"lrSchedulerType": "constant_with_warmup", "warmupRatio": 0.1}, ""),
        *(
            ({"lrSchedulerType": kind, "lrSchedulerKwargs": least}, says)
            for kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
            for least, says in (
                ({"min_lr": 1e-3}, "rises above learningRate 1e-06"),
                ({"min_lr": 1e-7}, ""),
                ({"min_lr_rate": 0.1}, ""),
            )
        ),
        *(
            (
                {
                    "lrSchedulerType": "warmup_stable_decay", "maxSteps": 10,
                    "warmupRatio": warmup, "lrSchedulerKwargs": parts,
                },
                says,
            )
            for warmup, parts, says in (
                (0.9, {"num_decay_steps": 5}, "take 14 steps and the run has 10"),
                (0, {"num_decay_steps": 50}, "take 50 steps and the run has 10"),
                (0.1, {"num_decay_steps": 2, "num_stable_steps": 3}, "take 6 steps and the run"),
                (0.1, {"num_decay_steps": 2, "num_stable_steps": 7}, ""),
                (0.5, {"num_decay_steps": 5}, ""),
            )
        ),
    ],
)  # fmt: skip
def test_a_schedule_that_is_not_what_its_settings_say_is_warned_of(
    changes: dict[str, Any], says: str
) -> None:
    job = spec(LLAMA_70B, **{f"training__{name}": value for name, value in changes.items()})
    warned = [text for text in spec_notes(job) if "lrSchedulerType" in text]
    assert len(warned) == bool(says)
    assert all(says in text and len(text) <= 300 for text in warned)


@pytest.mark.parametrize(
    "path", ["placement.gpuMemory", "sharedMemory", "checkpoint.volumeClaimTemplate.size"]
)
@pytest.mark.parametrize(("size", "lacks_unit"), [(80, True), ("80", True), ("80Gi", False)])
def test_a_size_without_its_unit_is_warned_of(path: str, size: int | str, lacks_unit: bool) -> None:
    warned = [text for text in spec_notes(spec(QWEN_7B, **{path: size})) if "counts bytes" in text]
    assert (
        warned == [f"spec.{path} 80 counts bytes: write 80Gi if gibibytes are meant"] * lacks_unit
    )


def test_rewards_that_all_weigh_nothing_are_warned_of() -> None:
    weights: dict[str, Any] = {"rewards": [{"accuracy": {}, "weight": 0}]}
    assert any("weight is 0" in text for text in spec_notes(spec(QWEN_7B, **weights)))
    assert not any("weight is 0" in text for text in spec_notes(spec()))


def test_a_plan_of_more_than_six_hours_a_step_is_refused_unless_it_is_allowed() -> None:
    job: dict[str, Any] = {
        "training__maxCompletionLength": 30_000,
        "training__numGenerations": 64,
        "training__promptsPerStep": 128,
        "generation__engine": "Transformers",
        "placement__objective": "Fastest",
    }
    there = nodes(1, 1, H100)
    refused = result(spec(QWEN_7B, **job), there)
    assert refused.reason == "TooSlow"
    assert "h per step" in refused.message
    assert "set spec.placement.allowSlow to true" in refused.message
    allowed = plan(spec(QWEN_7B, placement__allowSlow=True, **job), there)
    assert seconds(allowed) * stored_fit().low > 6 * 3600
    hours = seconds(allowed) * stored_fit().low / 3600
    assert f"{hours:.1f} h per step or more" in refused.message


def test_a_plan_is_refused_by_the_low_end_of_its_range_alone() -> None:
    """The longest run that is planned may take 1/low times the limit."""
    there, fastest = nodes(1, 1, H100), {"placement__objective": "Fastest", "adapter__use": "Never"}
    most_steps = 90 * 86400 / seconds(plan(spec(QWEN_7B, **fastest), there)) / stored_fit().low
    assert plan(spec(QWEN_7B, training__maxSteps=int(0.99 * most_steps), **fastest), there)
    beyond = spec(QWEN_7B, training__maxSteps=int(1.01 * most_steps), **fastest)
    assert result(beyond, there).reason == "TooSlow"


def test_a_run_of_more_than_ninety_days_is_refused_unless_it_is_allowed() -> None:
    refused = result(spec(QWEN_7B, training__maxSteps=10_000_000), nodes(1, 1, H100))
    assert refused.reason == "TooSlow"
    assert "10000000 of them" in refused.message
    assert plan(spec(QWEN_7B, training__maxSteps=1000), nodes(1, 1, H100))


def test_a_nearly_full_gpu_is_warned_of() -> None:
    full = plan(spec(QWEN_32B), nodes(1, 1, H100))
    assert any("of each GPU" in text for text in full.warnings)
    roomy = plan(spec(LLAMA_1B), nodes(1, 1, H100))
    assert not any("of each GPU" in text for text in roomy.warnings)


def test_a_job_that_takes_too_long_everywhere_is_refused_after_few_predictions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a plan in time no score ends the search; 1,344 divisors have thousands of options."""
    predictions = 0
    predict = Predictor.predict

    def counted(predictor: Predictor, setup: Setup, scoring: int = 0) -> Prediction:
        nonlocal predictions
        predictions += 1
        return predict(predictor, setup, scoring)

    monkeypatch.setattr(Predictor, "predict", counted)
    sizes = {"training__numGenerations": 720, "training__promptsPerStep": 55440}
    there = [nodes(count, 8, product) for count, product in ((4, H100), (2, A100), (3, L4))]
    assert result(spec(QWEN_7B, **sizes), *there).reason == "TooSlow"
    assert predictions < 1500


@pytest.mark.parametrize(
    ("gpus", "changes", "reason"),
    [
        ((6,), {"tensorParallel": 4}, "2 of 6 GPUs stay idle: spec.generation.tensorParallel 4"),
        ((3,), {"tensorParallel": 2}, "1 of 3 GPUs stay idle: spec.generation.tensorParallel 2"),
        ((8, 4), {}, "4 of 12 GPUs stay idle: every pod has as many GPUs, and a node has 4"),
        ((8, 8), {}, ""),
        ((4,), {"tensorParallel": 2}, ""),
    ],
)
def test_gpus_that_a_gang_cannot_use_are_named(
    gpus: tuple[int, ...], changes: dict[str, Any], reason: str
) -> None:
    job = spec(
        QWEN_7B,
        generation={"engine": "Colocated", **changes},
        training__promptsPerStep=12,
        placement__objective="Fastest",
    )
    idle = [
        text
        for text in plan(job, *(nodes(1, each, H100) for each in gpus)).warnings
        if "idle" in text
    ]
    assert [text[: len(reason)] for text in idle] == ([reason] if reason else [])
