"""The conditions of a GRPOJob: one function per decision, each stating what it knows.

The sentences that users read stand together here. build_status keeps the transition times and
whatever a decision doesn't speak of.
"""

from collections.abc import Callable, Iterator
from typing import Literal

from grpo_api.findings.diagnosis import LEAST_STEPS, UNSEEN_ADVICE, UNSEEN_MEANING, place_message
from grpo_api.report.report import STEP_STAGES, Progress
from grpo_api.report.training_metrics import PROMPTS, PROMPTS_DROPPED
from grpo_api.status.status import Condition, ConditionType
from grpo_api.text.messages import MAX_MESSAGE, plain_text, shorten
from grpo_api.text.quantity import MAX_COUNT
from grpo_kube.objects.times import timestamp
from grpo_planner.search.engine_plan import sampler_name

from ..decide.decisions import ENDS_ATTEMPT, Action, Decision
from ..decide.observation import Observation
from ..decide.start_checks import count_bound, init_container_of, unschedulable
from ..records.names import child_job
from ..records.reasons import UNCREATED, WAITS, Reason
from .degraded_causes import advice, message_since, running_cause
from .pod_reports import lasting_address

Statement = tuple[ConditionType, bool | None, str, str]
"""Type, whether it is true (None: Unknown), reason, message."""

C = ConditionType
WORTH_TELLING = 0.01
"""Share of the prompts that may be dropped without a condition."""
_STATUS: dict[bool | None, Literal["True", "False", "Unknown"]] = {
    True: "True",
    False: "False",
    None: "Unknown",
}
_IS_TRUE = {status: is_true for is_true, status in _STATUS.items()}
_TYPES = frozenset(ConditionType)
"""Others, which a newer version or somebody else wrote, stay as they are."""


def conditions(observation: Observation, decision: Decision) -> list[Condition]:
    """What the decision states, observed now; the caller keeps older transition times."""
    state_decision = _STATEMENTS.get(decision.action, _going_on)
    statements = [
        *state_decision(observation, decision),
        *_dropped_condition(observation),
        *_readable_condition(observation),
        *_checked_condition(observation, decision),
        *_healthy_condition(observation, decision),
    ]
    generation = observation.job.generation
    now = timestamp(observation.now)
    stated_conditions: list[Condition] = []
    for kind, is_true, reason, message in statements:
        condition = Condition(
            type=kind,
            status=_STATUS[is_true],
            observed_generation=generation,
            last_transition_time=now,
            reason=reason,
            message=shorten(plain_text(message), MAX_MESSAGE),
        )
        stated_conditions.append(condition)
    return stated_conditions


def _readable_condition(observation: Observation) -> Iterator[Statement]:
    """An object that was set aside and can be read again, by a newer operator or after a change."""
    if observation.job.condition(C.READABLE):
        yield C.READABLE, True, Reason.READABLE, "this version of the operator can read the object"


def _checked_condition(observation: Observation, decision: Decision) -> Iterator[Statement]:
    """What the preflight has come to, until an attempt is committed."""
    preflight = observation.preflight
    job = observation.job
    if job.is_active or job.is_finished:
        return
    if preflight and preflight.is_needed:
        if decision.action is Action.COMMIT:
            return
        check = preflight.check
        goes_on = decision.action not in (Action.SUSPEND, Action.FAIL)
        if not (goes_on or check.has_passed or check.reason is Reason.PREFLIGHT_FAILED):
            yield from _no_longer_waiting(observation, decision, C.CHECKED)
            return
        yield C.CHECKED, check.has_passed, check.reason, check.message
    elif job.condition(C.CHECKED) and not job.is_true(C.CHECKED):
        message = "the job is not checked any more: spec.preflight or the operator's setting is off"
        yield C.CHECKED, True, Reason.NOT_CHECKED, message


def _healthy_condition(observation: Observation, decision: Decision) -> Iterator[Statement]:
    """What is wrong with the run's numbers, as rank 0 judges them at every step; Unknown while it
    does not answer.

    The numbers themselves are in status.findings: here every step would be a write.
    """
    job = observation.job
    is_over = decision.action is Action.COMMIT or not job.is_active
    if decision.reason == Reason.PROGRESS_UNKNOWN:
        yield C.HEALTHY, None, Reason.UNSEEN, f"{UNSEEN_MEANING} {UNSEEN_ADVICE}"
    elif _is_still_unseen(observation):
        if job.is_active and decision.action in ENDS_ATTEMPT:
            message = "rank 0 did not answer before its attempt ended: how the run learned is lost"
            yield C.HEALTHY, None, Reason.UNSEEN, message
    elif observation.pull and not is_over:
        yield from _healthy_by_rank_0(observation.pull.progress, job.condition(C.HEALTHY))


