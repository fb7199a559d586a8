"""Computes the status that a GRPOJob should have: fields, conditions and the derived phase.

It follows from an Observation and a Decision alone, and times come in with the Observation.
"""

import math
from collections.abc import Mapping
from typing import Any

from grpo_api.plan.learned import Learned, LearnedPrompts
from grpo_api.report.preflight import PreflightReport
from grpo_api.report.report import Outcome, Result
from grpo_api.status.status import (
    MAX_ENDS,
    AttemptEnd,
    Condition,
    ConditionType,
    GRPOJobStatus,
    Phase,
)
from grpo_api.status.usage import Usage
from grpo_kube.objects.times import not_future, timestamp

from ..decide.decisions import LEAVES_NO_ATTEMPT, Action, Decision
from ..decide.observation import Observation
from ..records.reasons import RELEASES, UNCHECKED, Reason
from ..records.records import GRPOJobRecord
from ..usage.account import account
from .conditions import conditions
from .kstatus import ABNORMAL, first_unwell, kstatus_conditions
from .pod_reports import report

_WAITING = (
    RELEASES
    | UNCHECKED
    | {
        Reason.WAITING_FOR_GPUS,
        Reason.WAITING_IN_QUEUE,
        Reason.WAITING_FOR_QUOTA,
        Reason.PRIORITY_CLASS_NOT_FOUND,
        Reason.SERVICE_ACCOUNT_NOT_FOUND,
        Reason.JOB_CLASS_NOT_FOUND,
        Reason.POD_SECURITY_FORBIDS,
        Reason.WAITING_FOR_KUEUE,
        Reason.EVICTED,
        Reason.WORKLOAD_REPLACED,
        Reason.NO_KUEUE,
        Reason.FAILED_CREATE,
    }
)
_RESTARTING = (Reason.RESTARTING, Reason.RESTART_BACKOFF)
_MET_WITHOUT_GPUS = (Reason.WAITING_FOR_HUB, Reason.START_TIMEOUT)
"""Why a gang gave its GPUs back; a preflight meets the same, and holds none meanwhile."""


def build_status(observation: Observation, decision: Decision) -> GRPOJobStatus:
    """The status after the decision has been carried out."""
    old = observation.job.status
    action = decision.action
    fields: dict[str, Any] = {
        "observed_generation": observation.job.generation,
        "start_time": not_future(old.start_time, observation.now),
        "attempt_start_time": not_future(old.attempt_start_time, observation.now),
        "completion_time": not_future(old.completion_time, observation.now),
    }
    fields |= _attempt(observation, decision)
    fields |= _end(observation, decision)
    if action in (Action.SUCCEED, Action.FAIL):
        fields["completion_time"] = timestamp(observation.now)
    fields |= report(observation, decision)
    fields |= _preflight(observation, decision)
    fields |= _retry(observation, decision)
    if action is Action.RELEASE and decision.reason in _MET_WITHOUT_GPUS:
        fields |= _without_report(observation.job)
    if action is Action.RESOLVE:
        fields |= {
            "resume_from": decision.resume_from,
            "plan": decision.plan,
            "revisions": decision.revisions,
        }
    stated_conditions = conditions(observation, decision)
    job_conditions = _with_transition_times(old.conditions, stated_conditions, observation.now)
    fields["phase"] = phase(job_conditions)
    unwell = first_unwell(job_conditions)
    fields["reason"] = unwell.reason if unwell else None
    fields["conditions"] = _with_conventions(fields["phase"], job_conditions, observation)
    new = old.model_copy(update=fields)
    usage = account(observation, decision, new)
    return new.model_copy(update={"usage": usage})


def _end(observation: Observation, decision: Decision) -> dict[str, Any]:
    """How the current attempt ended, and what that means for those after it."""
    old = observation.job.status
    action = decision.action
    outcome = decision.ended
    ends_attempt = outcome is not None or action is Action.RELEASE
    fields: dict[str, Any] = {}
    if action in (Action.SUSPEND, Action.RELEASE):
        # nodes that were looked after during a pause, or that nobody can do without, get another
        # chance
        fields["avoided_nodes"] = []
    elif decision.avoided_nodes is not None:
        fields["avoided_nodes"] = list(decision.avoided_nodes)
    if not old.attempt or not ends_attempt:
        return fields
    reason = outcome.result if outcome else decision.reason
    end = AttemptEnd(
        attempt=old.attempt,
        reason=reason,
        counted=decision.counted,
        running_seconds=int(observation.running_seconds),
        node=decision.node,
        end_time=timestamp(observation.now),
    )
    ends = [*old.ends, end]
    fields["ends"] = ends[-MAX_ENDS:]
    if decision.learned:
        fields["learned"] = decision.learned
    if outcome:
        fields["outcome"] = _published_outcome(outcome, observation)
    if outcome and action in (Action.COMMIT, Action.QUEUE, Action.SUSPEND, Action.RELEASE):
        counter = "restarts" if decision.counted else "uncounted_restarts"
        fields[counter] = getattr(old, counter) + 1
        if decision.rollback:
            fields["rollbacks"] = [*old.rollbacks, decision.rollback]
    return fields


