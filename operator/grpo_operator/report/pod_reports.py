"""What the pods of a GRPOJob reported, as status fields: progress, metrics, memory and what became
of each pod.

Apart from what the operator decided: of what others say, nothing may hold a decision up.

Until rank 0 answers, the pods show what the attempt does. Rank 0 reports for how long it has been
in a stage. The operator turns that into a time by its own clock, and keeps the time while the stage
lasts.
"""

import math
from collections.abc import Mapping
from typing import Any

from grpo_api.findings.diagnosis import UNSEEN, unseen_finding
from grpo_api.plan.learned import Learned
from grpo_api.plan.plan import MemoryPrediction
from grpo_api.report.artifacts import MAX_WHERE
from grpo_api.report.report import (
    MAX_FINDINGS,
    STEP_PHASES,
    STEP_STAGES,
    Finding,
    Outcome,
    Progress,
    Result,
)
from grpo_api.report.revisions import DATASET_FINGERPRINT
from grpo_api.report.training_metrics import PHASE_SECONDS, WEIGHTS_VERSION
from grpo_api.status.status import (
    MAX_SHOWN_PODS,
    CheckpointStatus,
    MemoryMeasurement,
    MetricsStatus,
    PhaseMemory,
    PodStatus,
    ProgressStatus,
)
from grpo_api.text.contract import CHECKPOINT_MOUNT
from grpo_api.text.quantity import MAX_COUNT
from grpo_kube.objects.json_reader import truncate
from grpo_kube.objects.times import seconds, timestamp

from ..decide.decisions import Action, Decision
from ..decide.observation import Observation
from ..decide.oom_feedback import learned_with_progress
from ..decide.start_checks import current_engine_pods
from ..records.names import checkpoint_volume
from ..records.reasons import Reason
from ..records.records import ENDED_PHASES, GRPOJobRecord, PodRecord


def report(observation: Observation, decision: Decision) -> dict[str, Any]:
    """The status fields that the pods reported; the last values stay when they are gone."""
    if observation.job.is_finished:
        return _final_pods(observation)
    fields: dict[str, Any] = {}
    fields |= _revisions(observation)
    fields |= _learned_fields(observation, decision)
    fields |= _checkpoint(observation)
    if not observation.job.is_active or decision.action is Action.COMMIT:
        fields |= without_attempt(observation.job.status.progress)
        return fields if decision.action is Action.COMMIT else fields | _final_pods(observation)
    if observation.pods:
        fields["pods"] = _pods(observation)
    elif observation.first_seen.over:
        fields |= _final_pods(observation)
    if observation.pull:
        fields |= progress_fields(observation.pull.progress, observation)
    if decision.reason == Reason.PROGRESS_UNKNOWN:
        fields["findings"] = _unseen_findings(observation)
    fields |= stage_fields(observation, decision, fields.get("progress"))
    if decision.action in (Action.SUCCEED, Action.FAIL) and decision.ended:
        fields |= _last_words(fields, observation, decision.ended)
    if decision.action is Action.SUCCEED:
        fields |= _export(observation)
    return fields


def _revisions(observation: Observation) -> dict[str, Any]:
    """What the attempt says that it is made of. A commit stays what the first attempt found: later
    attempts get it in their plan."""
    revisions = dict(observation.pull.progress.revisions) if observation.pull else {}
    for end in observation.terminations:
        revisions |= end.outcome.revisions
    if not revisions:
        return {}
    first_attempts = observation.job.status.revisions or {}
    merged = {**revisions, **first_attempts}
    if DATASET_FINGERPRINT in revisions:
        merged[DATASET_FINGERPRINT] = revisions[DATASET_FINGERPRINT]
    return {"revisions": merged}


def _learned_fields(observation: Observation, decision: Decision) -> dict[str, Any]:
    """What the attempt reported about model and links, unless the decision has `learned`."""
    learned = learned_with_progress(observation)
    before = observation.job.status.learned or Learned()
    if decision.learned or learned == before:
        return {}
    return {"learned": learned}


def _checkpoint(observation: Observation) -> dict[str, Any]:
    """The newest checkpoint that the attempt reports; none if it trains without one."""
    reported_checkpoints = [
        end.outcome.checkpoint for end in observation.terminations if end.reported
    ]
    if observation.pull:
        reported_checkpoints.append(observation.pull.progress.checkpoint)
    checkpoints = [checkpoint for checkpoint in reported_checkpoints if checkpoint]
    if not checkpoints:
        trains_without = (
            observation.pull is not None and observation.pull.progress.stage in STEP_STAGES
        )
        is_outdated = trains_without and observation.job.status.checkpoint
        return {"checkpoint": None} if is_outdated else {}
    newest = max(checkpoints, key=lambda checkpoint: checkpoint.step)
    written_at = timestamp(newest.time)
    where = lasting_address(newest.where, observation.job)
    status = CheckpointStatus(step=newest.step, time=written_at, bytes=newest.bytes, where=where)
    return {"checkpoint": status}