def _is_still_unseen(observation: Observation) -> bool:
    """True if rank 0 has not answered since the status said that it does not."""
    before = observation.job.condition(C.HEALTHY)
    if before is None or before.reason != Reason.UNSEEN:
        return False
    return observation.pull is None or observation.silence is not None


def _healthy_by_rank_0(progress: Progress, before: Condition | None) -> Iterator[Statement]:
    if progress.findings:
        first, *others = progress.findings
        also = ", ".join(f"{other.finding} since step {other.since}" for other in others)
        more = f" Also {also}." if also else ""
        place = place_message(first)
        where = f" ({place})" if place else ""
        message = f"{first.finding} since step {first.since}{where}. {first.advice}{more}"
        yield C.HEALTHY, False, first.finding, message
    elif progress.step >= LEAST_STEPS:
        yield C.HEALTHY, True, Reason.NO_FINDINGS, "the numbers of the last steps look well"
    # What an earlier attempt was found to be is over, too; that it was well not before this one
    # trains, since it may go on from a checkpoint.
    elif before and (before.status != "True" or progress.stage in STEP_STAGES):
        message = f"rank 0 answers; most rules need {LEAST_STEPS} steps"
        yield C.HEALTHY, None, Reason.TOO_FEW_STEPS, message


def _dropped_condition(observation: Observation) -> Iterator[Statement]:
    """What the run leaves out of its dataset, as rank 0 counted it; it stays true."""
    metrics = observation.pull.progress.metrics if observation.pull else {}
    dropped = metrics.get(PROMPTS_DROPPED.key, 0.0)
    total = dropped + metrics.get(PROMPTS.key, 0.0)
    share = dropped / total if 0 < total <= MAX_COUNT else 0.0
    spec = observation.job.spec
    if spec is None or not WORTH_TELLING < share <= 1:
        return
    limit = spec.training.max_prompt_length
    amount = f"{dropped:.0f} of {total:.0f} prompts ({share:.1%})"
    message = (
        f"{amount} have more than training.maxPromptLength {limit} tokens, chat template included, "
        "and are not trained on; if they matter, start a new job with a higher limit"
    )
    yield C.PROMPTS_DROPPED, True, Reason.PROMPTS_TOO_LONG, message


def _reject(observation: Observation, decision: Decision) -> Iterator[Statement]:
    yield C.ADMITTED, False, decision.reason, decision.message
    # They spoke of a place in the queue, or of an attempt that is over.
    for kind in (C.PLANNED, C.SCHEDULED, C.RUNNING):
        if observation.job.condition(kind):
            yield kind, False, decision.reason, decision.message
    yield from _no_longer_degraded(observation)
    yield from _no_longer_suspended(observation)


def _no_longer_waiting(
    observation: Observation, decision: Decision, *kinds: ConditionType
) -> Iterator[Statement]:
    """Replace what was said of a job that waited."""
    for kind in kinds:
        condition = observation.job.condition(kind)
        if condition and condition.status != "True":
            yield kind, False, decision.reason, decision.message


def _no_longer_degraded(
    observation: Observation, message: str = "no attempt runs"
) -> Iterator[Statement]:
    """Replace what was said of an attempt that is over, or of a job without one."""
    if observation.job.condition(C.DEGRADED):
        yield C.DEGRADED, False, Reason.AS_EXPECTED, message


def _no_longer_suspended(observation: Observation) -> Iterator[Statement]:
    """A spec that can't be read does not say whether it suspends the job."""
    job = observation.job
    if job.spec and not job.is_suspended and job.is_true(C.SUSPENDED):
        yield C.SUSPENDED, False, Reason.RESUMED, "spec.suspend is false again"


def _queue(observation: Observation, decision: Decision) -> Iterator[Statement]:
    yield C.ADMITTED, False, decision.reason, decision.message
    if decision.plan:
        plan_message = decision.plan.reason or "the plan is ready"
        yield C.PLANNED, True, Reason.PLANNED, plan_message
    else:
        yield C.PLANNED, False, decision.reason, decision.message
    yield C.SCHEDULED, False, decision.reason, decision.message
    yield C.RUNNING, False, decision.reason, decision.message
    yield from _no_longer_degraded(observation)
    yield from _no_longer_suspended(observation)


