"""After OutOfMemory: what is learned, and the plan that follows; the same batch, the same training,
no more memory."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import HOST, MAX_REPLANS, Learned
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import MemoryShortage, Outcome, Result
from grpo_planner.plan import Planner
from grpo_planner.replan.oom_replan import (
    leaner_splits,
    learned_with_shortage,
    mildest_fitting_split,
    shortage_message,
)
from grpo_planner.replan.past_run import Run
from grpo_planner.time.step_time import step_message
from tests.generated import cases
from tests.unit.planning import A100, H100, L4, LLAMA_1B, QWEN_7B, inventory, nodes, plan, spec

GIB = 2**30
PHASES = ("load", "generate", "reward", "reference", "forward", "backward", "step", None)
MAY_CHANGE = {
    *("micro_batch", "gradient_accumulation", "steps_per_generation", "gradient_checkpointing"),
    *(
        "generation_sub_batch",
        "memory",
        "host_memory_bytes",
        "changes",
        "estimated_step_seconds",
        "reason",
    ),
}
CPU = {"placement": {"accelerator": "CPU"}}


def oom(
    phase: str | None = "backward", allocated: int = 0, memory: str = "Device", **more: Any
) -> Outcome:
    """An end for want of memory."""
    shortage = {
        "phase": phase,
        "memory": memory,
        "allocated_bytes": allocated,
        "requested_bytes": 0,
    }
    return Outcome(
        result=Result.OUT_OF_MEMORY, shortage=MemoryShortage.model_validate(shortage), **more
    )


def ran_out(run: Run, outcome: Outcome, attempt: int = 1) -> Run:
    """The same run, once that end is known."""
    return replace(run, learned=learned_with_shortage(run, attempt, outcome))


def begun(*groups: Any, model: str = QWEN_7B, **changes: Any) -> Run:
    """A job with its first plan."""
    job = spec(model, **changes)
    return Run(plan(job, *groups or (nodes(1, 8, H100),)), job, Learned())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adapter__use": "Always"},
        {"adapter__use": "Always", "adapter__targetModules": ["q_proj", "v_proj"]},
    ],
    ids=["full", "adapter", "adapter on few modules"],
)
def test_a_plan_read_back_has_the_memory_that_it_was_made_with(changes: dict[str, Any]) -> None:
    run = begun(**changes)
    assert run.plan.memory is not None
    assert run.prediction.phases == run.plan.memory.phases.model_dump()
    assert run.device_bytes == run.plan.memory.device_bytes
    assert round(run.step_seconds, 2) == run.plan.estimated_step_seconds


def test_a_new_split_takes_another_time_which_counts_on_the_links_that_nodes_declare() -> None:
    changes = {
        "training__numGenerations": 16,
        "training__promptsPerStep": 64,
        "placement__gpus": {"min": 16},
    }
    job = spec(QWEN_7B, adapter__use="Never", **changes)
    slow = nodes(2, 8, H100, node_gbps=2.0)
    run = Run(plan(job, slow), job, Learned(), inventory(slow))
    first = run.plan.estimated_step_seconds
    assert first is not None
    assert round(run.step_seconds, 2) == first
    relief = mildest_fitting_split(ran_out(run, oom("backward")))
    assert relief is not None
    assert relief.estimated_step_seconds is not None
    assert relief.estimated_step_seconds > first
    assert step_message(relief.estimated_step_seconds) in relief.reason
    assert relief.reason != run.plan.reason


def test_checkpointing_comes_first_then_the_micro_batch() -> None:
    batch: dict[str, Any] = {"training__numGenerations": 16, "training__promptsPerStep": 64}
    run = begun(nodes(1, 8, H100), placement__objective="Fastest", **batch)
    assert not run.plan.gradient_checkpointing
    seen = []
    for attempt in (1, 2):
        relief = mildest_fitting_split(ran_out(run, oom("backward"), attempt))
        assert relief is not None
        seen.append(
            (relief.gradient_checkpointing, relief.micro_batch, relief.generation_sub_batch)
        )
        run = Run(relief, run.spec, ran_out(run, oom("backward"), attempt).learned)
    assert seen[0][0]
    micro_batches = [micro for _, micro, _ in seen]
    assert micro_batches == sorted(micro_batches, reverse=True)
    assert micro_batches[-1] < micro_batches[0]
    assert len({sub for _, _, sub in seen}) == 1
    assert "after OutOfMemory at backward in attempt 1" in run.plan.changes[0]
    assert "recomputes activations" in run.plan.changes[0]
    assert "micro-batches of" in " ".join(run.plan.changes)


def test_generation_that_ran_out_gets_smaller_calls_and_says_what_that_means() -> None:
    run = begun(generation__engine="Transformers")
    before = run.plan
    relief = mildest_fitting_split(ran_out(run, oom("generate")))
    assert relief is not None
    assert 0 < relief.generation_sub_batch < before.micro_batch * before.steps_per_generation
    assert (relief.micro_batch, relief.gradient_checkpointing) == (
        before.micro_batch,
        before.gradient_checkpointing,
    )
    assert "draws other samples of the same distribution" in relief.changes[-1]


def test_what_was_measured_is_the_floor_of_that_phase_alone() -> None:
    run = begun()
    assert run.plan.memory is not None
    measured = 100 * GIB
    after = ran_out(run, oom("backward", measured))
    for name, size in run.prediction.phases.items():
        assert after.prediction.phases[name] == (
            pytest.approx(measured, rel=1e-9) if name == "backward" else size
        )
    assert after.device_bytes > run.usable_bytes
    again = ran_out(after, oom("backward", measured // 2), 2)
    assert again.learned.factor("backward") >= after.learned.factor("backward") * 0.999


def test_the_whole_search_counts_on_it_too() -> None:
    there = inventory(nodes(1, 8, H100))
    run = begun()
    after = ran_out(run, oom("backward", round(1.3 * run.prediction.phases["backward"])))
    chosen = Planner(run.spec, learned=after.learned).plan(there).chosen
    assert chosen is not None
    assert chosen.memory is not None
    assert chosen != run.plan
    assert chosen.memory.device_bytes <= chosen.memory.usable_bytes
    hopeless = ran_out(run, oom("step", 10**15))
    assert not Planner(run.spec, learned=hopeless.learned).plan(there).feasible


def test_pins_and_losses_of_a_micro_batch_keep_its_size() -> None:
    for run in (
        begun(training__perDeviceTrainBatchSize=2),
        begun(training__lossType="bnpo"),
        begun(training__entropyCoef=0.01),
        begun(training__topEntropyQuantile=0.2),
    ):
        assert {split["micro_batch"] for split in leaner_splits(run)} == {run.plan.micro_batch}
    off = begun(training__gradientCheckpointing="Disabled")
    assert not any(split["gradient_checkpointing"] for split in leaner_splits(off))


def test_a_gpu_job_whose_host_ran_out_asks_for_more_of_it_and_stays_as_it_is() -> None:
    run = begun()
    after = ran_out(run, oom(None, memory="Host"))
    relief = mildest_fitting_split(after)
    assert relief is not None
    assert relief.host_memory_bytes >= 1.49 * run.plan.host_memory_bytes
    assert relief.model_dump(
        exclude=MAY_CHANGE | {"engine", "gather_for_generation"}
    ) == run.plan.model_dump(exclude=MAY_CHANGE | {"engine", "gather_for_generation"})
    assert relief.micro_batch == run.plan.micro_batch
    assert "of host memory per pod instead of" in relief.changes[-1]
    anew = Planner(run.spec, learned=after.learned).plan(inventory(nodes(1, 8, H100))).chosen
    assert anew is not None
    assert anew.host_memory_bytes > run.plan.host_memory_bytes


def test_a_cpu_job_at_its_limit_gets_leaner_and_without_one_asks_for_more() -> None:
    job = spec(LLAMA_1B, training__numGenerations=8, training__promptsPerStep=4, **CPU)
    free = Run(plan(job), job, Learned())
    relief = mildest_fitting_split(ran_out(free, oom(None, memory="Host")))
    assert relief is not None
    assert relief.micro_batch == free.plan.micro_batch
    assert relief.host_memory_bytes >= 1.49 * free.plan.host_memory_bytes
    job = spec(
        LLAMA_1B,
        training__numGenerations=8,
        training__promptsPerStep=4,
        **CPU,
        resources__limits={"memory": "9Gi"},
    )
    bound = Run(plan(job), job, Learned())
    relief = mildest_fitting_split(ran_out(bound, oom(None, memory="Host")))
    assert relief is not None
    assert relief.gradient_checkpointing
    assert relief.host_memory_bytes == 9 * GIB


def test_a_killed_container_whose_phase_nobody_knows_gets_one_saving_after_the_other() -> None:
    job = spec(
        LLAMA_1B,
        training__numGenerations=8,
        training__promptsPerStep=4,
        **CPU,
        resources__limits={"memory": "1Gi"},
    )
    run, rungs = Run(plan(job), job, Learned()), []
    for attempt in (1, 2, 3, 4):
        run = ran_out(run, oom(None, memory="Host"), attempt)
        relief = mildest_fitting_split(run)
        assert relief is not None
        check_same_training(run.plan, relief)
        rungs.append(
            (relief.gradient_checkpointing, relief.micro_batch, relief.generation_sub_batch)
        )
        run = Run(relief, job, run.learned)
    assert rungs == [(True, 16, 0), (True, 1, 0), (True, 1, 1), (True, 1, 1)]
    assert "nothing that the spec leaves open would lower it" in run.plan.changes[-1]


def test_a_job_that_nothing_relieves_is_told_what_was_tried_and_what_would_do() -> None:
    run = begun(nodes(1, 1, L4), model=LLAMA_1B, placement__gpus={"max": 1})
    leanest = run.with_plan(**list(leaner_splits(run))[-1])
    after = ran_out(leanest, oom("step", 30 * GIB))
    assert mildest_fitting_split(after) is None
    text = shortage_message(after)
    assert "micro-batch 1, with checkpointing" in text
    assert "needed 30.0 GiB or more at step of" in text
    assert "usable each would do, such as" in text
    assert L4 not in text.rpartition("such as")[2]


DRAWN = st.tuples(
    st.sampled_from([QWEN_7B, LLAMA_1B]),
    st.sampled_from([(H100, 1), (H100, 8), (A100, 8), (L4, 4)]),
    st.sampled_from(
        [
            {},
            {"training__lossType": "bnpo"},
            {"training__numIterations": 2},
            {"adapter__use": "Always"},
        ]
    ),
)
ENDS = st.lists(
    st.tuples(st.sampled_from(PHASES), st.sampled_from(["Device", "Host"]), st.floats(0.0, 3.0)),
    min_size=1,
    max_size=MAX_REPLANS,
)


@settings(max_examples=cases(60))
@given(DRAWN, ENDS)
def test_whatever_runs_out_the_batch_and_what_is_trained_stay(
    drawn: tuple[str, tuple[str, int], dict[str, Any]], ends: list[tuple[str | None, str, float]]
) -> None:
    model, (product, count), changes = drawn
    job = spec(model, **changes)
    there = inventory(nodes(1, count, product))
    chosen = Planner(job).plan(there).chosen
    assume(chosen is not None)
    assert chosen is not None
    run, first = Run(chosen, job, Learned()), chosen
    for attempt, (phase, memory, share) in enumerate(ends, 1):
        before = run
        measured = round(share * run.prediction.peak)
        run = ran_out(run, oom(phase, measured, memory), attempt)
        assert learned_with_shortage(before, attempt, oom(phase, measured, memory)) == run.learned
        where = run.learned.shortfalls[-1].where
        assert (where == HOST) == (memory == "Host")
        # floors only rise, and the plan that ran out does not fit by them
        assert all(
            run.learned.factor(key) >= before.learned.factor(key) * 0.999999
            for key in before.learned.memory
        )
        if where != HOST:
            assert not run.may_fit()
        relief = mildest_fitting_split(run)
        if relief is None:
            assert where != HOST
            assert "would do" in shortage_message(run)
            return
        check_same_training(first, relief)
        if where != HOST:
            after = Run(relief, job, run.learned)
            assert after.prediction.phases[where] <= run.prediction.phases[where]
            assert relief.memory is not None
            assert relief.memory.device_bytes == after.device_bytes
            others = [
                run.with_plan(**split).prediction.phases[where] for split in leaner_splits(run)
            ]
            assert after.may_fit() or after.prediction.phases[where] == min(others)
        run = Run(relief, job, run.learned)
    assert len(run.learned.shortfalls) == len(ends)
    assert len(run.plan.changes) <= 16


def check_same_training(one: ExecutionPlan, other: ExecutionPlan) -> None:
    """Nothing differs but the split, whose products stay."""
    assert one.model_dump(
        exclude=MAY_CHANGE | {"engine", "gather_for_generation"}
    ) == other.model_dump(exclude=MAY_CHANGE | {"engine", "gather_for_generation"})
    assert (
        one.micro_batch * one.gradient_accumulation
        == other.micro_batch * other.gradient_accumulation
    )
    assert (
        one.micro_batch * one.steps_per_generation == other.micro_batch * other.steps_per_generation
    )
