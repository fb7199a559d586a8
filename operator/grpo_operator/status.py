"""The status that a GRPOJob should have: fields, conditions and the derived phase.

What users see follows from an Observation and a Decision alone; times come in with the Observation.
"""

from collections.abc import Mapping
from typing import Any

from grpo_api.plan import MemoryPrediction
from grpo_api.report import Outcome, Progress, Result
from grpo_api.status import (
    MAX_ENDS,
    AttemptEnd,
    Condition,
    ConditionType,
    GRPOJobStatus,
    MemoryMeasurement,
    MetricsStatus,
    Phase,
    PhaseMemory,
    PodStatus,
    ProgressStatus,
)

from .conditions import conditions
from .decisions import Action, Decision
from .observe import Observation
from .reasons import RELEASES, Reason
from .records import ENDED_PHASES, PodRecord
from .restarting import avoided_nodes
from .times import timestamp

URGENT = frozenset({"phase", "attempt", "outcome", "restarts", "completionTime", "observedGeneration"})
"""Fields whose change is written at once. Others wait a little for company: they move all the time, and every write
costs the API server."""

MAX_ETA = 10 * 365 * 86400
"""Seconds of the longest time to the end that is worth telling."""

REPORTED = frozenset({"progress", "metrics", "memory", "pods", "outcome"})
"""Fields that say what pods said. The others follow from decisions, and never wait for these."""

_ENDS_ATTEMPT = (Action.QUEUE, Action.SUSPEND, Action.RELEASE, Action.SUCCEED, Action.FAIL)
_WAITING = RELEASES | {Reason.WAITING_FOR_GPUS, Reason.WAITING_IN_QUEUE, Reason.WAITING_FOR_KUEUE}
_RESTARTING = (Reason.RESTARTING, Reason.RESTART_BACKOFF)


def build(seen: Observation, decision: Decision) -> GRPOJobStatus:
    """The status after the decision has been carried out."""
    old, action = seen.job.status, decision.action
    fields: dict[str, Any] = {"observed_generation": seen.job.generation}
    fields |= _attempt(seen, decision)
    fields |= _end(seen, decision)
    if action in (Action.SUCCEED, Action.FAIL):
        fields["completion_time"] = timestamp(seen.now)
    fields |= _report(seen, decision)
    found = _kept_times(old.conditions, conditions(seen, decision), seen.now)
    fields |= {"conditions": found, "phase": phase(found)}
    return old.model_copy(update=fields)


def _end(seen: Observation, decision: Decision) -> dict[str, Any]:
    """How the current attempt ended, and what that means for those after it."""
    old, action, outcome = seen.job.status, decision.action, decision.ended
    # nodes that nobody can do without, or that were looked after during a pause, get another chance
    fields: dict[str, Any] = {"avoided_nodes": []} if action in (Action.SUSPEND, Action.RELEASE) else {}
    if not old.attempt or not (outcome or action is Action.RELEASE):
        return fields
    end = AttemptEnd(
        attempt=old.attempt,
        reason=outcome.result if outcome else decision.reason,
        counted=decision.counted,
        running_seconds=int(seen.running_seconds),
        node=decision.node,
        end_time=timestamp(seen.now),
    )
    fields["ends"] = [*old.ends, end][-MAX_ENDS:]
    if outcome:
        fields |= {"outcome": _stamped(outcome, old.attempt), "avoided_nodes": avoided_nodes(old, end)}
    if outcome and action in (Action.COMMIT, Action.QUEUE):
        counter = "restarts" if decision.counted else "uncounted_restarts"
        fields[counter] = getattr(old, counter) + 1
    return fields


def _attempt(seen: Observation, decision: Decision) -> dict[str, Any]:
    """Counter, plan and clock of the attempt."""
    old, action = seen.job.status, decision.action
    if action is Action.COMMIT:
        return {
            "attempt": old.attempt + 1,
            "plan": decision.plan,
            "job_uid": None,
            "start_time": old.start_time or timestamp(seen.now),
            "attempt_start_time": None if seen.job.queue_name else timestamp(seen.now),
            "active_seconds": int(seen.elapsed),
            "pods": [],
        }
    if action in _ENDS_ATTEMPT:
        return {"active_seconds": int(seen.elapsed), "attempt_start_time": None}
    if seen.child is None or not seen.job.active:
        return {}
    return {"job_uid": seen.child.uid, **_clock(seen)}