def _commit(observation: Observation, decision: Decision) -> Iterator[Statement]:
    job = observation.job
    number = observation.last_attempt + 1
    plan = decision.plan
    plan_reason = plan.reason if plan else ""
    yield C.ADMITTED, True, Reason.ADMITTED, f"attempt {number} was admitted"
    yield C.PLANNED, True, Reason.PLANNED, plan_reason or "the plan is ready"
    pods_message = _being_created(job.name, number)
    yield C.SCHEDULED, False, Reason.PODS_PENDING, pods_message
    if decision.ended:
        end = decision.ended
        differences = _rolled_back(decision) + _plan_change_message(decision)
        why = f"attempt {job.status.attempt} ended with {end.result}: {end.message}{differences}"
        yield C.RUNNING, False, Reason.RESTARTING, f"attempt {number} starts; {why}"
        yield C.DEGRADED, True, end.result, why
    else:
        yield C.RUNNING, False, Reason.STARTING, f"attempt {number} starts"
        yield from _no_longer_degraded(observation, f"attempt {number} starts")
    if job.is_true(C.SUSPENDED) or not job.condition(C.SUSPENDED):
        yield C.SUSPENDED, False, Reason.NOT_SUSPENDED, "spec.suspend is false"
    yield from _recovery(observation)
    yield from _engine_fallback(observation, decision)
    # asked for is not fallen back to: an Adapter reference is a request, too
    asks_for_adapter = job.spec is None or job.spec.is_adapter_requested
    if plan and plan.method == "LoRA" and not asks_for_adapter:
        changes = "; ".join(plan.changes)
        message = changes or "no plan that trains all parameters fits, so a LoRA adapter is trained"
        yield C.TRAINS_ADAPTER_ONLY, True, Reason.ADAPTER_IF_NEEDED, message
    elif job.is_true(C.TRAINS_ADAPTER_ONLY):
        yield C.TRAINS_ADAPTER_ONLY, False, Reason.AS_EXPECTED, "all parameters are trained"


def _engine_fallback(observation: Observation, decision: Decision) -> Iterator[Statement]:
    """What samples since an engine failed; False where a retry has the first choice again."""
    plan, learned = decision.plan, decision.learned or observation.job.status.learned
    if plan is None:
        return
    has_first_choice = plan.engine is not None and plan.engine.model_runner == "Auto"
    if has_first_choice or learned is None or not learned.engine_failures:
        if observation.job.is_true(C.ENGINE_FALLBACK):
            message = f"completions are sampled by {sampler_name(plan)}, as was planned"
            yield C.ENGINE_FALLBACK, False, Reason.AS_EXPECTED, message
        return
    failure = learned.engine_failures[-1]
    reason = Reason.MODEL_RUNNER_V1 if plan.engine else Reason.TRANSFORMERS
    message = (
        f"completions are sampled by {sampler_name(plan)}, since the engine of attempt "
        f"{failure.attempt} ended with {failure.reason}: {failure.message}"
    )
    yield C.ENGINE_FALLBACK, True, reason, message


def _rolled_back(decision: Decision) -> str:
    """What the next attempts leave out, as the end of a sentence; empty where nothing."""
    if decision.rollback is None:
        return ""
    skipped = decision.rollback.skipped
    numbers = f" {skipped.first}"
    if skipped.last != skipped.first:
        numbers = f"s {skipped.first} to {skipped.last}"
    return (
        f". It goes back to the newest checkpoint from before generation{numbers} of the data, "
        "which is left out"
    )


def _plan_change_message(decision: Decision) -> str:
    """What differs in the next attempt's plan, as the end of a sentence; else empty."""
    if decision.learned is None or decision.plan is None or not decision.plan.changes:
        return ""
    last_change = decision.plan.changes[-1]
    return f". Planned again {last_change}"


def _recovery(observation: Observation) -> Iterator[Statement]:
    spec = observation.job.spec
    if spec and spec.checkpoint.is_lasting:
        text = (
            "a restart resumes from the newest checkpoint, at most "
            f"{spec.checkpoint.every_steps} steps back"
        )
        reason = Reason.OBJECT_STORE if spec.checkpoint.store else Reason.SHARED_VOLUME
        yield C.RECOVERABLE, True, reason, text
    else:
        text = (
            "without spec.checkpoint.volume, volumeClaimTemplate or store a restart begins at "
            "step 0"
        )
        yield C.RECOVERABLE, False, Reason.NO_CHECKPOINT_VOLUME, text


