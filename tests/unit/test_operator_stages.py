"""What an attempt does and what it waits for, as its status and its conditions tell it, and that
time alone is written nowhere."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from grpo_api.report.report import STEP_STAGES, Progress, Stage
from grpo_api.status.status import GRPOJobStatus
from grpo_api.text.quantity import MAX_COUNT
from grpo_api.text.timing import LAST_TIME
from grpo_kube.objects.resources import merge_patch
from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import Action
from grpo_operator.decide.observation import Observation, Pull, Silence
from grpo_operator.loop.progress import next_pull
from grpo_operator.loop.status_writer import FETCH_PAUSE, StatusThrottle
from grpo_operator.report.status import build_status, to_json
from tests.generated import cases
from tests.unit.operator_world import (
    GPU_PLAN,
    LIMITS,
    NOW,
    PLAN,
    active_status,
    at,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    of_type,
)

INTERVAL = 5.0
HUB = "huggingface.co: name resolution failed"


def asked(
    status: dict[str, Any],
    later: float,
    pull: Pull | None,
    silence: Silence | None = None,
    accelerator: str = "CPU",
) -> Observation:
    """What is seen of a gang that runs, so many seconds after NOW."""
    job = make_job({"placement": {"accelerator": accelerator}}, status)
    seen = make_seen(job, make_child(), make_pod(0), make_pod(1), pull=pull, silence=silence)
    return replace(seen, now=NOW + later, at=Observed(NOW + later))


def running_status(**more: Any) -> dict[str, Any]:
    status = active_status(**more)
    status["conditions"].append(condition("Scheduled"))
    return status


def writes(
    answers: Iterable[tuple[float, dict[str, Any]]], accelerator: str
) -> list[dict[str, Any]]:
    """The patches that are written for answers of rank 0, each so many seconds after NOW."""
    throttle, last = StatusThrottle(INTERVAL), None
    plan = GPU_PLAN if accelerator == "GPU" else PLAN
    stored, written = running_status(plan=plan), []
    for later, fields in answers:
        progress = Progress(attempt=1, **fields)
        last = next_pull(last, progress, Observed(NOW + later))
        seen = asked(stored, later, last, accelerator=accelerator)
        new = to_json(build_status(seen, judged(seen)))
        patch = merge_patch(seen.job.raw_status, new)
        if throttle.is_known(seen.job.key, patch) or throttle.seconds_left(seen, patch) > 0:
            continue
        written.append(patch)
        stored = new
        throttle.record_write(seen.job.key, seen.at, {})
    return written


def status_after(
    status: dict[str, Any], later: float, progress: dict[str, Any] | None, **more: Any
) -> GRPOJobStatus:
    pull = None
    if progress is not None:
        told = Progress(attempt=1, **progress)
        pull = Pull(told, Observed(NOW + later), Observed(NOW + later))
    seen = asked(status, later, pull, **more)
    return build_status(seen, judged(seen))


def test_a_stage_is_told_with_the_time_since_when_by_the_operators_clock() -> None:
    first = status_after(running_status(), 100, {"stage": "Loading", "stage_seconds": 40.0})
    assert first.progress is not None
    assert (first.progress.stage, first.progress.stage_since) == ("Loading", at(60))
    again = status_after(to_json(first), 200, {"stage": "Loading", "stage_seconds": 141.0})
    assert again.progress == first.progress, "clocks that run at different speeds move nothing"
    anew = status_after(to_json(first), 200, {"stage": "Loading", "stage_seconds": 2.0})
    assert anew.progress is not None
    assert anew.progress.stage_since == at(198)


def test_before_its_first_answer_rank_0_imports_and_nothing_is_wrong_within_the_start_timeout() -> (
    None
):
    refused = Silence(Observed(NOW), "connection refused by 10.0.0.7:8080")
    for later in (0, 130, 1799):
        status = status_after(running_status(), later, None, silence=refused)
        assert status.progress is not None
        assert status.progress.stage == "Importing"
        assert of_type(status, "Degraded")[:2] == ("False", "AsExpected")
    late = status_after(running_status(), 1800, None, silence=refused)
    assert of_type(late, "Degraded") == (
        "True",
        "ProgressUnknown",
        "rank 0 has not answered within 1800 s (spec.restarts.startTimeoutSeconds), so its "
        "progress is unknown: connection refused by 10.0.0.7:8080. Read its log (`grpo logs run`), "
        "and check that NetworkPolicies let the operator reach the pod",
    )


def test_a_rank_0_that_an_operator_before_has_heard_is_silent_after_two_minutes() -> None:
    heard = running_status(progress={"attempt": 1, "step": 3, "stage": "Training"})
    silence = Silence(Observed(NOW), "10.0.0.7:8080: no answer in time")
    early, late = (status_after(heard, later, None, silence=silence) for later in (119, 120))
    assert of_type(early, "Degraded")[0] == "False"
    assert of_type(late, "Degraded")[1] == "ProgressUnknown"
    assert late.progress is not None
    assert late.progress.stage == "Training"


def waits(target: str, seconds: float, why: str = HUB, stage: str = "Loading") -> dict[str, Any]:
    wait = {"target": target, "seconds": seconds, "why": why}
    return {"stage": stage, "stage_seconds": seconds, "waiting": wait, "step": 1}


@pytest.mark.parametrize("target", ["Hub", "Rewards", "Store", "Engines"])
def test_a_wait_is_told_after_half_a_minute_with_what_to_do_and_ends_with_it(target: str) -> None:
    early = status_after(running_status(), 100, waits(target, 29.0))
    assert of_type(early, "Degraded")[0] == "False"
    told = status_after(to_json(early), 140, waits(target, 31.0))
    held, reason, message = of_type(told, "Degraded")
    assert (held, reason) == ("True", f"WaitingFor{target}")
    assert f": {HUB}, since {at(109)}. " in message
    assert message.rpartition(". ")[2].startswith(("Check", "Read"))
    later = status_after(to_json(told), 400, waits(target, 292.0))
    assert later.conditions == told.conditions, "a wait that goes on is no news"
    over = status_after(to_json(later), 401, {"stage": "Loading", "step": 1})
    assert of_type(over, "Degraded")[:2] == ("False", "AsExpected")


def test_a_wait_for_what_only_a_newer_trainer_knows_is_none() -> None:
    assert of_type(status_after(running_status(), 9, waits("Moon", 99.0)), "Degraded")[0] == "False"


def test_a_gang_that_waits_for_the_hub_before_it_trains_gives_its_gpus_back_and_comes_again() -> (
    None
):
    patient = waits("Hub", LIMITS.hub_silence_seconds - 1, stage="WaitingForHub")
    assert of_type(status_after(running_status(), 9, patient), "Admitted")[0] == "True"
    released = status_after(
        running_status(), 9, waits("Hub", LIMITS.hub_silence_seconds, stage="WaitingForHub")
    )
    assert of_type(released, "Admitted") == (
        "False",
        "WaitingForHub",
        f"no answer of the hub for 180 s: {HUB}; the gang is queued again. Check that the pods may "
        "reach it (DNS, proxy, NetworkPolicy), or use model.cache with files that are there",
    )
    assert (released.phase, released.restarts, released.uncounted_restarts) == ("Queued", 0, 0)
    assert released.attempt_start_time is None, "it holds no GPUs"
    assert released.progress is None or released.progress.stage is None
    again = judged(make_seen(make_job(status=to_json(released)), now=NOW + 9, ago=0))
    assert again.action is Action.WAIT
    assert again.requeue_after == pytest.approx(LIMITS.release_pause_seconds)
    after_pause = make_seen(
        make_job(status=to_json(released)), now=NOW + 9 + LIMITS.release_pause_seconds
    )
    assert judged(after_pause).action is Action.ADMIT


def test_a_gang_that_trains_keeps_its_gpus_whoever_it_waits_for() -> None:
    for target in ("Hub", "Rewards"):
        status = status_after(running_status(), 9, waits(target, 9000.0, stage="Training"))
        assert of_type(status, "Admitted")[0] == "True"


@pytest.mark.parametrize("seconds_per_phase", [0.5, 7.0, 100.0])
@pytest.mark.parametrize("accelerator", ["CPU", "GPU"])
def test_a_gang_that_trains_costs_no_more_writes_than_without_its_stages(
    accelerator: str, seconds_per_phase: float
) -> None:
    """What was written before stages existed, for the same answers: one write per step at most."""

    def answers(stages: bool) -> Iterable[tuple[float, dict[str, Any]]]:
        for pulled in range(80):
            later = pulled * INTERVAL
            step, phase = divmod(int(later / seconds_per_phase), 3)
            stage = STEP_STAGES[phase] if stages else "Training"
            since = later % seconds_per_phase if stages else later
            fields = {"step": step, "total_steps": 10**6, "stage_seconds": since}
            yield later, {"stage": stage, **fields}

    with_stages, without = (len(writes(answers(one), accelerator)) for one in (True, False))
    assert with_stages == without


@pytest.mark.parametrize("accelerator", ["CPU", "GPU"])
def test_a_download_is_written_once_a_minute(accelerator: str) -> None:
    answers = (
        (later, {"stage": "Downloading", "stage_seconds": float(later), "fetched_bytes": later})
        for later in range(0, 900, 5)
    )
    written = writes(answers, accelerator)
    assert len(written) <= 900 / FETCH_PAUSE + 1
    assert written[-1]["progress"] == {"fetchedBytes": 840}


@given(
    fetched=st.integers(0, MAX_COUNT),
    expected=st.integers(0, MAX_COUNT),
    speed=st.integers(0, MAX_COUNT),
)
@settings(max_examples=cases(200))
@example(fetched=2000, expected=14_000, speed=500)
def test_a_download_of_known_size_says_when_it_ends(
    fetched: int, expected: int, speed: int
) -> None:
    sizes = {"fetched_bytes": fetched, "expected_bytes": expected}
    told = {"stage": "Downloading", "stage_seconds": 4.0, "fetched_bytes_per_second": speed}
    status = status_after(running_status(), 100, sizes | told)
    progress = status.progress
    assert progress is not None
    assert progress.expected_bytes == (expected or None)
    seconds_left = max(0, expected - fetched) / speed if expected and speed else None
    if seconds_left is None or seconds_left > 10 * 365 * 86400:
        assert progress.stage_end is None
    else:
        assert progress.stage_end == at(100 + seconds_left)
    loading = {"stage": "Loading", "stage_seconds": 1.0}
    later = status_after(to_json(status), 200, sizes | loading).progress
    assert later is not None
    assert (later.expected_bytes, later.stage_end) == (None, None)


STAGES = st.sampled_from([*get_args(Stage), "Starting", "Finished", "Moon"])


@settings(max_examples=cases(200))
@given(STAGES, STAGES, st.floats(0, LAST_TIME), st.integers(0, 3))
def test_whatever_stage_is_told_it_is_in_the_status_and_a_second_look_writes_nothing(
    before: str, stage: str, seconds: float, step: int
) -> None:
    # A wait of that length gives the GPUs back, and then no stage is left.
    assume(stage != "WaitingForHub" or seconds < LIMITS.hub_silence_seconds)
    first = status_after(running_status(), 1, {"stage": before})
    wait = {"target": "Store", "seconds": seconds, "why": "away"}
    told = {"stage": stage, "stage_seconds": seconds, "step": step, "waiting": wait}
    status = status_after(to_json(first), 9, told)
    assert status.progress is not None
    is_same_step = step == 0 and before in STEP_STAGES and stage in STEP_STAGES
    assert status.progress.stage == (before if is_same_step else stage)
    again = status_after(to_json(status), 9, told)
    assert again.progress == status.progress


def test_a_field_that_an_older_definition_drops_is_not_written_again_and_again() -> None:
    throttle = StatusThrottle(INTERVAL)
    seen = asked(running_status(), 0, None)
    dropped = {"progress": {"stage": "Loading", "stageSince": at(0)}}
    throttle.record_write(seen.job.key, seen.at, dropped)
    key = seen.job.key
    assert throttle.is_known(key, {"progress": {"stage": "Proving", "stageSince": at(9)}})
    assert not throttle.is_known(key, {"progress": {"stage": "Proving", "step": 1}})
    assert not throttle.is_known(key, {"phase": "Running"})