def _export(observation: Observation) -> dict[str, Any]:
    """The exported model, which one rank reports."""
    for end in observation.terminations:
        exported = end.outcome.export
        if end.has_succeeded and exported:
            path = lasting_address(exported.path, observation.job)
            export = exported.model_copy(update={"path": path})
            return {"export": export}
    return {}


def lasting_address(path: str, job: GRPOJobRecord) -> str:
    """`/checkpoints/…` of a pod by its claim and folder; other addresses stay as they are."""
    volume = checkpoint_volume(job.name, job.spec.checkpoint) if job.spec else None
    below = path.removeprefix(f"{CHECKPOINT_MOUNT}/")
    if volume is None or below == path:
        return path
    parts = (volume.claim_name, volume.sub_path, below)
    address = "pvc://" + "/".join(filter(None, parts))
    return truncate(address, MAX_WHERE)


def _last_words(
    fields: dict[str, Any], observation: Observation, outcome: Outcome
) -> dict[str, Any]:
    """Progress and metrics as the outcome reports them: newer than any pull."""
    old = observation.job.status
    reported_outcomes = [end.outcome for end in observation.terminations if end.reported]
    last = max([outcome, *reported_outcomes], key=_newest_last)
    last_pull = fields.get("progress") or old.progress
    final_fields: dict[str, Any] = {"progress": final_progress(last_pull, last)}
    if metrics := metrics_status(last.metrics):
        # an Outcome is short: it doesn't say how long the last step took
        pulled = fields.get("metrics") or old.metrics
        if pulled:
            metrics = metrics.model_copy(update={"phase_seconds": pulled.phase_seconds})
        final_fields["metrics"] = metrics
    return final_fields


def _newest_last(outcome: Outcome) -> tuple[int, bool, int]:
    """Sort key: the last step last; of one step an outcome with metrics, the lowest rank's."""
    return outcome.step, bool(outcome.metrics), -outcome.rank


def _final_pods(observation: Observation) -> dict[str, Any]:
    """The pods of an attempt that is over until all have ended: nothing runs in a final status, nor
    in that of a job that is suspended or waits."""
    now = {pod.name: _pod(pod) for pod in observation.pods}
    now |= {pod.name: _engine(pod) for pod in observation.engine_pods}
    shown = observation.job.status.pods
    final = [now.get(pod.name, _final_status(pod)) for pod in shown]
    return {"pods": final} if final != shown else {}


def _final_status(pod: PodStatus) -> PodStatus:
    if pod.phase in ENDED_PHASES:
        return pod
    return pod.model_copy(update={"phase": "Deleted"})


def progress_fields(progress: Progress, observation: Observation) -> dict[str, Any]:
    """status.progress, .metrics and .memory from rank 0's progress."""
    fields: dict[str, Any] = {"progress": progress_status(progress)}
    if metrics := metrics_status(progress.metrics):
        fields["metrics"] = metrics
    fields["findings"] = progress.findings or None
    plan = observation.job.status.plan
    if plan and plan.memory:
        memory = memory_measurement(plan.memory, progress.memory)
        if memory:
            fields["memory"] = memory
    if progress.trackers:
        fields["tracking"] = progress.trackers
    return fields


def _unseen_findings(observation: Observation) -> list[Finding]:
    """That rank 0 does not answer, before what it has found last."""
    status = observation.job.status
    pull = observation.pull
    last_findings = pull.progress.findings if pull else status.findings or []
    reported = pull.progress if pull else status.progress
    is_current = reported is not None and reported.attempt == status.attempt
    step = reported.step if reported and is_current else 0
    others = [finding for finding in last_findings if finding.finding != UNSEEN]
    return [unseen_finding(step), *others][:MAX_FINDINGS]


def metrics_status(values: Mapping[str, float]) -> MetricsStatus | None:
    """status.metrics, most of it as text with four significant digits; None without any value."""
    named: dict[str, Any] = {name: _digits(values[name]) for name in _SHORT if name in values}
    version = values.get(WEIGHTS_VERSION.key, math.nan)
    if 0 <= version <= MAX_COUNT:
        named["weights_version"] = int(version)
    phase_seconds: dict[str, str] = {}
    for phase in STEP_PHASES:
        spent = values.get(f"{PHASE_SECONDS.key}/{phase}")
        if spent is not None:
            phase_seconds[phase] = _digits(spent)
    if phase_seconds:
        named["phase_seconds"] = phase_seconds
    return MetricsStatus(**named) if named else None