def _suspend(observation: Observation, decision: Decision) -> Iterator[Statement]:
    yield C.ADMITTED, False, decision.reason, decision.message
    # A suspended job is not planned: what could not be planned may have been changed since.
    yield from _no_longer_waiting(observation, decision, C.PLANNED)
    yield C.SCHEDULED, False, decision.reason, decision.message
    yield C.RUNNING, False, decision.reason, decision.message
    yield C.DEGRADED, False, Reason.AS_EXPECTED, "suspended"
    yield C.SUSPENDED, True, decision.reason, decision.message


def _release(observation: Observation, decision: Decision) -> Iterator[Statement]:
    number = observation.job.status.attempt
    message = f"{decision.message}; the gang is queued again{advice(decision.reason)}"
    yield C.ADMITTED, False, decision.reason, message
    yield C.SCHEDULED, False, decision.reason, decision.message
    yield C.RUNNING, False, decision.reason, f"attempt {number} was released"
    yield from _no_longer_degraded(observation)


def _succeed(observation: Observation, decision: Decision) -> Iterator[Statement]:
    export = decision.ended.export if decision.ended else None
    message = decision.message
    if export:
        # The pod's name of the folder means nothing outside of it.
        address = lasting_address(export.path, observation.job)
        message = message.replace(export.path, address)
    scheduled = observation.job.condition(C.SCHEDULED)
    if scheduled and scheduled.status != "True":
        # Nobody looked while it ran.
        yield C.SCHEDULED, True, Reason.ALL_PODS_BOUND, "the pods had their nodes"
    yield C.RUNNING, False, Reason.FINISHED, "training is done"
    yield C.DEGRADED, False, Reason.AS_EXPECTED, "training is done"
    yield C.SUCCEEDED, True, decision.reason, message


def _fail(observation: Observation, decision: Decision) -> Iterator[Statement]:
    yield from _no_longer_suspended(observation)
    if not observation.job.is_active:
        yield from _no_longer_waiting(observation, decision, C.ADMITTED, C.PLANNED)
    if decision.ended or not observation.job.is_active:
        yield from _no_longer_waiting(observation, decision, C.SCHEDULED)
    yield from _no_longer_degraded(observation)
    yield C.RUNNING, False, Reason.FINISHED, "the job has failed"
    yield C.SUCCEEDED, False, decision.reason, decision.message
    yield C.FAILED, True, decision.reason, decision.message


def _retry(observation: Observation, decision: Decision) -> Iterator[Statement]:  # noqa: ARG001
    for kind in (C.FAILED, C.SUCCEEDED, C.ADMITTED, C.SCHEDULED, C.RUNNING):
        yield kind, False, decision.reason, decision.message
    yield C.DEGRADED, False, Reason.AS_EXPECTED, decision.message


def _going_on(observation: Observation, decision: Decision) -> Iterator[Statement]:
    """WAIT and START: nothing is decided, the pods show how far the attempt is."""
    if not observation.job.is_active:
        yield from _current_conditions(observation)
        return
    number = observation.job.status.attempt
    yield C.ADMITTED, True, Reason.ADMITTED, f"attempt {number} was admitted"
    # Of a gang that has run, or has ended, pods that are gone don't come again.
    is_past = observation.first_seen.over or observation.job.is_true(C.RUNNING)
    if observation.is_gang_bound or not is_past:
        yield _scheduled_condition(observation, decision)
    if decision.reason == Reason.RESTART_BACKOFF:
        yield C.RUNNING, False, decision.reason, decision.message
        yield C.DEGRADED, True, decision.reason, decision.message
    else:
        yield from _running(observation, decision)


def _current_conditions(observation: Observation) -> Iterator[Statement]:
    for condition in observation.job.status.conditions:
        if condition.type in _TYPES:
            is_true = _IS_TRUE[condition.status]
            yield C(condition.type), is_true, condition.reason, condition.message


def _scheduled_condition(observation: Observation, decision: Decision) -> Statement:
    job = observation.job
    if observation.is_gang_bound:
        nodes = job.nodes
        replicas = observation.replicas
        engines = f" and {replicas} of {replicas} engines" if replicas else ""
        message = f"{nodes} of {nodes} pods{engines} have a node"
        return C.SCHEDULED, True, Reason.ALL_PODS_BOUND, message
    if decision.reason in UNCREATED:
        return C.SCHEDULED, False, decision.reason, decision.message
    if why := unschedulable(observation):
        bound_pods = count_bound(observation)
        return C.SCHEDULED, False, Reason.UNSCHEDULABLE, f"{bound_pods} have a node: {why}"
    message = _being_created(job.name, job.status.attempt)
    return C.SCHEDULED, False, Reason.PODS_PENDING, message