def _clock(seen: Observation) -> dict[str, Any]:
    """The clock stands still while Kueue has the Job suspended."""
    since, running = seen.job.status.attempt_start_time, seen.child is not None and not seen.child.suspended
    if running and since is None:
        return {"attempt_start_time": timestamp(seen.now)}
    if not running and since is not None:
        return {"active_seconds": int(seen.elapsed), "attempt_start_time": None}
    return {}


def _stamped(outcome: Outcome, attempt: int) -> Outcome:
    """The outcome with the attempt that it ended, if the trainer did not say it."""
    return outcome if outcome.attempt else outcome.model_copy(update={"attempt": attempt})


def _report(seen: Observation, decision: Decision) -> dict[str, Any]:
    """What rank 0 and the pods said; the last words stay when they are gone."""
    if seen.job.finished:
        return _final_pods(seen)
    if not seen.job.active or decision.action is Action.COMMIT:
        return {}
    fields: dict[str, Any] = {"pods": [_pod(pod) for pod in seen.pods]} if seen.pods else {}
    if seen.pull:
        fields |= reported(seen.pull.progress, seen)
    if decision.action in (Action.SUCCEED, Action.FAIL) and decision.ended:
        fields |= _last_words(fields, seen, decision.ended)
    return fields


def _last_words(fields: dict[str, Any], seen: Observation, ended: Outcome) -> dict[str, Any]:
    """Progress and metrics as they are told with the end: newer than any pull."""
    old = seen.job.status
    told = [ended, *(one.outcome for one in seen.terminations if one.reported)]
    last = max(told, key=lambda outcome: (outcome.step, bool(outcome.metrics), -outcome.rank))
    words: dict[str, Any] = {"progress": _complete(fields.get("progress") or old.progress, last)}
    if metrics := _metrics(last.metrics):
        words["metrics"] = metrics
    return words


def _final_pods(seen: Observation) -> dict[str, Any]:
    """The pods of a finished job, until each has ended or is gone: nothing runs in a status that is final."""
    now = {pod.name: _pod(pod) for pod in seen.pods}
    final = [now.get(known.name, _gone(known)) for known in seen.job.status.pods]
    return {"pods": final} if final != seen.job.status.pods else {}


def _gone(pod: PodStatus) -> PodStatus:
    return pod if pod.phase in ENDED_PHASES else pod.model_copy(update={"phase": "Deleted"})


def reported(progress: Progress, seen: Observation) -> dict[str, Any]:
    """status.progress, .metrics and .memory from rank 0's progress."""
    fields: dict[str, Any] = {"progress": _progress(progress)}
    if metrics := _metrics(progress.metrics):
        fields["metrics"] = metrics
    plan = seen.job.status.plan
    if plan and plan.memory and (memory := memory_measurement(plan.memory, progress.memory)):
        fields["memory"] = memory
    return fields


def _metrics(values: Mapping[str, float]) -> MetricsStatus | None:
    """status.metrics, as text with four significant digits; None when none of them was told."""
    named = {name: f"{values[name]:.4g}" for name in MetricsStatus.model_fields if name in values}
    return MetricsStatus(**named) if named else None


def memory_measurement(prediction: MemoryPrediction, measured: Mapping[str, int]) -> MemoryMeasurement | None:
    """The prediction beside what rank 0 reported; None before anything was measured on a GPU."""
    predicted: dict[str, int] = prediction.phases.model_dump()
    phases = {
        name: PhaseMemory(predicted_bytes=size, measured_bytes=measured[name], ratio=_ratio(size, measured[name]))
        for name, size in predicted.items()
        if measured.get(name)
    }
    if not phases:
        return None
    peak = max(phase.measured_bytes for phase in phases.values())
    return MemoryMeasurement(
        predicted_bytes=prediction.peak_allocated_bytes,
        measured_bytes=peak,
        ratio=_ratio(prediction.peak_allocated_bytes, peak),
        phases=phases,
        reserved_bytes=measured.get("reserved", 0),
        predicted_device_bytes=prediction.device_bytes,
        device_bytes=measured.get("device", 0),
    )


