"""The planner's part of spec.generation.fallback: the same split with another engine, what it may
cost, and the limit of an engine's numbers."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import EngineFailure, Learned, Rung
from grpo_api.plan.plan import MISMATCH_LIMITS, mismatch_limit
from grpo_api.spec.generation import GenerationSpec
from grpo_api.spec.run_policy import GuardSpec
from grpo_planner.hardware.inventory import Node
from grpo_planner.plan import plan_job
from grpo_planner.replan.engine_fallback import NoFallback, fallback_plan, gpu_seconds
from grpo_planner.replan.past_run import Run
from grpo_planner.replan.refit import refit
from grpo_planner.search.engine_plan import engine_numbers, sampler_name, short_sampler_name
from grpo_planner.search.engines import engine_of
from tests.generated import cases
from tests.unit.planning import A10G, H100, LLAMA_1B, QWEN_7B, inventory, nodes, plan, spec
from tests.unit.test_planner_engine_relief import EIGHT, begun
from tests.unit.test_planner_relief import MAY_CHANGE

SERVERS = {"engine": "Servers", "servers": {"replicas": 2}}


def failed(run: Run, rung: Rung = "ModelRunnerV1", seconds: float | None = -1.0) -> Run:
    """The run, once its engine has failed; by default with what the plan costs."""
    cost = gpu_seconds(run) if seconds == -1.0 else seconds
    failure = EngineFailure(
        attempt=1, reason="EngineFailed", message="no", rung=rung, gpu_seconds=cost
    )
    known = [*run.learned.engine_failures, failure]
    return replace(run, learned=run.learned.model_copy(update={"engine_failures": known}))


@settings(max_examples=cases(60, gate=8))
@given(
    model=st.sampled_from([LLAMA_1B, QWEN_7B]),
    groups=st.builds(nodes, st.just(2), st.sampled_from([1, 4, 8]), st.sampled_from([H100, A10G])),
    generation=st.sampled_from(
        [{"engine": "Auto"}, {"engine": "Colocated", "sleep": True}, SERVERS, {"memoryShare": 0.3}]
    ),
    length=st.sampled_from([64, 1024]),
    rung=st.sampled_from(["ModelRunnerV1", "Transformers"]),
)
def test_a_rung_changes_the_engine_and_fits(
    model: str, groups: Node, generation: dict[str, Any], length: int, rung: Rung
) -> None:
    there = inventory(groups)
    job = spec(model, generation=generation, training__maxCompletionLength=length)
    chosen = plan_job(job, there).chosen
    if chosen is None or chosen.engine is None:
        return
    run = failed(Run(chosen, job, Learned()), rung)
    try:
        after = fallback_plan(run)
    except NoFallback:
        return
    other = {
        name for name in type(after).model_fields if getattr(after, name) != getattr(chosen, name)
    }
    assert other <= MAY_CHANGE | {"engine", "gather_for_generation"}
    assert Run(after, job, run.learned).may_fit()
    assert after.changes[-1].startswith("after EngineFailed in attempt 1: ")
    if after.engine is None:
        return
    assert (after.engine.kind, rung) == (chosen.engine.kind, "ModelRunnerV1")
    assert (after.engine.model_runner, after.engine.sleep) == ("V1", False)
    assert after.engine.graphs_bytes < chosen.engine.graphs_bytes
    assert refit(after, job, there, run.learned) == after


def test_where_no_rung_fits_both_are_told_with_their_numbers() -> None:
    tight = {"training__maxCompletionLength": 256, "reference__strategy": "Sharded"}
    run = failed(begun(QWEN_7B, nodes(1, 4, A10G), **tight))
    assert run.plan.engine is not None
    assert run.plan.engine.sleep
    with pytest.raises(NoFallback, match=r"V1 without sleep needs .*; Transformers needs ") as none:
        fallback_plan(run)
    assert not none.value.fits


def test_an_engine_that_would_be_slower_than_transformers_is_passed_over() -> None:
    few: dict[str, Any] = {
        "training__maxCompletionLength": 512,
        "generation__engineArguments": {"maxNumSeqs": 4},
    }
    run = begun(LLAMA_1B, nodes(1, 1, H100), **few)
    after = fallback_plan(failed(run))
    assert after.engine is None
    named = replace(run, spec=spec(LLAMA_1B, generation__engine="Colocated", **few))
    slow = fallback_plan(failed(named))
    assert slow.engine is not None
    assert slow.estimated_step_seconds is not None
    assert after.estimated_step_seconds is not None
    assert slow.estimated_step_seconds > after.estimated_step_seconds


def test_the_fastest_sharing_of_gpus_is_taken() -> None:
    """A GPU that reads slowly gains by sharing; one that waits for launches does not."""
    run = begun(QWEN_7B, nodes(1, 8, "NVIDIA-L40S"), training__maxCompletionLength=2048)
    alone = run.with_engine(engine_of(run.demand, "Colocated", 1, sleeps=True), None)
    after = fallback_plan(failed(alone))
    assert after.engine is not None
    assert after.engine.tensor_parallel > 1


def test_where_no_gpu_has_room_for_one_completion_of_each_an_engine_samples_fewer() -> None:
    """As in a first plan; the least is what one completion of all the GPUs takes."""
    long = {"training__maxCompletionLength": 16384, "training__expectedCompletionLength": 16384}
    run = begun(QWEN_7B, nodes(1, 8, H100), **long)
    engine = engine_of(run.demand, "Colocated", 4, model_runner="V1")
    memory = run.plan.memory
    assert memory is not None

    def with_engine(usable: int) -> Run:
        tight = memory.model_copy(update={"usable_bytes": usable})
        return run.with_plan(memory=tight).with_engine(engine, None)

    least = with_engine(0)
    tight = with_engine(least.device_bytes)
    assert tight.may_fit()
    assert tight.plan.engine is not None
    assert tight.plan.engine.max_sequences < 4


def test_the_limit_of_cost_is_twice_the_plan_that_failed_first() -> None:
    run = begun(LLAMA_1B, nodes(1, 1, H100), training__maxCompletionLength=128)
    plain = gpu_seconds(run.with_engine(None, None))
    assert plain is not None
    assert fallback_plan(failed(run, "Transformers", plain / 1.99)).engine is None
    for seconds in (plain / 2.01, None):
        with pytest.raises(NoFallback, match=r"nobody knows|more than 2 times") as none:
            fallback_plan(failed(run, "Transformers", seconds))
        assert none.value.fits


def test_later_plans_of_the_job_know_what_failed() -> None:
    job = spec(LLAMA_1B, generation__engine="Auto")
    there = inventory(nodes(1, 1, H100))
    run = Run(plan(job, nodes(1, 1, H100)), job, Learned())
    first = plan_job(job, there, learned=failed(run).learned).chosen
    assert first is not None
    assert first.engine is not None
    assert (first.engine.model_runner, first.engine.sleep) == ("V1", False)
    second = plan_job(job, there, learned=failed(run, "Transformers").learned).chosen
    assert second is not None
    assert second.engine is None
    assert "an engine failed in attempt 1 (EngineFailed)" in second.reason


def test_an_engine_comes_back_only_where_the_spec_insists_on_it() -> None:
    there, job = inventory(EIGHT), spec(LLAMA_1B, generation__engine="Auto")
    run = failed(Run(plan(job, EIGHT), job, Learned()), "Transformers")
    plain = run.with_engine(None, None).plan
    named = spec(LLAMA_1B, generation__engine="Colocated")
    assert refit(plain, named, there, run.learned).engine is None
    insists = spec(LLAMA_1B, generation={"engine": "Colocated", "fallback": "Never"})
    again = refit(plain, insists, there, run.learned)
    assert again.engine is not None
    assert again.engine.model_runner == "V1"


def test_an_engine_is_named_by_its_rung() -> None:
    run = begun(LLAMA_1B, nodes(1, 1, H100))
    after = fallback_plan(failed(run))
    assert sampler_name(after).endswith("model runner V1 without CUDA graphs")
    assert short_sampler_name(after) == "vLLM, runner V1"


@pytest.mark.parametrize(
    ("guard", "generation", "dtype", "limit"),
    [
        ({}, {}, "float32", 0.01),
        ({}, {}, "bfloat16", 0.1),
        ({}, {"engineArguments": {"kvCacheDtype": "auto"}}, "bfloat16", 0.1),
        ({}, {"engineArguments": {"kvCacheDtype": "fp8"}}, "bfloat16", None),
        ({"maxEngineMismatch": 0.5}, {"engineArguments": {"kvCacheDtype": "fp8"}}, "bfloat16", 0.5),
        ({"maxEngineMismatch": 3}, {}, "float32", 3.0),
    ],
)
def test_the_limit_of_an_engines_numbers(
    guard: dict[str, Any], generation: dict[str, Any], dtype: Any, limit: float | None
) -> None:
    found = mismatch_limit(
        GuardSpec.model_validate(guard), GenerationSpec.model_validate(generation), dtype
    )
    assert found == limit


def test_the_plan_has_the_limit_and_follows_the_spec() -> None:
    job = spec(LLAMA_1B, generation__engine="Auto")
    chosen = plan(job, nodes(1, 1, H100))
    assert chosen.engine is not None
    assert chosen.engine.max_mismatch == MISMATCH_LIMITS["bfloat16"]
    numbers = engine_numbers(chosen.engine)
    assert "by 0.1 nats in the mean" in numbers
    assert re.search(r"graphs and work space [0-9.]+ GiB \(assumed\), .* s \(assumed\); ", numbers)
    wide = spec(LLAMA_1B, generation__engine="Auto", guard__maxEngineMismatch=2)
    again = refit(chosen, wide, inventory(nodes(1, 1, H100)))
    assert again.engine is not None
    assert again.engine.max_mismatch == 2
    on_cpus = spec(
        LLAMA_1B, generation__engine="Colocated", placement={"accelerator": "CPU", "nodes": 1}
    )
    slim = plan(on_cpus)
    assert slim.engine is not None
    assert slim.engine.max_mismatch == MISMATCH_LIMITS["float32"]
    assert "GPU" not in engine_numbers(slim.engine)
    eight_bits = spec(LLAMA_1B, generation={"engineArguments": {"kvCacheDtype": "fp8"}})
    printed = plan(eight_bits, nodes(1, 1, H100)).engine
    assert printed is not None
    assert printed.max_mismatch is None
    assert "only printed" in engine_numbers(printed)