def _being_created(job: str, number: int) -> str:
    child = child_job(job, number)
    return (
        f"the pods of attempt {number} are being created (`kubectl describe job {child}` says "
        "what keeps them)"
    )


def _running(observation: Observation, decision: Decision) -> Iterator[Statement]:
    job = observation.job
    number = job.status.attempt
    degraded = job.condition(C.DEGRADED)
    is_name_taken = decision.reason == Reason.NAME_TAKEN and observation.child is not None
    has_trouble = is_name_taken or decision.reason in _TROUBLES
    if observation.has_gang_started:
        replicas = observation.replicas
        engines = f" and {len(observation.engines_up)} of {replicas} engines" if replicas else ""
        message = f"attempt {number} runs with {job.nodes} pods{engines}"
        yield C.RUNNING, True, Reason.ALL_PODS_RUNNING, message
        # a new operator process has no answer of rank 0 yet either
        is_reported_by_rank0 = degraded is not None and degraded.reason in _REPORTED_BY_RANK_0
        awaits_rank0 = observation.pull is None and is_reported_by_rank0
        # A gang of which a pod has ended is not whole; what comes of it is decided in a moment.
        if not (has_trouble or awaits_rank0 or observation.first_seen.over):
            cause = running_cause(observation)
            reason, message = cause or (Reason.AS_EXPECTED, "the gang is whole")
            yield C.DEGRADED, cause is not None, reason, message
    else:
        yield from _starting(observation, has_trouble)
    if has_trouble:
        yield C.DEGRADED, True, decision.reason, decision.message


def _starting(observation: Observation, has_trouble: bool) -> Iterator[Statement]:
    """A gang that does not run yet. Until it does, Degraded keeps the end of the attempt before."""
    job = observation.job
    degraded = job.condition(C.DEGRADED)
    # A gang that has run doesn't start again: its end is judged next, by how long it ran.
    if not job.is_true(C.RUNNING):
        yield _not_running(observation)
    if degraded is None or has_trouble:
        return
    if degraded.reason in _START_TROUBLES:
        yield from _no_longer_degraded(observation, f"attempt {job.status.attempt} starts")
    else:
        yield C.DEGRADED, _IS_TRUE[degraded.status], degraded.reason, degraded.message


def _not_running(observation: Observation) -> Statement:
    """Why a gang that starts doesn't run yet: an earlier end, or an init container."""
    job = observation.job
    starts = f"attempt {job.status.attempt} starts"
    running = job.condition(C.RUNNING)
    reason: str = Reason.STARTING
    message = starts
    if running and running.status == "False":
        reason = running.reason
        if not running.message.startswith(f"{starts}: init container"):
            message = running.message
    pod = observation.initializing_pod
    if pod is None:
        return C.RUNNING, False, reason, message
    seconds_so_far = observation.initializing_seconds(pod)
    message = f"{starts}: {init_container_of(pod)} has run since "
    begin = observation.now - seconds_so_far
    return C.RUNNING, False, reason, message_since(running, message, begin)


_TROUBLES = (Reason.POD_WAITING, Reason.PROGRESS_UNKNOWN, Reason.INVALID_SPEC)
"""Reasons of a decision that make a gang Degraded."""
_START_TROUBLES = (Reason.POD_WAITING, Reason.NAME_TAKEN, Reason.INVALID_SPEC)
"""Reasons of Degraded that say no more than what keeps the gang from starting now."""
_REPORTED_BY_RANK_0 = (
    Reason.PROGRESS_UNKNOWN,
    Reason.CHECKPOINT_NOT_WRITTEN,
    Reason.RDMA_UNUSED,
    Reason.NETWORK_SLOW,
    *WAITS.values(),
)
"""Reasons of Degraded that only its answer, or its silence, can change."""


_STATEMENTS: dict[Action, Callable[[Observation, Decision], Iterator[Statement]]] = {
    Action.REJECT: _reject,
    Action.QUEUE: _queue,
    Action.COMMIT: _commit,
    Action.SUSPEND: _suspend,
    Action.RELEASE: _release,
    Action.SUCCEED: _succeed,
    Action.FAIL: _fail,
    Action.RETRY: _retry,
    Action.RESOLVE: _reject,
}