_SHORT = tuple(
    name for name in MetricsStatus.model_fields if name not in ("weights_version", "phase_seconds")
)
"""Metrics of which four digits say enough."""


def _digits(value: float) -> str:
    """Four significant digits, or the word that /metrics has for what is no finite number."""
    if math.isfinite(value):
        return f"{value:.4g}"
    return "NaN" if math.isnan(value) else f"{value:+f}".title()


def memory_measurement(
    prediction: MemoryPrediction, measured: Mapping[str, int]
) -> MemoryMeasurement | None:
    """The prediction beside what rank 0 reported; None before anything was measured on a GPU."""
    predicted: dict[str, int] = prediction.phases.model_dump()
    phases: dict[str, PhaseMemory] = {}
    for name, size in predicted.items():
        used = measured.get(name)
        if used:
            ratio = _ratio(size, used)
            phases[name] = PhaseMemory(predicted_bytes=size, measured_bytes=used, ratio=ratio)
    if not phases:
        return None
    predicted_peak = prediction.peak_allocated_bytes
    peak = max(phase.measured_bytes for phase in phases.values())
    return MemoryMeasurement(
        predicted_bytes=predicted_peak,
        measured_bytes=peak,
        ratio=_ratio(predicted_peak, peak),
        phases=phases,
        reserved_bytes=measured.get("reserved", 0),
        predicted_device_bytes=prediction.device_bytes,
        device_bytes=measured.get("device", 0),
    )


def _ratio(predicted: int, measured: int) -> str:
    return f"{predicted / measured:.3f}"


def progress_status(progress: Progress) -> ProgressStatus:
    """status.progress from rank 0's progress, without its stage."""
    step = progress.step
    total = progress.total_steps
    percent = 0
    summary = str(step)
    if total:
        percent = min(100, 100 * step // total)
        summary = f"{step}/{total}"
    eta_seconds: int | None = None
    eta = ""
    if progress.eta_seconds is not None and progress.eta_seconds <= MAX_ETA:
        eta_seconds = int(progress.eta_seconds)
        eta = duration(eta_seconds)
    last_step_time = timestamp(progress.last_step_time) if progress.last_step_time else None
    return ProgressStatus(
        attempt=progress.attempt,
        step=step,
        total_steps=total,
        percent=percent,
        summary=summary,
        eta_seconds=eta_seconds,
        eta=eta,
        last_step_time=last_step_time,
    )


def duration(seconds: int) -> str:
    """The two largest units, such as `1h12m` or `45s`."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (rest, "s"))
    for position, (value, _) in enumerate(parts):
        if value:
            largest = parts[position : position + 2]
            return "".join(f"{value}{unit}" for value, unit in largest if value)
    return "0s"


def final_progress(progress: ProgressStatus | None, outcome: Outcome) -> ProgressStatus:
    """The final progress: the outcome's step is newer than the last pull."""
    last_progress = progress or ProgressStatus()
    step = max(outcome.step, last_progress.step)
    total = max(last_progress.total_steps, outcome.total_steps, step)
    has_succeeded = outcome.result is Result.SUCCEEDED
    percent = 100 * step // total if total else 100 * int(has_succeeded)
    final_fields = {
        "attempt": outcome.attempt or last_progress.attempt,
        "step": step,
        "total_steps": total,
        "percent": percent,
        "summary": f"{step}/{total}" if total else "",
        "eta_seconds": 0 if has_succeeded else None,
        "eta": "",
        **NO_STAGE,
    }
    return last_progress.model_copy(update=final_fields)


def _pods(observation: Observation) -> list[PodStatus]:
    """The training pods, and of each engine the pod that counts."""
    engine_pods = current_engine_pods(observation.engine_pods)
    pods = [*map(_pod, observation.pods), *map(_engine, engine_pods)]
    return pods[:MAX_SHOWN_PODS]


def _engine(pod: PodRecord) -> PodStatus:
    status = _pod(pod)
    return status.model_copy(update={"engine": True})


def _pod(pod: PodRecord) -> PodStatus:
    end = pod.termination
    phase = pod.phase
    if end and end.exit_code is not None and phase not in ENDED_PHASES:
        # the kubelet sets a pod's phase a moment after its container's end, and nobody may look
        # again
        phase = "Failed" if end.exit_code else "Succeeded"
    reason = pod.waiting or pod.unschedulable
    if end:
        reason = end.outcome.result.value
    return PodStatus(
        name=pod.name, index=pod.index, node=pod.node, phase=phase, reason=reason[:256]
    )


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
