"""After OutOfMemory with an engine: fewer completions at a time, then sleep, then Transformers, as
the spec allows."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import Learned
from grpo_planner.replan.oom_replan import leaner_splits, mildest_fitting_split, split_name
from grpo_planner.replan.past_run import Run
from grpo_planner.search.engine_plan import short_sampler_name
from tests.generated import cases
from tests.unit.planning import A10G, H100, LLAMA_1B, QWEN_7B, nodes, plan, spec
from tests.unit.test_planner_relief import MAY_CHANGE, oom, ran_out

EIGHT = nodes(1, 8, H100)


def begun(model: str = QWEN_7B, *groups: Any, **changes: Any) -> Run:
    """A job whose completions an engine samples, with its first plan."""
    job = spec(model, **{"generation__engine": "Auto"} | changes)
    run = Run(plan(job, *(groups or (EIGHT,))), job, Learned())
    assert run.plan.engine is not None
    return run


@pytest.mark.parametrize(
    "generation",
    [
        {"engine": "Auto"}, {"engine": "Colocated", "sleep": True}, {"engine": "Colocated",
        "memoryShare": 0.3}, {"engine": "Colocated", "sequencesAtATime": 3},
        {"engine": "Servers", "servers": {"replicas": 3}},
        {"engine": "Colocated", "engineArguments": {"maxNumSeqs": 5, "kvCacheDtype": "fp8",
        "enforceEager": True}},
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_with_an_engine_is_read_back_as_it_was_made(generation: dict[str, Any]) -> None:
    run = begun(generation=generation)
    assert run.plan.memory is not None
    assert run.prediction.phases == run.plan.memory.phases.model_dump()
    assert run.device_bytes == run.plan.memory.device_bytes
    assert round(run.step_seconds, 2) == run.plan.estimated_step_seconds
    assert run.sized_engine == run.plan.engine


@pytest.mark.parametrize("phase", ["sync", "generate"])
def test_fewer_completions_at_a_time_come_first(phase: str) -> None:
    lengths: dict[str, Any] = {
        "training__maxCompletionLength": 8192, "training__expectedCompletionLength": 8192
    }  # fmt: skip
    run = begun(generation={"engine": "Auto", "sleep": True}, **lengths)
    before, short = run.plan.engine, ran_out(run, oom(phase))
    relief = mildest_fitting_split(short)
    assert relief is not None
    assert relief.engine is not None
    assert before is not None
    assert relief.engine.max_sequences < before.max_sequences
    assert relief.engine.memory_share < before.memory_share
    assert relief.engine.cache_bytes < before.cache_bytes
    assert (relief.micro_batch, relief.generation_sub_batch) == (run.plan.micro_batch, 0)
    told = (
        f"samples {relief.engine.max_sequences} completions at a time instead of "
        f"{before.max_sequences}"
    )
    assert told in relief.changes[-1]
    assert relief.memory is not None
    assert relief.memory.phases.sync < short.prediction.phases["sync"]


def test_an_engine_may_sample_fewer_completions_at_a_time_than_it_has_gpus() -> None:
    run = begun()
    engines = [split["engine"] for split in leaner_splits(run)]
    sizes = [engine.max_sequences for engine in engines if engine]  # type: ignore[attr-defined]
    assert run.plan.engine is not None
    assert min(sizes) == 1 < run.plan.engine.tensor_parallel


def test_the_last_relief_is_transformers_where_the_spec_leaves_it_open() -> None:
    order = [split["engine"] for split in leaner_splits(begun())]
    kinds = [
        short_sampler_name(begun().plan.model_copy(update={"engine": engine})) for engine in order
    ]
    assert list(dict.fromkeys(kinds)) == [
        "vLLM over 4",
        "vLLM over 4, asleep",
        "Transformers",
    ]
    pinned = [
        split["engine"]
        for split in leaner_splits(begun(generation={"engine": "Colocated", "sleep": True}))
    ]
    assert all(engine and engine.sleep for engine in pinned)  # type: ignore[attr-defined]
    hopeless = mildest_fitting_split(ran_out(begun(), oom("sync", 78 * 2**30)))
    assert hopeless is not None
    assert "generates by Transformers instead of an engine" in hopeless.changes[-1]
    assert hopeless.memory is not None
    assert hopeless.memory.phases.sync == 0


def test_sleep_relieves_what_training_lacks() -> None:
    run = begun(
        LLAMA_1B, training__gradientCheckpointing="Enabled", training__perDeviceTrainBatchSize=1
    )
    assert run.plan.engine is not None
    assert not run.plan.engine.sleep
    relief = mildest_fitting_split(ran_out(run, oom("step")))
    assert relief is not None
    assert relief.engine is not None
    assert relief.engine.sleep
    assert "the engine sleeps while the policy is trained" in relief.changes[-1]


def test_a_base_in_host_memory_relieves_an_engine_of_lora_that_lacks_room() -> None:
    run = begun(QWEN_7B, nodes(1, 1, H100), adapter__use="Always")
    assert run.plan.engine is not None
    assert not run.plan.engine.offload_base
    relief = mildest_fitting_split(ran_out(run, oom("sync", 75 * 2**30)))
    assert relief is not None
    assert relief.engine is not None
    assert (relief.engine.sleep, relief.engine.offload_base) == (True, True)
    assert "the frozen base is in host memory while the engine samples" in relief.changes[-1]
    awake = spec(QWEN_7B, adapter__use="Always", generation={"sleep": False})
    pinned = Run(run.plan, awake, Learned())
    engines = [split["engine"] for split in leaner_splits(pinned)]
    assert not any(engine and engine.offload_base for engine in engines)  # type: ignore[attr-defined]


def test_what_is_described_names_the_engine() -> None:
    description = split_name(begun().plan)
    assert description.endswith("32 sampled at a time by vLLM Colocated over 4 GPUs")


def test_a_sync_without_an_engine_is_the_fullest_phase() -> None:
    job = spec(QWEN_7B, generation__engine="Transformers")
    run = Run(plan(job, EIGHT), job, Learned())
    assert ran_out(run, oom("sync")).learned.shortfalls[-1].where == run.prediction.peak_phase


PHASES = st.sampled_from(["sync", "generate", "backward", None])


@settings(max_examples=cases(40, gate=8))
@given(
    st.sampled_from([(QWEN_7B, EIGHT), (LLAMA_1B, EIGHT), (QWEN_7B, nodes(1, 4, A10G))]),
    st.lists(st.tuples(PHASES, st.floats(0, 1.5)), min_size=1, max_size=3),
)  # fmt: skip
def test_relief_keeps_the_training_and_lowers_what_was_short(
    drawn: tuple[str, Any], ends: list[tuple[str | None, float]]
) -> None:
    model, there = drawn
    first = run = begun(model, there)
    for attempt, (phase, share) in enumerate(ends, 1):
        run = ran_out(run, oom(phase, round(share * run.prediction.peak)), attempt)
        where, relief = run.learned.shortfalls[-1].where, mildest_fitting_split(run)
        if relief is None:
            return
        bound = MAY_CHANGE | {"engine"}
        assert relief.model_dump(exclude=bound) == first.plan.model_dump(exclude=bound)
        after = Run(relief, run.spec, run.learned)
        assert after.prediction.phases[where] <= run.prediction.phases[where]
        assert after.sized_engine == relief.engine
        run = after
