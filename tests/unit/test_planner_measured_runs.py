"""Runs that were measured on a cluster: what they correct, what they never change, and that any
content is read."""

import json
from dataclasses import replace
from itertools import permutations
from math import log
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import MOST_FACTOR, Learned, MeasuredStep
from grpo_api.plan.plan import ExecutionPlan
from grpo_planner.plan import Planner, plan_job
from grpo_planner.replan.measured_step import StepSeconds, measured_row
from grpo_planner.replan.past_run import Run
from grpo_planner.time.measured_runs import (
    MOST_PER_SETTING,
    MOST_ROWS,
    OTHERS_FACTOR,
    MeasuredRow,
    MeasuredRuns,
    Setting,
    read_rows,
    written_rows,
)
from tests.generated import cases
from tests.unit.planning import H100, L4, LLAMA_1B, QWEN_7B, inventory, nodes, spec

JOB = spec(QWEN_7B, training__expectedCompletionLength=200)
THERE = inventory(nodes(1, 8, H100))
DATE = "2026-11-26T12:00:00Z"


def planned(*rows: MeasuredRow, namespace: str | None = None) -> ExecutionPlan:
    """The plan of JOB beside these runs."""
    runs = replace(MeasuredRuns.newest(rows), namespace=namespace)
    chosen = plan_job(JOB, THERE, measured=runs).chosen
    assert chosen is not None
    return chosen


USUAL = planned()


def row(factor: float = 1.0, **changes: Any) -> MeasuredRow:
    """A run of USUAL that took `factor` times as long as predicted."""
    run = Run(USUAL, JOB, Learned())
    time = run.step_time
    seconds = StepSeconds(
        200,
        factor * (time.generation + time.gathering),
        factor * (time.compute + time.communication + time.offload),
    )
    measured = measured_row(run, seconds, source="team-a/run", date=DATE)
    assert measured is not None
    return measured.model_copy(update=changes)


@pytest.mark.parametrize("factor", [0.2, 0.7, 1.0, 1.6, 5.0])
def test_a_plan_takes_as_long_as_the_same_plan_was_measured(factor: float) -> None:
    chosen = planned(row(factor))
    sync = Run(USUAL, JOB, Learned()).step_time.sync
    assert USUAL.estimated_step_seconds is not None
    expected = factor * (USUAL.estimated_step_seconds - sync) + sync
    if chosen.gpus == USUAL.gpus and chosen.engine == USUAL.engine:
        assert chosen.estimated_step_seconds == pytest.approx(expected, rel=0.01, abs=0.02)
    is_near = chosen.gpus == USUAL.gpus and bool(chosen.engine) == bool(USUAL.engine)
    assert chosen.step_spread == (0.1 if is_near else 0.25)
    assert f"±{chosen.step_spread:.0%}, measured on this cluster" in chosen.reason
    assert chosen.step_runs == [row(factor).id]
    assert chosen.step_basis == "Measured"


def test_the_range_is_as_wide_as_the_runs_are_apart() -> None:
    runs = [row(1.0), row(1.2, source="team-a/b"), row(1.5, source="team-a/c")]
    chosen = planned(*runs)
    assert chosen.step_spread == pytest.approx(0.25)
    assert set(chosen.step_runs) == {run.id for run in runs}


@pytest.mark.parametrize(
    "change", [{"gpu": L4}, {"fit": "00000000"}, {"parameters": 10**9, "active": 10**9}]
)
def test_runs_of_other_gpus_models_and_fits_change_nothing(change: dict[str, Any]) -> None:
    assert planned(row(3.0, **change)) == USUAL


def test_the_nearest_run_counts_before_the_newest() -> None:
    far = row(4.0, gpus=64, nodes=8, date="2026-12-01T00:00:00Z")
    near = row(2.0, gpus=8)
    runs = MeasuredRuns.newest([far, near]).of_model(near.parameters, near.active)
    here = Setting(H100, 8, 1, 200, None)
    assert (correction := runs.correction(here)) is not None
    assert correction.training == pytest.approx(2.0, rel=0.01)
    assert correction.runs == (near.id,)
    there = runs.correction(Setting(H100, 64, 8, 200, None))
    assert there is not None
    assert there.training == pytest.approx(4.0, rel=0.01)
    half_way = runs.correction(Setting(H100, 32, 1, 200, None))
    assert half_way is not None
    assert half_way.spread >= 0.25


