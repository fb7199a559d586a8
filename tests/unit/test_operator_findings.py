"""What an attempt has found, as the next plan counts on it: the model's shape, which nobody need
declare, and links."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import Learned, MeasuredLinks
from grpo_api.report.training_metrics import ALLREDUCE
from grpo_api.spec.model import Architecture
from grpo_api.status.status import GRPOJobStatus
from grpo_operator.admission.resume_plan import learning
from grpo_operator.decide.observation import Observation
from grpo_operator.report.status import build_status, to_json
from grpo_planner.plan import plan_job
from tests.generated import cases
from tests.unit.operator_world import (
    active_status,
    judged,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    terminated,
)
from tests.unit.planning import H100, inventory, nodes
from tests.unit.test_operator_replanning import BACKWARD, SPEC, THERE, answered, learned
from tests.unit.test_planner_model import ARCHITECTURE

GUESSED: dict[str, Any] = {**SPEC, "model": {"name": "me/my-own", "parameters": "1.2B"}}
LOADED = Architecture.model_validate(ARCHITECTURE | {"modelType": "qwen3", "layers": 28})


def told(found: Architecture | None, step: int = 0, **status: Any) -> Observation:
    """Rank 0 of a job whose size was declared says what it has loaded."""
    spec = make_job(GUESSED).spec
    assert spec is not None
    plan = plan_job(spec, THERE).chosen
    assert plan is not None
    job = make_job(GUESSED, active_status(1, plan, **status))
    return replace(
        make_seen(job, make_child(), make_pod(0)), pull=make_pull(architecture=found, step=step)
    )


def test_an_attempt_that_starts_over_is_planned_by_what_the_one_before_loaded() -> None:
    seen = told(LOADED)
    status = build_status(seen, judged(seen))
    assert status.learned == Learned(architecture=LOADED)
    assert build_status(told(None), judged(told(None))).learned is None
    assert seen.job.status.plan is not None
    assert seen.job.status.plan.shape_source == "Size"
    there = answered(make_job(GUESSED, to_json(status)), THERE)
    assert there.chosen is not None
    assert (there.chosen.shape_source, there.chosen.architecture) == ("FormerAttempt", "Exact")
    assert (
        "spec.model.parameters says 1.2B, but the model was found to have 1.97B (1,965,676,032)"
        in there.chosen.warnings[0]
    )
    assert there.chosen.memory != seen.job.status.plan.memory


def test_a_run_that_has_made_a_step_stays_as_it_is_whatever_it_loaded() -> None:
    seen = told(LOADED, step=12)
    status = build_status(seen, judged(seen))
    assert status.learned is not None
    kept = answered(make_job(GUESSED, to_json(status)), THERE)
    assert kept.chosen == seen.job.status.plan


def test_what_ran_out_is_held_against_the_shape_that_was_loaded() -> None:
    seen = told(LOADED)
    shortage = {"result": "OutOfMemory", "shortage": {**BACKWARD, "allocatedBytes": 70 * 2**30}}
    ended = replace(seen, pods=(make_pod(0, 1, terminated(40, json.dumps(shortage))),))
    known, guessed = judged(ended).learned, judged(replace(ended, pull=None)).learned
    assert known is not None
    assert guessed is not None
    assert known.architecture == LOADED
    assert known.factor("backward") < guessed.factor("backward")
    # what was learned by a guess, and the shape afterwards: the same floor
    later = judged(replace(ended, job=learning(seen.job, guessed))).learned
    assert later is not None
    assert later.factor("backward") == pytest.approx(known.factor("backward"), rel=0.01)


def test_what_an_all_reduce_measured_is_kept_for_gangs_of_several_gpus() -> None:
    job = make_job(
        {**GUESSED, "placement": {"accelerator": "GPU", "nodes": 2, "gpus": {"min": 16}}}
    )
    plan = plan_job(job.valid_spec, inventory(nodes(2, 8, H100))).chosen
    assert plan is not None
    alone = told(None)
    assert alone.job.status.plan is not None
    assert alone.job.status.plan.gpus == 1
    pull = make_pull(metrics={ALLREDUCE.key: 1.25e9})
    assert build_status(replace(alone, pull=pull), judged(alone)).learned is None
    seen = replace(make_seen(make_job(GUESSED, active_status(1, plan)), make_child()), pull=pull)
    status = build_status(seen, judged(seen))
    assert status.learned is not None
    assert status.learned.links == MeasuredLinks(
        gpu_product=H100, nodes=2, bytes_per_second=1_250_000_000
    )


@settings(max_examples=cases(30))
@given(st.builds(Architecture), st.none() | st.floats())
def test_whatever_an_attempt_says_that_it_found_holds_nothing_up(
    found: Architecture, measured: float | None
) -> None:
    seen = told(found, learned=learned(1))
    assert seen.job.status.plan is not None
    several = seen.job.status.plan.model_copy(
        update={"gpus": 2, "gpus_per_node": 2, "processes_per_node": 2}
    )
    job = make_job(GUESSED, active_status(1, several, learned=learned(1)))
    metrics = {} if measured is None else {ALLREDUCE.key: measured}
    seen = replace(seen, job=job, pull=make_pull(architecture=found, metrics=metrics))
    status = GRPOJobStatus.model_validate(to_json(build_status(seen, judged(seen))))
    assert status.learned is not None
    assert status.learned.architecture == found
    assert all(known.needed_bytes for known in status.learned.memory.values())
