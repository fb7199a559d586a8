"""What pods report is bounded where it enters, and never keeps a decision from being made."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_api.report.report import Progress
from grpo_api.status.status import GRPOJobStatus
from grpo_api.text.quantity import MAX_COUNT
from grpo_api.text.timing import LAST_TIME
from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import Action
from grpo_operator.decide.observation import Observation, Pull
from grpo_operator.report.events import event, telling_change
from grpo_operator.report.status import to_json
from tests.generated import cases
from tests.unit.dirty_objects import VALUES
from tests.unit.operator_world import (
    NOW,
    active_status,
    after,
    judged,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    of_type,
    running,
    stored,
    terminated,
)

NUMBERS = (
    st.sampled_from([-1, -5.0, 0, 2**53, 2**63, 10**23, 1e308, 1e-320, 10**400, True, "7", None])
    | st.floats()
)
INT64 = 2**63


def whole(value: Any) -> bool:
    """Whether every number of a JSON value fits 64 bits: what the API server takes."""
    if isinstance(value, dict):
        return all(map(whole, value.values()))
    if isinstance(value, list):
        return all(map(whole, value))
    return not isinstance(value, int) or -INT64 <= value < INT64


def published(seen: Observation) -> GRPOJobStatus:
    """The status that is written, checked against what the API server takes."""
    status = after(seen, judged(seen))
    assert whole(to_json(status))
    return GRPOJobStatus.model_validate(to_json(status))


ARTIFACTS = st.dictionaries(
    st.sampled_from(["to", "path", "format", "bytes", "weightsHash", "step", "time", "where"]),
    NUMBERS
    | VALUES
    | st.sampled_from(
        ["Volume", "Model", "/checkpoints/..", "/checkpoints/a", f"sha256:{'0' * 64}"]
    ),
)
"""What a pod may say of its model and its checkpoints."""
DETAILS = ("rank", "step", "totalSteps", "metrics", "export", "checkpoint")
FARTHEST = "/checkpoints/" + "x" * 1011
METRICS = st.dictionaries(
    st.sampled_from(
        [
            "kl",
            "engine_mismatch",
            "weights_version",
            "phase_seconds/sync",
            "phase_seconds/",
            "phase_seconds/x" * 8,
        ]
    ),
    NUMBERS,
)
"""What a pod may say of its numbers."""
FIELDS = tuple(field.alias or name for name, field in Progress.model_fields.items())


@settings(max_examples=cases(150))
@given(st.dictionaries(st.sampled_from(FIELDS), NUMBERS | VALUES | ARTIFACTS | METRICS, max_size=6))
@example(
    {
        "metrics": {
            "weights_version": 1e308,
            "engine_mismatch": "NaN",
            "phase_seconds/sync": "Infinity",
        }
    }
)
@example(
    {
        "checkpoint": {
            "step": MAX_COUNT,
            "time": LAST_TIME,
            "bytes": MAX_COUNT,
            "where": "/checkpoints/" + "x" * 1011,
        }
    }
)
@example({"secondsPerStep": LAST_TIME, "totalSteps": MAX_COUNT})
def test_any_progress_is_a_failed_pull_or_makes_a_status(fields: dict[str, Any]) -> None:
    try:
        progress = Progress.model_validate(
            {"attempt": 1, "totalSteps": 9, **fields}, extra="ignore"
        )
    except ValidationError:
        return
    job = running(activeSeconds=0).job
    published(
        make_seen(
            job, make_pod(0), make_pod(1), pull=Pull(progress, Observed(NOW - 1), Observed(NOW - 1))
        )
    )


def message(**fields: Any) -> str:
    return json.dumps({"result": "Succeeded", "message": "done", **fields})


@settings(max_examples=cases(150))
@given(st.dictionaries(st.sampled_from(DETAILS), NUMBERS | VALUES | ARTIFACTS, max_size=4))
def test_numbers_that_nobody_believes_do_not_change_how_it_ended(fields: dict[str, Any]) -> None:
    ended = terminated(0, message(**fields))
    seen = running(make_pod(0, state=ended), make_pod(1, state=ended))
    assert judged(seen).action is Action.SUCCEED
    assert published(seen).phase == "Succeeded"


@pytest.mark.parametrize("attempt", [2, 99, -1, 10**23, "two", None])
def test_an_outcome_counts_for_its_own_attempt_only(attempt: Any) -> None:
    ended = terminated(0, message(step=999, attempt=attempt))
    seen = running(make_pod(0, state=ended), make_pod(1))
    assert (judged(seen).action is Action.SUCCEED) is (attempt is None), (
        "null is unset, and unset is its own"
    )


def test_a_pod_that_somebody_made_by_hand_says_nothing() -> None:
    stranger = make_pod(0, state=terminated(0, message(step=999)), by="")
    assert judged(running(stranger, make_pod(1))).action is Action.WAIT


def test_a_step_of_ten_to_the_23_is_no_step() -> None:
    ended = terminated(
        40, json.dumps({"result": "OutOfMemory", "step": 10**23, "message": "CUDA out of memory"})
    )
    seen = running(make_pod(0, state=ended), make_pod(1))
    decision = judged(seen)
    assert (decision.reason, decision.counted) == ("OutOfMemory", True)
    assert decision.ended is not None
    assert decision.ended.step == 0


@pytest.mark.parametrize(
    ("kept", "dropped", "told"),
    [
        (7473, 0, ""),
        (990, 10, ""),
        (
            900,
            100,
            "100 of 1000 prompts (10.0%) have more than training.maxPromptLength 512 tokens",
        ),
        (0, 0, ""),
        (0, 5, "5 of 5 prompts (100.0%)"),
        (1e308, 1e308, ""),
        (-5, 5, ""),
        (-5, 8, ""),
        (10, -5, ""),
    ],
)
def test_dropped_prompts_are_a_condition_where_they_are_many(
    kept: float, dropped: float, told: str
) -> None:
    pull = make_pull(step=3, metrics={"prompts": kept, "prompts_dropped": dropped})
    seen = make_seen(
        make_job(status=active_status()), make_child(), make_pod(0), make_pod(1), pull=pull
    )
    status = after(seen, judged(seen))
    found = [condition for condition in status.conditions if condition.type == "PromptsDropped"]
    assert [one.message.startswith(told) for one in found] == ([True] if told else [])
    if told:
        assert of_type(status, "PromptsDropped")[:2] == ("True", "PromptsTooLong")
        change = telling_change(
            [one for one in status.conditions if one not in found], status.conditions
        )
        assert change == found[0]
        assert event(seen.job, found[0], 0.0)["type"] == "Warning"
        silent = make_seen(stored(seen.job, status), make_child(), make_pod(0), make_pod(1))
        later = after(silent, judged(silent))
        assert of_type(later, "PromptsDropped") == of_type(status, "PromptsDropped"), (
            "also when rank 0 is silent"
        )