def test_another_namespaces_jobs_are_believed_within_bounds_and_after_the_jobs_own() -> None:
    hostile = row(20.0, source="team-b/run", date="2099-01-01T00:00:00Z")
    usual, worst = row(1.0), planned(hostile, namespace="team-a")
    assert USUAL.estimated_step_seconds is not None
    assert worst.estimated_step_seconds is not None
    assert worst.estimated_step_seconds <= OTHERS_FACTOR * USUAL.estimated_step_seconds + 0.01
    with_own = planned(hostile, usual, namespace="team-a")
    assert with_own.step_runs == [usual.id]


def test_the_jobs_own_steps_count_before_those_of_others() -> None:
    step = MeasuredStep(
        gpu_product=H100, completion_length=200, generation_seconds=30.0, training_seconds=8.0,
        predicted_generation_seconds=10.0, predicted_training_seconds=8.0,
    )  # fmt: skip
    runs = MeasuredRuns.newest([row(5.0)])
    own = plan_job(JOB, THERE, learned=Learned(step=step))
    assert plan_job(JOB, THERE, learned=Learned(step=step), measured=runs) == own


def test_lengths_are_those_of_the_models_runs() -> None:
    job = spec(QWEN_7B, training__maxCompletionLength=1024)
    runs = MeasuredRuns.newest([row(limit=1024, completion=333), row(limit=64, completion=60)])
    chosen = plan_job(job, THERE, measured=runs).chosen
    assert chosen is not None
    assert chosen.expected_completion_length == 333


NUMBERS = st.integers(1, 4096)
SECONDS = st.fixed_dictionaries(
    {}, optional={part: st.floats(1e-3, 1e5) for part in ("training", "generation", "sync")}
)
ROWS = st.builds(
    lambda changes: row(1.0, **changes),
    st.fixed_dictionaries(
        {
            "source": st.sampled_from(["team-a/x", "team-b/x", "nobody", "ü/☃"]),
            "date": st.datetimes().map(lambda at: at.strftime("%Y-%m-%dT%H:%M:%SZ").zfill(20)),
            "gpus": st.sampled_from([1, 2, 4, 8, 64, 4096]),
            "nodes": st.sampled_from([1, 2, 8]),
            "gpu": st.sampled_from([H100, L4, "CPU"]),
            "completion": NUMBERS,
            "limit": NUMBERS,
            "sampler": st.sampled_from(["vLLM", "Transformers"]),
            "parameters": st.sampled_from([7_615_616_512, 7_600_000_000, 1_000_000_000]),
            "seconds": SECONDS,
            "predicted": SECONDS,
        }
    ),
)


@settings(max_examples=cases(30, gate=8))
@given(rows=st.lists(ROWS, max_size=6), namespace=st.sampled_from([None, "team-a", "team-c"]))
def test_a_plan_depends_on_the_rows_and_not_on_their_order(
    rows: list[MeasuredRow], namespace: str | None
) -> None:
    chosen = planned(*rows, namespace=namespace)
    assert planned(*reversed(rows), *rows, namespace=namespace) == chosen
    assert set(chosen.step_runs) <= {each.id for each in rows}
    assert bool(chosen.step_runs) == (chosen.step_basis == "Measured")
    if chosen.step_spread is not None:
        assert 0.1 <= chosen.step_spread <= MOST_FACTOR
    # Whatever was measured, what fits and what is trained stay.
    assert (chosen.method, chosen.optimizer) == (USUAL.method, USUAL.optimizer)


@settings(max_examples=cases(300, gate=30))
@given(rows=st.lists(ROWS, max_size=12), gpus=NUMBERS, nodes=st.integers(1, 64), length=NUMBERS)
def test_every_correction_is_bounded_and_names_its_rows(
    rows: list[MeasuredRow], gpus: int, nodes: int, length: int
) -> None:
    runs = MeasuredRuns.newest(rows).of_model(row().parameters, row().active)
    for sampler in ("vLLM", "Transformers", None):
        found = runs.correction(Setting(H100, gpus, nodes, length, sampler))
        assert (found is None) == all(each.gpu != H100 for each in runs.rows)
        if found is not None:
            assert 1 / MOST_FACTOR <= found.training <= MOST_FACTOR
            assert 1 / MOST_FACTOR <= found.generation <= MOST_FACTOR
            assert 0.1 <= found.spread <= MOST_FACTOR
            assert found.runs


