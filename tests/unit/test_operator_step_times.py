"""What status.metrics says of a step's parts and of the engine's weights, from whatever rank 0 said
of them."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_api.status.status import GRPOJobStatus, MetricsStatus
from grpo_operator.report.status import to_json
from tests.unit.operator_world import (
    GPU_PLAN,
    active_status,
    after,
    judged,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
)


def metrics_of(**told: float) -> MetricsStatus | None:
    """What the status tells of these metrics."""
    pull = make_pull(step=1, metrics={key.replace("__", "/"): value for key, value in told.items()})
    seen = make_seen(
        make_job(status=active_status()), make_child(), make_pod(0), make_pod(1), pull=pull
    )
    return after(seen, judged(seen)).metrics


def test_a_step_by_its_parts_and_what_engines_sample_with_are_told() -> None:
    told = metrics_of(engine_mismatch=1.23456e-7, weights_version=123456.0,
    phase_seconds__sync=0.512345,
                      phase_seconds__generate=29.0, phase_seconds__lunch=1.0)  # fmt: skip
    phases = {"sync": "0.5123", "generate": "29"}
    assert told == MetricsStatus(
        engine_mismatch="1.235e-07", weights_version=123456, phase_seconds=phases
    )
    assert metrics_of(kl=1.0) == MetricsStatus(kl="1"), "without an engine nothing is told of one"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_a_version_that_is_no_number_of_anything_is_not_told(value: float) -> None:
    assert metrics_of(weights_version=value) is None


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "+Inf"), (-1e300, "-1e+300")]
)
def test_a_time_or_a_mismatch_that_is_no_finite_number_is_told_as_such(
    value: float, text: str
) -> None:
    told = metrics_of(engine_mismatch=value, phase_seconds__sync=value)
    assert told == MetricsStatus(engine_mismatch=text, phase_seconds={"sync": text})


@given(
    length=st.floats(allow_nan=True, allow_infinity=True),
    spent=st.floats(allow_nan=True, allow_infinity=True),
)
@example(length=2e6, spent=1.0)
def test_whatever_a_step_of_a_gpu_job_measured_its_status_is_written(
    length: float, spent: float
) -> None:
    phases = {f"phase_seconds/{phase}": spent for phase in ("generate", "forward")}
    pull = make_pull(step=3, metrics={"completion_length": length, **phases})
    job = make_job({"placement": {"accelerator": "GPU"}}, active_status(plan=GPU_PLAN))
    seen = make_seen(job, make_child(), make_pod(0), make_pod(1), pull=pull)
    status = to_json(after(seen, judged(seen)))
    assert GRPOJobStatus.model_validate(status).progress is not None
