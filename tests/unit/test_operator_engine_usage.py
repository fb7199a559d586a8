"""GPUs of engines in pods of their own: held, divided as their gang's, at a price of their own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.status.usage import AttemptUsage, EngineUsage, GPUSeconds, PodTime, Usage
from grpo_api.text.timing import Clock
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.usage.account import looked_at
from grpo_operator.usage.gpu_time import (
    SUCCEEDED,
    apportion,
    divide_by_state,
    merge_oldest,
    sum_states,
)
from tests.generated import cases
from tests.unit.operator_world import (
    GPU_PLAN,
    SERVED_GPU_PLAN,
    active_status,
    after,
    at,
    condition,
    judged,
    make_child,
    make_engine,
    make_engines,
    make_job,
    make_pod,
    make_seen,
    stored,
    terminated,
)
from tests.unit.test_operator_job_metrics import samples

GPU_JOB = {"placement": {"accelerator": "GPU", "nodes": 2}}


def record(engines: EngineUsage | None, **clock: float) -> AttemptUsage:
    pods = [PodTime(name=f"p{index}", bound_time=at(0), seconds=100.0) for index in (0, 1)]
    spent = Clock(**clock)
    return AttemptUsage(
        attempt=1, gpus=8, nodes=2, gpu_hour_price=2.0, start_time=at(0), ended=SUCCEEDED,
        pods=pods, engines=engines,
        clock=spent, sealed=spent,
    )  # fmt: skip


def engines(*held: float, price: float | None = 0.5) -> EngineUsage:
    pods = [
        PodTime(name=f"e{index}", bound_time=at(0), seconds=spent)
        for index, spent in enumerate(held)
    ]
    return EngineUsage(gpus=4, replicas=2, gpu_hour_price=price, pods=pods)


def test_engines_share_the_states_of_their_gang_and_have_a_price_of_their_own() -> None:
    one = record(engines(90.0, 90.0), generating=50.0, training=50.0)
    usage = sum_states(Usage(as_of=at(100), attempts=[one]))
    assert usage.held_gpu_seconds == 8 * 100 + 4 * 90
    assert usage.gpu_seconds.generating == pytest.approx(8 * 50 + 4 * 45)
    assert usage.cost == pytest.approx((800 * 2.0 + 360 * 0.5) / 3600, abs=1e-4)
    without = sum_states(
        Usage(as_of=at(100), attempts=[record(None, generating=50.0, training=50.0)])
    )
    assert (without.held_gpu_seconds, without.effective) == (800, usage.effective)


def test_sums_of_attempts_without_a_record_have_their_engines_too() -> None:
    usage = Usage(as_of=at(100), attempts=[record(engines(90.0, 30.0), training=100.0)])
    assert merge_oldest(usage, 1).earlier.gpu_seconds == sum_states(usage).gpu_seconds
    assert merge_oldest(usage, 1).earlier.cost == sum_states(usage).cost


@settings(max_examples=cases(100))
@given(st.lists(st.floats(0.0, 1e5), max_size=4), st.builds(GPUSeconds,
**dict.fromkeys(GPUSeconds.model_fields,
       st.floats(0.0, 1e6))))  # fmt: skip
def test_all_that_engines_held_is_shared_out_and_no_more(
    held: list[float], gang: GPUSeconds
) -> None:
    found = apportion(engines(*held), gang, at(100))
    assert found.total == pytest.approx(2 * sum(held), rel=1e-9, abs=0.01)


def test_an_attempts_engines_are_recorded_from_its_commit_to_the_end_of_their_pods() -> None:
    job = make_job(GPU_JOB)
    start = make_seen(job)
    committed = stored(job, after(start, Decision(Action.COMMIT, plan=SERVED_GPU_PLAN)))
    assert committed.status.usage
    (fresh,) = committed.status.usage.attempts
    assert fresh.engines
    assert (fresh.engines.gpus, fresh.engines.replicas, fresh.engines.gpu_hour_price) == (4, 2, 0.5)
    things = (
        make_child(),
        make_pod(0),
        make_pod(1),
        make_engines(),
        make_engine(0),
        make_engine(1),
    )
    runs = make_seen(
        make_job(GPU_JOB, active_status(plan=SERVED_GPU_PLAN, usage=_json(committed.status.usage))),
        *things,
    )
    status = after(runs, judged(runs))
    assert status.usage
    held = status.usage.attempts[0].engines
    assert held
    assert [pod.name for pod in held.pods] == ["run-1-engine-0-abcde", "run-1-engine-1-abcde"]
    assert [pod.name for pod in status.usage.attempts[0].pods] == ["run-1-0-abcde", "run-1-1-abcde"]
    killed = make_engine(1, state=terminated(137, reason="OOMKilled"))
    lost = make_seen(stored(runs.job, status), *things[:-1], killed, make_engine(1, life="again"))
    told = after(lost, judged(lost)).usage
    assert told
    again = told.attempts[0].engines
    assert again
    assert [(pod.name, pod.seconds is None) for pod in again.pods] == [
        ("run-1-engine-0-abcde", True),
        ("run-1-engine-1-abcde", False),
        ("run-1-engine-1-again", True),
    ]


def test_engines_that_have_ended_do_not_begin_a_wait_anew() -> None:
    since, spent = (
        at(-50),
        [PodTime(name="run-1-engine-0-abcde", bound_time=at(-500), seconds=100.0)],
    )
    over = record(EngineUsage(gpus=2, replicas=1, pods=spent)).model_copy(
        update={"start_time": at(-600)}
    )
    usage = _json(Usage(as_of=at(-50), attempts=[over], waiting_since=since))
    waits = [condition("Admitted", "False", "WaitingForGPUs")]
    job = make_job(GPU_JOB, {"attempt": 1, "conditions": waits, "usage": usage})
    told = after(
        make_seen(job, make_engines(), make_engine(0, state=terminated(137))),
        Decision(Action.QUEUE, "WaitingForGPUs"),
    ).usage
    assert told
    assert (told.waiting_since, told.queued_seconds) == (since, 0.0)


def test_a_pod_that_went_unseen_is_timed_by_the_end_of_its_gangs_job() -> None:
    """Not by that of the engines, which never ends."""
    mine = AttemptUsage(
        attempt=1,
        gpus=8,
        nodes=1,
        start_time=at(-500),
        pods=[PodTime(name="run-1-0-abcde", bound_time=at(-400))],
    )
    job = make_job(GPU_JOB, active_status(attempt=2, plan=SERVED_GPU_PLAN, jobUid=None))
    seen = make_seen(job, make_engines(), make_child(ended="Failed", ended_at=-100))
    (told,) = looked_at(seen, [mine], at(-300))
    assert [pod.seconds for pod in told.pods] == [300.0]


@pytest.mark.parametrize(
    ("product", "told"),
    [("NVIDIA-L4", {GPU_PLAN.gpu_product: 8, "NVIDIA-L4": 4}), (None, {GPU_PLAN.gpu_product: 12})],
)
def test_engines_gpus_are_told_by_their_product(
    product: str | None, told: dict[str, float]
) -> None:
    plan = SERVED_GPU_PLAN
    if product is None:
        assert plan.engine
        plan = plan.model_copy(
            update={"engine": plan.engine.model_copy(update={"gpu_product": plan.gpu_product})}
        )
    found = samples([make_job(GPU_JOB, active_status(plan=plan))])
    assert {
        one.labels["product"]: one.value for one in found if one.name == "grpo_job_gpus"
    } == told


def test_a_gang_without_engines_is_divided_as_ever() -> None:
    one = record(None, training=60.0)
    assert divide_by_state(one, one.sealed, at(100)) == divide_by_state(
        record(engines(5.0), training=60.0), one.sealed, at(100)
    )


def _json(usage: Usage) -> object:
    return usage.model_dump(mode="json", by_alias=True, exclude_none=True)