def _preflight(observation: Observation, decision: Decision) -> dict[str, Any]:
    """What the preflight has found, and what the planner learns of it."""
    preflight, job = observation.preflight, observation.job
    if preflight is None or not preflight.is_needed:
        is_waiting = not job.is_active and not job.is_finished
        return _unlearned(job) if is_waiting else {}
    check = preflight.check
    report = check.status.report
    if decision.action is Action.COMMIT:
        # What was checked is what trains, also where a branch has moved since. Only now: the spec
        # may name another revision until an attempt is committed.
        commits = {**report.revisions, **(job.status.revisions or {})} if report else {}
        return {"revisions": commits} if commits else {}
    fields: dict[str, Any] = {"preflight": check.status}
    if check.reason is Reason.PREFLIGHT_FAILED and decision.action is Action.FAIL:
        outcome = Outcome(result=Result.BAD_INPUT, message=decision.message)
        fields["outcome"] = outcome
    before = job.status.preflight
    if before and before.digest != check.status.digest:
        fields |= _unlearned(job)
    if report and check.status != before:
        fields |= _learned_from(report, job)
    return fields


def _without_report(job: GRPOJobRecord) -> dict[str, Any]:
    """The job is checked again, also where an attempt was made before: see should_check."""
    preflight = job.status.preflight
    if preflight is None or preflight.report is None:
        return {}
    return {"preflight": preflight.model_copy(update={"report": None, "tries": 0})}


def _unlearned(job: GRPOJobRecord) -> dict[str, Any]:
    """Without what the preflight of an earlier spec found. What an attempt has loaded never
    changes; its image may."""
    learned = job.status.learned
    if learned is None:
        return {}
    outdated = ["has_vllm"] if job.status.attempt else ["has_vllm", "architecture", "prompts"]
    cleared = learned.model_copy(update=dict.fromkeys(outdated))
    return {"learned": cleared} if cleared != learned else {}


def _learned_from(report: PreflightReport, job: GRPOJobRecord) -> dict[str, Any]:
    """What the planner learns of a new report."""
    has_own_image = job.spec is not None and job.spec.image is not None
    before = job.status.learned or Learned()
    # what an attempt has loaded is nearer to the truth
    loaded = before.architecture if job.status.attempt else None
    learned = before.model_copy(
        update={
            "architecture": loaded or report.architecture,
            "has_vllm": report.has_vllm if has_own_image else None,
            "prompts": LearnedPrompts.from_report(report.prompts),
        }
    )
    return {"learned": learned} if learned != before else {}


def _retry(observation: Observation, decision: Decision) -> dict[str, Any]:
    """A retried job counts from 0; other changes of spec.retry are only taken note of."""
    job = observation.job
    retries = decision.action is Action.RETRY
    if job.spec is None or (observation.is_retry_requested and not retries):
        return {}
    fields: dict[str, Any] = {"retry": job.spec.retry}
    if retries:
        # the time that was used up too: a job that failed of its deadline must not do so again at
        # once
        fields |= {
            "restarts": 0,
            "uncounted_restarts": 0,
            "ends": [],
            "avoided_nodes": [],
            "active_seconds": 0,
            "completion_time": None,
            "passed_over": None,
        }
        preflight = job.status.preflight
        if preflight and preflight.report and preflight.report.problems:
            fields |= _without_report(job)
        learned = job.status.learned
        if learned:
            cleared: dict[str, list[Any]] = {"shortfalls": [], "engine_failures": []}
            fields["learned"] = learned.model_copy(update=cleared)
    return fields


def _attempt(observation: Observation, decision: Decision) -> dict[str, Any]:
    """Counter, plan and clock of the attempt."""
    old = observation.job.status
    action = decision.action
    active_seconds = int(observation.elapsed_seconds)
    if action is Action.COMMIT:
        now = timestamp(observation.now)
        return {
            "attempt": observation.last_attempt + 1,
            "passed_over": None,
            "plan": decision.plan,
            "job_class": decision.job_class,
            "job_uid": None,
            "start_time": not_future(old.start_time or now, observation.now),
            "attempt_start_time": now,
            "active_seconds": active_seconds,
            "pods": [],
        }
    if action in LEAVES_NO_ATTEMPT:
        fields: dict[str, Any] = {"active_seconds": active_seconds, "attempt_start_time": None}
        if action is Action.QUEUE:
            fields["passed_over"] = decision.passed_over or None
        return fields
    if observation.child is None or not observation.job.is_active:
        return {}
    return {"job_uid": observation.child.uid}