@settings(max_examples=cases(200, gate=20))
@given(rows=st.lists(ROWS, max_size=20))
def test_the_newest_rows_of_each_setting_stay_and_are_read_again(rows: list[MeasuredRow]) -> None:
    stay = MeasuredRuns.newest(rows).rows
    by_setting: dict[object, list[str]] = {}
    for each in stay:
        by_setting.setdefault(each.setting, []).append(each.date)
    for setting, dates in by_setting.items():
        every = sorted({each.id: each.date for each in rows if each.setting == setting}.values())
        assert sorted(dates) == every[-MOST_PER_SETTING:]
    read, problems = read_rows(json.loads(json.dumps({"runs": written_rows(stay)})))
    assert not problems
    assert tuple(read) == stay
    assert [each.id for each in read] == [each.id for each in stay]


def test_a_file_is_bounded_and_stays_below_what_a_config_map_holds() -> None:
    longest = row(1.0, source="n" * 63 + "/" + "j" * 253, model="m" * 512, gpu="g" * 128)
    rows = [longest.model_copy(update={"gpus": count}) for count in range(1, 2 * MOST_ROWS)]
    kept = MeasuredRuns.newest(rows).rows
    assert len(kept) == MOST_ROWS
    assert len(json.dumps({"runs": written_rows(kept)})) < 1_000_000


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary()
)
DIRT = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


@settings(max_examples=cases(400, gate=15))
@given(dirt=DIRT, field=st.sampled_from(sorted(MeasuredRow.model_fields)), value=DIRT)
def test_any_content_is_read_and_what_is_wrong_is_named(dirt: Any, field: str, value: Any) -> None:
    rows, problems = read_rows(dirt)
    assert not rows
    assert problems or dirt == {"runs": []}
    sound = written_rows([row()])[0]
    rows, problems = read_rows({"runs": [sound, sound | {field: value}, value]})
    assert rows[0] == row()
    assert len(rows) + len(problems) == 3
    assert all(problem.startswith(("runs[1]", "runs[2]")) for problem in problems)


@settings(max_examples=cases(200, gate=30))
@given(
    rows=st.lists(
        st.dictionaries(
            st.sampled_from(
                ["phase_seconds/generate", "phase_seconds/forward", "completions/mean_length",
                 "rolledBack", "step"]
            ),
            SCALARS,
        ),
        max_size=5,
    )
)  # fmt: skip
def test_any_history_is_read(rows: list[dict[str, Any]]) -> None:
    found = StepSeconds.of_history(rows)
    assert all(number >= 0 for number in found)
    measured = measured_row(Run(USUAL, JOB, Learned()), found, source="x", date=DATE)
    assert measured is None or found.is_complete


def test_the_middle_of_a_history_counts_without_its_first_steps() -> None:
    logged = [
        {"phase_seconds/generate": seconds, "phase_seconds/forward": 1.0,
         "phase_seconds/reward": 50.0, "completions/mean_length": 20.0}
        for seconds in (90.0, 70.0, 2.0, 0.0, 3.0, 4.0)
    ]  # fmt: skip
    assert StepSeconds.of_history(logged) == (20.0, 3.0, 1.0)


def test_a_planner_is_made_anew_for_new_rows_of_its_model_alone() -> None:
    mine, others = row(2.0), row(2.0, parameters=10**9, active=10**9)
    planner = Planner(JOB, brief=True, measured=MeasuredRuns.newest([mine]))
    planner.plan(THERE)
    for rows in permutations([mine, others]):
        assert planner.has_planned_by(MeasuredRuns.newest(rows))
    assert not planner.has_planned_by(MeasuredRuns.newest([row(3.0), mine]))
    unknown = Planner(spec("nobody/knows"), brief=True)
    assert unknown.has_planned_by(MeasuredRuns.newest([mine]))


def test_a_plan_on_cpus_has_a_time_once_a_run_was_measured_there() -> None:
    job = spec(LLAMA_1B, placement__accelerator="CPU")
    without = plan_job(job, inventory()).chosen
    assert without is not None
    assert without.estimated_step_seconds is None
    run = Run(without, job, Learned())
    seconds = 2 * sum(run.step_time)
    measured = measured_row(
        run, StepSeconds(180, seconds / 4, seconds / 2), source="local/run", date=DATE
    )
    assert measured is not None
    chosen = plan_job(job, inventory(), measured=MeasuredRuns.newest([measured])).chosen
    assert chosen is not None
    assert chosen.estimated_step_seconds is not None
    assert abs(log(chosen.estimated_step_seconds / (0.75 * seconds))) < log(1.05)
    assert chosen.step_runs == [measured.id]
