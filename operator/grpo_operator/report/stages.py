"""Says in status.progress what the current attempt does, and since when.

Until rank 0 answers, the pods show it. Rank 0 reports for how long it has been in a stage. The
operator turns that into a time by its own clock, and keeps the time while the stage lasts.
"""

from typing import Any

from grpo_api.report.report import STEP_STAGES, Progress
from grpo_api.status.status import ProgressStatus
from grpo_kube.objects.times import seconds, timestamp

from ..decide.decisions import Action, Decision
from ..decide.observation import Observation

MAX_ETA = 10 * 365 * 86400
"""Seconds of the longest time to an end that is shown."""
JITTER_SECONDS = 30.0
"""Seconds by which two answers may differ on when a stage began: clocks and delays differ."""
NO_STAGE: dict[str, None] = dict.fromkeys(
    (
        "stage",
        "stage_since",
        "fetched_bytes",
        "fetched_bytes_per_second",
        "expected_bytes",
        "stage_end",
    )
)
_NO_ATTEMPT: dict[str, str | None] = {**NO_STAGE, "eta_seconds": None, "eta": ""}
_ENDS = (Action.RELEASE, Action.SUSPEND, Action.QUEUE, Action.SUCCEED, Action.FAIL, Action.RETRY)


def without_attempt(progress: ProgressStatus | None) -> dict[str, Any]:
    """status.progress of a job without a running attempt, so that users do not wait for its end."""
    if progress is None:
        return {}
    return {"progress": progress.model_copy(update=_NO_ATTEMPT)}


def stage_fields(
    observation: Observation, decision: Decision, reported: ProgressStatus | None
) -> dict[str, Any]:
    """status.progress with the attempt's stage; `reported`: as far as rank 0 has reported."""
    before = observation.job.status.progress
    if decision.action in _ENDS or observation.first_seen.over:
        return without_attempt(reported or before)
    stage, seconds_so_far = _stage(observation)
    if stage is None:
        return without_attempt(before) if reported is None else {}
    progress = reported or before or ProgressStatus()
    update: dict[str, Any] = dict(NO_STAGE)
    if before and _is_same_step(before, progress, stage):
        update |= {"stage": before.stage, "stage_since": before.stage_since}
        return {"progress": progress.model_copy(update=update)}
    update["stage"] = stage
    update["stage_since"] = _stage_begin(before, stage, observation.now, seconds_so_far)
    if stage == "Downloading" and observation.pull:
        update |= _download(observation.pull.progress, observation.now)
    return {"progress": progress.model_copy(update=update)}


def _download(progress: Progress, now: float) -> dict[str, Any]:
    """How far a download is, and when it ends at its speed."""
    speed = progress.fetched_bytes_per_second
    fields: dict[str, Any] = {
        "fetched_bytes": progress.fetched_bytes,
        "fetched_bytes_per_second": speed,
    }
    if progress.expected_bytes:
        fields["expected_bytes"] = progress.expected_bytes
        bytes_left = max(0, progress.expected_bytes - progress.fetched_bytes)
        if speed and bytes_left <= speed * MAX_ETA:
            fields["stage_end"] = timestamp(now + bytes_left / speed)
    return fields


def _is_same_step(before: ProgressStatus, progress: ProgressStatus, stage: str) -> bool:
    """True for another stage of the step that is shown: a write for each costs too much."""
    is_in_step = before.stage in STEP_STAGES and stage in STEP_STAGES
    return is_in_step and (before.attempt, before.step) == (progress.attempt, progress.step)


def _stage(observation: Observation) -> tuple[str | None, float | None]:
    """The stage, and for how long rank 0 says that it has lasted; None if only pods show it."""
    if observation.pull:
        progress = observation.pull.progress
        return progress.stage, progress.stage_seconds + (observation.at - observation.pull.at)
    if observation.has_training_started:
        before = observation.job.status.progress
        # A new operator has not asked rank 0 yet.
        if before is None or not observation.has_answered:
            return "Importing", None
        return before.stage or "Importing", None
    stages = (pod.start_stage for pod in (*observation.pods, *observation.engine_pods) if pod.node)
    return next(filter(None, stages), None), None


def _stage_begin(
    before: ProgressStatus | None, stage: str, now: float, seconds_so_far: float | None
) -> str:
    """When the stage began, by the operator's clock: as stated before, unless it began again."""
    begin = max(0.0, now - (seconds_so_far or 0.0))
    if before is None or before.stage != stage or before.stage_since is None:
        return timestamp(begin)
    stated = seconds(before.stage_since) or begin
    has_begun_again = seconds_so_far is not None and abs(stated - begin) > JITTER_SECONDS
    return timestamp(begin) if has_begun_again else before.stage_since