def _published_outcome(outcome: Outcome, observation: Observation) -> Outcome:
    """The outcome with the attempt that it ended, if the trainer did not say it, and without what
    has no place here.

    Of a job on GPUs, status.usage has the account. JSON has no word for NaN and infinity:
    status.metrics has them as text. status.export and status.checkpoint have these.
    """
    job = observation.job
    finite_metrics = {key: value for key, value in outcome.metrics.items() if math.isfinite(value)}
    fields: dict[str, Any] = {
        "attempt": outcome.attempt or job.status.attempt,
        "export": None,
        "checkpoint": None,
        "metrics": finite_metrics,
    }
    if job.spec and job.spec.placement.accelerator == "GPU":
        fields["account"] = None
    return outcome.model_copy(update=fields)


def _with_transition_times(
    old: list[Condition], new: list[Condition], now: float
) -> list[Condition]:
    """lastTransitionTime moves only with the status; unstated conditions stay as they were."""
    by_type: dict[str, Condition] = {}
    for condition in old:
        update = {"last_transition_time": not_future(condition.last_transition_time, now)}
        by_type[condition.type] = condition.model_copy(update=update)
    for condition in new:
        before = by_type.get(condition.type)
        changed_at = timestamp(now)
        if before and before.status == condition.status:
            changed_at = before.last_transition_time
        update = {"last_transition_time": changed_at}
        by_type[condition.type] = condition.model_copy(update=update)
    return list(by_type.values())


def _with_conventions(
    word: Phase, conditions: list[Condition], observation: Observation
) -> list[Condition]:
    """The conditions with those of other tools; kstatus' abnormal ones only while True."""
    if not conditions:
        return []
    update = {"observed_generation": observation.job.generation}
    like = conditions[0].model_copy(update=update)
    conventions = list(kstatus_conditions(word, conditions, like))
    absent = ABNORMAL - {condition.type for condition in conventions}
    complete = _with_transition_times(conditions, conventions, observation.now)
    return [condition for condition in complete if condition.type not in absent]


def phase(conditions: list[Condition]) -> Phase:
    """One word for the printer column, from the conditions."""
    by_type = {condition.type: condition for condition in conditions}
    for kind, word in _PHASES:
        if kind in by_type and by_type[kind].status == "True":
            return word
    admitted = by_type.get(ConditionType.ADMITTED)
    if admitted is None:
        return Phase.PENDING
    if admitted.status != "True":
        return Phase.QUEUED if admitted.reason in _WAITING else Phase.PENDING
    running = by_type.get(ConditionType.RUNNING)
    if running and running.reason in _RESTARTING:
        return Phase.RESTARTING
    return Phase.STARTING


_PHASES = (
    (ConditionType.SUCCEEDED, Phase.SUCCEEDED),
    (ConditionType.FAILED, Phase.FAILED),
    (ConditionType.SUSPENDED, Phase.SUSPENDED),
    (ConditionType.RUNNING, Phase.RUNNING),
)


def to_json(status: GRPOJobStatus) -> dict[str, Any]:
    """The status as the API server keeps it: camelCase, without unset fields."""
    stated = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    plan = stated.get("plan")
    if plan and not plan["gpus"]:
        del plan["gpus"]  # kubectl's column of GPUs shall be empty for a job on CPUs
    return stated


def with_unknown_fields(
    raw: Mapping[str, Any], before: GRPOJobStatus, now: GRPOJobStatus
) -> dict[str, Any]:
    """The status as JSON, with the fields that only a newer version knows from `raw`, the one
    before: two versions take turns during an upgrade.

    Those of a value that is replaced, such as the plan by another attempt's, go with it.
    """
    stated = to_json(now)
    unknown = dict(raw)
    for name, field in GRPOJobStatus.model_fields.items():
        key = field.alias or name
        unknown.pop(key, None)
        if key in stated and raw.get(key) is not None:
            old, new = getattr(before, name), getattr(now, name)
            stated[key] = _with_unknown(raw[key], old, new, stated[key])
    return unknown | stated


def _with_unknown(raw: Any, before: Any, now: Any, stated: Any) -> Any:
    """The JSON `stated` of a value of the status, with unknown fields of `raw`."""
    if now == before:
        return raw
    if isinstance(now, list):
        items = list(map(_with_unknown, raw, before, now, stated))
        return [*items, *stated[len(items) :]]
    # Every attempt adds to these.
    if isinstance(now, Learned | Usage):
        known = {field.alias for field in type(now).model_fields.values()}
        return {key: value for key, value in raw.items() if key not in known} | stated
    return stated