def _ratio(predicted: int, measured: int) -> str:
    return f"{predicted / measured:.3f}"


def _progress(progress: Progress) -> ProgressStatus:
    step, total, last = progress.step, progress.total_steps, progress.last_step_time
    eta = int(progress.seconds_per_step * max(0, total - step)) if progress.seconds_per_step and total else None
    if eta is not None and eta > MAX_ETA:
        eta = None
    return ProgressStatus(
        step=step,
        total_steps=total,
        percent=min(100, 100 * step // total) if total else 0,
        summary=f"{step}/{total}" if total else str(step),
        eta_seconds=eta,
        eta=duration(eta) if eta is not None else "",
        last_step_time=timestamp(last) if last else None,
    )


def duration(seconds: int) -> str:
    """The two largest units, such as `1h12m` or `45s`."""
    parts = ((seconds // 86400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s"))
    first = next((position for position, (value, _) in enumerate(parts) if value), len(parts) - 1)
    return "".join(f"{value}{unit}" for value, unit in parts[first : first + 2] if value) or "0s"


def _complete(progress: ProgressStatus | None, outcome: Outcome) -> ProgressStatus:
    """The final progress: the outcome's step is newer than the last pull."""
    known = progress or ProgressStatus()
    step = max(outcome.step, known.step)
    total = max(known.total_steps, outcome.total_steps, step)
    done = outcome.result is Result.SUCCEEDED
    return known.model_copy(
        update={
            "step": step,
            "total_steps": total,
            "percent": 100 * step // total if total else 100 * int(done),
            "summary": f"{step}/{total}",
            "eta_seconds": 0 if done else None,
            "eta": "",
        }
    )


def _pod(pod: PodRecord) -> PodStatus:
    found, phase = pod.termination, pod.phase
    if found and found.exit_code is not None and phase not in ENDED_PHASES:
        # the kubelet sets a pod's phase a moment after its container's end, and nobody may look again
        phase = "Failed" if found.exit_code else "Succeeded"
    reason = found.outcome.result.value if found else (pod.waiting or pod.unschedulable)
    return PodStatus(name=pod.name, index=pod.index, node=pod.node, phase=phase, reason=reason[:256])


def _kept_times(old: list[Condition], new: list[Condition], now: float) -> list[Condition]:
    """lastTransitionTime moves only with the status; conditions that nobody states any more stay as they were."""
    before = {condition.type: condition for condition in old}
    for condition in new:
        known = before.get(condition.type)
        same = known is not None and known.status == condition.status
        at = known.last_transition_time if known and same else timestamp(now)
        before[condition.type] = condition.model_copy(update={"last_transition_time": at})
    return list(before.values())


def phase(found: list[Condition]) -> Phase:
    """One word for the printer column, from the conditions."""
    by_type = {condition.type: condition for condition in found}

    def true(kind: ConditionType) -> bool:
        return kind in by_type and by_type[kind].status == "True"

    for kind, word in _PHASES:
        if true(kind):
            return word
    admitted = by_type.get(ConditionType.ADMITTED)
    if admitted is None or admitted.status != "True":
        return Phase.QUEUED if admitted and admitted.reason in _WAITING else Phase.PENDING
    running = by_type.get(ConditionType.RUNNING)
    return Phase.RESTARTING if running and running.reason in _RESTARTING else Phase.STARTING


_PHASES = (
    (ConditionType.SUCCEEDED, Phase.SUCCEEDED),
    (ConditionType.FAILED, Phase.FAILED),
    (ConditionType.SUSPENDED, Phase.SUSPENDED),
    (ConditionType.RUNNING, Phase.RUNNING),
)


def merge_patch(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The RFC 7396 merge patch that turns `old` into `new`; empty when they are equal."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        known = old.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            if inner := merge_patch(known, value):
                patch[key] = inner
        elif known != value:
            patch[key] = value
    return patch


def to_json(status: GRPOJobStatus) -> dict[str, Any]:
    """The status as the API server keeps it: camelCase, without unset fields."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)
