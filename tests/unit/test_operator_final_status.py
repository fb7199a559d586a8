"""A status that is final: the last step's numbers from the outcome, and no pod that still seems to
run."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.training_metrics import OUTCOME_KEYS
from grpo_api.status.status import GRPOJobStatus, MetricsStatus
from grpo_api.text.quantity import MAX_COUNT
from grpo_operator.decide.observation import Observation
from grpo_operator.report.status import to_json
from tests.generated import cases
from tests.unit.operator_world import (
    after,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    running,
    said,
    terminated,
)


def ended(first: dict[str, Any], second: dict[str, Any] | None = None, **more: Any) -> Observation:
    """A job of two pods whose last pull was at step 98 of 100."""
    pull = make_pull(step=98, total_steps=100, metrics={"kl": 0.5, "reward": 1.0})
    return make_seen(
        running().job,
        make_child(),
        make_pod(0, state=first, **more),
        make_pod(1, state=second, **more),
        pull=pull,
    )


def decided(seen: Observation) -> GRPOJobStatus:
    return after(seen, judged(seen))


def numbers(status: GRPOJobStatus) -> tuple[str, str | None, str | None]:
    assert status.progress is not None
    assert status.metrics is not None
    return status.progress.summary, status.metrics.kl, status.metrics.reward


def test_success_shows_the_last_step_and_not_the_last_pull() -> None:
    told = said("Succeeded", step=100, total_steps=100, metrics={"kl": 0.25, "reward": 1.9})
    assert numbers(decided(ended(terminated(0, told), terminated(0, told)))) == (
        "100/100",
        "0.25",
        "1.9",
    )


def test_the_end_leaves_the_time_of_a_step_and_nothing_else_of_what_was_pulled() -> None:
    told = said(
        "Succeeded", step=100, total_steps=100, metrics={"kl": 0.25, "engine_mismatch": 2e-7}
    )
    seen = ended(terminated(0, told), terminated(0, told))
    metrics = {
        "phase_seconds/sync": 0.5,
        "phase_seconds/generate": 29.0,
        "engine_mismatch": 1.0,
        "loss": 1.0,
    }
    status = decided(replace(seen, pull=make_pull(step=98, total_steps=100, metrics=metrics)))
    assert status.metrics == MetricsStatus(
        kl="0.25", engine_mismatch="2e-07", phase_seconds={"sync": "0.5", "generate": "29"}
    )


def test_failure_shows_the_last_finished_step() -> None:
    told = said("BadInput", step=99, total_steps=100, metrics={"kl": 7.0}, rank=1)
    status = decided(ended(terminated(43, said("Error", step=98)), terminated(43, told)))
    assert status.phase == "Failed"
    assert numbers(status) == ("99/100", "7", None)
    assert status.progress is not None
    assert (status.progress.percent, status.progress.eta_seconds) == (99, None)


@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf")]
)
def test_what_is_no_number_is_shown_as_what_it_is(value: float, word: str) -> None:
    """While it runs and in the end; status.outcome, whose numbers are JSON's, has the others."""
    runs = make_seen(
        running().job, make_child(), make_pod(0), make_pod(1), pull=make_pull(metrics={"kl": value})
    )
    assert to_json(decided(runs))["metrics"]["kl"] == word
    told = said("Diverged", step=100, metrics={"kl": value, "reward": 1.9})
    status = to_json(decided(ended(terminated(47, told), terminated(47, told))))
    assert status["metrics"] == {"kl": word, "reward": "1.9"}
    assert status["outcome"]["metrics"] == {"reward": 1.9}


def test_an_outcome_without_numbers_leaves_the_last_pulls() -> None:
    assert numbers(decided(ended(terminated(0, said("Succeeded", step=100))))) == (
        "100/100",
        "0.5",
        "1",
    )


def test_a_pod_whose_container_has_ended_runs_no_more() -> None:
    """The kubelet sets the phase a moment later, and nothing may come after it."""
    seen = ended(
        terminated(0, said("Succeeded", step=100)), terminated(1, said("Error")), phase="Running"
    )
    assert [pod.phase for pod in decided(seen).pods] == ["Succeeded", "Failed"]


def finished(*pods: dict[str, Any], seen: tuple[Any, ...] = ()) -> GRPOJobStatus:
    """What becomes of a finished job's status, given its pods there and those that are seen."""
    known = [
        {"name": f"run-1-{index}-abcde", "index": index, **pod} for index, pod in enumerate(pods)
    ]
    job = make_job(
        status={
            "attempt": 1,
            "jobUid": "job-1",
            "conditions": [condition("Succeeded")],
            "pods": known,
        }
    )
    return decided(make_seen(job, make_child(), *seen))


def test_pods_are_told_until_each_has_ended() -> None:
    known = ({"phase": "Succeeded"}, {"phase": "Running"})
    still = finished(*known, seen=(make_pod(0, state=terminated(0)), make_pod(1)))
    assert [pod.phase for pod in still.pods] == ["Succeeded", "Running"]
    over = finished(
        *known, seen=(make_pod(0, state=terminated(0)), make_pod(1, state=terminated(143)))
    )
    assert [pod.phase for pod in over.pods] == ["Succeeded", "Failed"]


def test_a_pod_that_is_gone_is_told_so_once() -> None:
    status = finished({"phase": "Succeeded"}, {"phase": "Running"})
    assert [pod.phase for pod in status.pods] == ["Succeeded", "Deleted"]
    again = make_job(status=to_json(status))
    assert to_json(decided(make_seen(again))) == to_json(status)


@settings(max_examples=cases(200))
@given(
    step=st.integers(0, MAX_COUNT),
    total=st.integers(0, MAX_COUNT),
    metrics=st.dictionaries(st.sampled_from(OUTCOME_KEYS), st.floats()),
    result=st.sampled_from(["Succeeded", "BadInput", "Diverged", "DivergedKL", "WeightsDiffer"]),
)
def test_any_last_words_make_a_status(
    step: int, total: int, metrics: dict[str, float], result: str
) -> None:
    told = said(result, step=step, total_steps=total, metrics=metrics)
    status = decided(ended(terminated(0 if result == "Succeeded" else 43, told)))
    GRPOJobStatus.model_validate_json(json.dumps(to_json(status), allow_nan=False))
    assert status.progress is not None
    assert 0 <= status.progress.percent <= 100
    assert status.progress.step >= max(98, step)


@pytest.mark.parametrize(
    "key", [key for key in MetricsStatus.model_fields if key != "phase_seconds"]
)
def test_every_metric_of_the_status_can_be_told_with_the_end(key: str) -> None:
    assert key in OUTCOME_KEYS
