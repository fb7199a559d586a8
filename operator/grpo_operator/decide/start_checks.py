"""Checks admitted attempts that do not start: missing pods, missing nodes and containers that fail
to start.

A gang that does not run completely must not keep its GPUs. So each check has a deadline, after
which the whole gang is released. Attempts that Kueue admits wait for their nodes as long as Kueue
lets them.

The module also describes what became of an attempt's engines, and which of their pods to show. A
lost engine ends nothing: the Job controller creates it again by its index while training goes on.
Only before the gang runs are engines needed as training pods are.

Of the events about a Job or pod, current_warning chooses the one that still speaks of its state. An
event stays for an hour, whatever follows. A component warns until it gets on, and then says so in
an event of its own: its newest one counts. Events are ordered by resourceVersion, since the clocks
of two components differ. Anybody may write events: only those count whose component takes the next
step. A scheduler or an autoscaler spoke of the time before the pod had its node, and a policy
engine reports what it lets pass, too.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from grpo_api.spec.run_policy import PlacementSpec
from grpo_api.status.status import MAX_ENDS, ConditionType
from grpo_kube.objects.json_reader import JsonObject

from ..records.reasons import UNCREATED, Reason
from ..records.records import ENDED_PHASES, PodRecord
from .decisions import Action, Decision, Limits, RequeueAfter
from .observation import Observation
from .preflight import silent_scheduler_message, suspended_message
from .restarts import releases_in_a_row

_STARTERS = ("job-controller", "kubelet", "attachdetach-controller")
"""Components that take a Job, or a pod with a node, to its next step, and say so."""


class StartEvent(NamedTuple):
    """The fields of an Event that are read."""

    version: int
    """Its resourceVersion, which each repetition raises."""
    writer: tuple[str, str]
    """The component that wrote it, and the instance."""
    is_warning: bool
    text: str
    """`reason: message`."""


def start_event(item: object) -> StartEvent | None:
    """Parse an Event of the API server; return None for one that can't be parsed."""
    try:
        event = JsonObject(item)
        source = event.part("source")
        component = source.text("component") or event.text("reportingComponent")
        instance = source.text("host") or event.text("reportingInstance")
        return StartEvent(
            version=event.part("metadata").digits("resourceVersion"),
            writer=(component, instance),
            is_warning=event.text("type") == "Warning",
            text=event.reason_and_message(),
        )
    except ValueError:
        return None


def current_warning(events: Iterable[StartEvent]) -> str:
    """The newest warning that its writer has not followed by another event; empty without one."""
    newest = {event.writer: event for event in sorted(events)}
    warnings = [
        event for event in newest.values() if event.is_warning and event.writer[0] in _STARTERS
    ]
    return max(warnings).text if warnings else ""


def asks_about(observation: Observation, limits: Limits) -> str:
    """uid of the Job or pod whose events may explain a slow start; empty if too early."""
    if observation.preflight and observation.preflight.is_needed:
        return observation.preflight.asks_about
    child = observation.child
    created_at = observation.first_seen.child
    if child is None or created_at is None or observation.has_gang_started:
        return ""
    waited = observation.at - created_at
    if len(observation.pods) < observation.job.nodes:
        return child.uid if waited >= limits.pods_missing_seconds else ""
    engines = observation.engines
    if engines and len(_engines_with_pods(observation)) < observation.replicas:
        return engines.uid if waited >= limits.pods_missing_seconds else ""
    if not observation.is_gang_bound or waited < limits.start_warning_seconds:
        return ""
    pending = _pending_pod(observation)
    return pending.uid if pending else ""


def _pending_pod(observation: Observation) -> PodRecord | None:
    """The first pod that has not started; one whose init container runs gets on."""
    for pod in (*observation.pods, *observation.engine_pods):
        if pod.phase == "Pending" and not pod.init_container:
            return pod
    return None


def pods_missing(observation: Observation, limits: Limits) -> Decision | RequeueAfter | None:
    """Release a gang whose pods the API server refuses to create, or whose Job somebody suspends.

    Only a refusal in words counts: in a burst the Job controller may just be busy.
    """
    maker = observation.child
    if maker is None or observation.has_gang_run:
        return None
    what = "pods"
    created = len(observation.pods)
    wanted = observation.job.nodes
    if created >= wanted and observation.engines:
        maker = observation.engines
        what = "engines"
        created = len(_engines_with_pods(observation))
        wanted = observation.replicas
    if created >= wanted:
        return None
    until_asked = _until_asked(observation, limits.pods_missing_seconds)
    why = observation.start_warning
    # Kueue suspends Jobs without a queue name where manageJobsWithoutQueueName is set.
    if maker.suspended and _seconds_since_creation(observation) >= limits.pods_missing_seconds:
        why = suspended_message(maker)
    # What its predecessor still takes of a quota is free in a moment, but for a pod of a lost node.
    may_be_free_soon = observation.admitted_seconds < limits.scheduling_timeout_seconds and any(
        pod.phase not in ENDED_PHASES for pod in observation.earlier_pods
    )
    if why and not may_be_free_soon:
        message = f"{created} of {wanted} {what} were created: {why}"
        return Decision(Action.RELEASE, Reason.PODS_NOT_CREATED, message)
    return RequeueAfter(until_asked)


def _engines_with_pods(observation: Observation) -> set[int]:
    """Indices of the engines that have a pod, or had one."""
    return {pod.index for pod in observation.engine_pods}


def _until_asked(observation: Observation, first: float) -> float:
    """Seconds until events are read again: `first`, then doubling."""
    waited = _seconds_since_creation(observation)
    return first - waited if waited < first else waited


def _seconds_since_creation(observation: Observation) -> float:
    """Seconds since the gang's Job was first seen."""
    return observation.at - (observation.first_seen.child or observation.at)


def never_bound(observation: Observation, limits: Limits) -> Decision | RequeueAfter | None:
    """Release a gang that was not bound whole in time."""
    if observation.is_gang_bound or observation.has_gang_run or observation.queue_name:
        return None
    job = observation.job
    timeout = limits.scheduling_timeout_seconds
    if job.spec is None:
        # It may be one that creates its pods.
        timeout = max(timeout, float(PlacementSpec().provisioning_timeout_seconds))
    elif job.should_create_pods:
        timeout = float(job.spec.placement.provisioning_timeout_seconds)
    seconds_left = timeout - _seconds_to_bind(observation)
    if seconds_left > 0:
        return RequeueAfter(seconds_left)
    why = unschedulable(observation) or _silent_scheduler(observation)
    bound_pods = count_bound(observation)
    message = f"{bound_pods} were bound within {timeout:.0f} s: {why}"
    return Decision(Action.RELEASE, Reason.SCHEDULING_TIMEOUT, message)


def _seconds_to_bind(observation: Observation) -> float:
    """How long the gang has waited for its nodes."""
    created_at = observation.first_seen.child
    if created_at is None or observation.job.may_hold_place:
        return observation.admitted_seconds
    # not_started lets it be created late.
    return min(observation.admitted_seconds, observation.at - created_at)


def unschedulable(observation: Observation) -> str:
    """The scheduler's message for the first pod that it can't place; empty without one."""
    for pod in (*observation.pods, *observation.engine_pods):
        if pod.unschedulable:
            return pod.unschedulable
    return ""


def _silent_scheduler(observation: Observation) -> str:
    """Why pods have no node that no scheduler gives a reason for."""
    for pod in (*observation.pods, *observation.engine_pods):
        if not pod.node:
            return silent_scheduler_message(pod, observation.job)
    return "no node took them in time"


def count_bound(observation: Observation) -> str:
    """`2 of 2 pods`, and with engines of their own `2 of 2 pods and 1 of 2 engines`."""
    bound = sum(bool(pod.node) for pod in observation.pods)
    pods = f"{bound} of {observation.job.nodes} pods"
    if not observation.replicas:
        return pods
    bound_engines = len(observation.engines_bound)
    return f"{pods} and {bound_engines} of {observation.replicas} engines"


def engines_not_started(observation: Observation, limits: Limits) -> Decision | None:
    """Engines without a Job: they follow as soon as the training pods have their nodes, so that the
    scheduler gives these to whom admission gave them; where Kueue gives both roles their places, at
    once. Release a gang whose engines could not be created in time."""
    job = observation.job
    if not _lacks_engines(observation) or observation.has_gang_run:
        return None
    if not (observation.is_training_bound or job.should_create_pods or observation.queue_name):
        return None
    scheduled = job.condition(ConditionType.SCHEDULED)
    may_wait = observation.admitted_seconds < limits.scheduling_timeout_seconds
    # Kueue lets a gang wait for its nodes for long, and its engines may have been deleted since.
    if may_wait or scheduled is None or scheduled.reason not in UNCREATED:
        return Decision(Action.START)
    return _release_uncreated(limits, scheduled.message)


def engines_gone(observation: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """Make the Job of engines again that is gone while the gang trains.

    Whatever ends the gang comes before: the Job may not be creatable for long.
    """
    # Before the gang has run, engines_not_started says when they may follow it.
    are_gone = _lacks_engines(observation) and observation.has_gang_run
    return Decision(Action.START) if are_gone else None


def _lacks_engines(observation: Observation) -> bool:
    """True if the attempt goes on and has no Job of the engines that its plan has."""
    if observation.child is None or observation.job.spec is None:
        return False
    has_all_jobs = not observation.replicas or observation.engines is not None
    return not has_all_jobs and not observation.first_seen.over


def not_started(observation: Observation, limits: Limits) -> Decision | None:
    """Start an attempt that has no Job yet, and release it after the time that a gang may wait for
    nodes.

    Until then its place is reserved, and no longer (loop/cluster_state.py counts so, too): whatever
    kept it from being started, it doesn't start after that. The next attempt's Job has another
    name.
    """
    if observation.child is not None:
        return None
    scheduled = observation.job.condition(ConditionType.SCHEDULED)
    reason = scheduled.reason if scheduled else ""
    may_wait = observation.admitted_seconds < limits.scheduling_timeout_seconds
    # One that waits for the API server alone may be created at any time.
    is_in_nobodys_way = reason == Reason.FAILED_CREATE and not observation.job.may_hold_place
    if may_wait or is_in_nobodys_way:
        return Decision(Action.START)
    why = "its Job could not be created"
    if scheduled and reason in UNCREATED:
        why = scheduled.message
    return _release_uncreated(limits, why)


def _release_uncreated(limits: Limits, why: str) -> Decision:
    message = f"not started in {limits.scheduling_timeout_seconds:.0f} s: {why}"
    return Decision(Action.RELEASE, Reason.SCHEDULING_TIMEOUT, message)


def never_started(observation: Observation, limits: Limits) -> Decision | RequeueAfter | None:
    """Report why a gang with nodes doesn't run; release it after `startTimeoutSeconds`."""
    if not observation.is_gang_bound or observation.has_gang_started or observation.has_gang_run:
        return None
    job = observation.job
    timeout = job.start_timeout
    waited = 0.0
    if job.is_true(ConditionType.SCHEDULED):
        waited = observation.since(ConditionType.SCHEDULED)
    why = _kubelets_words(observation)
    if waited < timeout:
        until_news = _until_asked(observation, limits.start_warning_seconds)
        requeue_after = min(timeout - waited, until_news)
        if not why:
            return RequeueAfter(requeue_after)
        return Decision(Action.WAIT, Reason.POD_WAITING, why, requeue_after=requeue_after)
    what = f"{job.nodes} pods"
    if observation.has_training_started:
        what = f"{observation.replicas} engines"
    message = f"not all of {what} ran within {timeout:.0f} s (spec.restarts.startTimeoutSeconds)"
    initializing = observation.initializing_pod
    if initializing and not why:
        seconds_so_far = observation.initializing_seconds(initializing)
        why = f"{init_container_of(initializing)} has run for {seconds_so_far:.0f} s"
    if why:
        message += f": {why}"
    before = releases_in_a_row(job.status.ends, frozenset({Reason.START_TIMEOUT}))
    # The status keeps no more ends than that.
    most = min(job.restart_limit, MAX_ENDS)
    if job.spec and before >= most:
        message += f"; for the {before + 1}. time in a row"
        return Decision(Action.FAIL, Reason.START_TIMEOUT, message)
    return Decision(Action.RELEASE, Reason.START_TIMEOUT, message)


def _kubelets_words(observation: Observation) -> str:
    """Which pod doesn't start and why, by its container's state or else by an event."""
    pods = (*observation.pods, *observation.engine_pods)
    for pod in pods:
        if pod.is_stuck:
            return f"pod {pod.name} waits: {pod.waiting}"
    if ends := engine_ends(observation):
        return ends
    pending = _pending_pod(observation)
    if pending is None or not observation.start_warning:
        return ""
    return f"pod {pending.name} waits on node {pending.node}: {observation.start_warning}"


def init_container_of(pod: PodRecord) -> str:
    """`init container fetch of pod run-1-0-abcde`."""
    return f"init container {pod.init_container} of pod {pod.name}"


MOST_ENDS = 3
"""Engines whose ends a message names at most."""
_SPAN = re.compile(r"([0-9]{1,3})(?:-([0-9]{1,3}))?")
"""Of engines there are at most 512 (EngineServersSpec.replicas)."""


def lost_engines(observation: Observation) -> str:
    """Return which engines of a running gang don't run, as a sentence; empty if all do."""
    up = len(observation.engines_up)
    if up >= observation.replicas:
        return ""
    causes = (engine_ends(observation), _engine_waits(observation))
    why = "; ".join(filter(None, causes))
    reason = f": {why}" if why else ""
    outlook = _lost_engines_outlook(observation)
    return f"{up} of {observation.replicas} engines run{reason}; {outlook}"


def _lost_engines_outlook(observation: Observation) -> str:
    """What becomes of engines that don't run, as a part of a sentence."""
    goes_on = "training goes on with those that are proven to have its weights"
    spent: list[int] = []
    job_has_ended = False
    if observation.engines:
        spent = sorted(_index_numbers(observation.engines.spent) - observation.engines_up)
        job_has_ended = bool(observation.engines.ended)
    if job_has_ended or len(spent) >= observation.replicas:
        return (
            "all have used up their retries, so none comes back in this attempt: it ends when "
            "training has waited for "
            "one as long as guard.weightSyncTimeoutSeconds allows, and the next has new engines"
        )
    if not spent:
        return f"the others are made again by their index, and {goes_on}"
    numbers = ", ".join(map(str, spent[:MOST_ENDS]))
    if len(spent) > MOST_ENDS:
        numbers += ", …"
    return f"this attempt does without engine {numbers}, which used up all retries; {goes_on}"


def _index_numbers(spans: str) -> set[int]:
    """Return the numbers of `1,3-5`; parts of another form are ignored."""
    numbers: set[int] = set()
    for part in spans.split(","):
        span = _SPAN.fullmatch(part)
        if span:
            first, last = int(span[1]), int(span[2] or span[1])
            numbers.update(range(first, last + 1))
    return numbers


def engine_ends(observation: Observation) -> str:
    """How engines that don't run ended, as `engine 1 ended with OOMKilled`; empty if none."""
    ended_pods = current_engine_pods(pod for pod in observation.engine_pods if pod.termination)
    ends = [_end(pod) for pod in ended_pods if pod.index not in observation.engines_up]
    return "; ".join(ends[:MOST_ENDS])


def _engine_waits(observation: Observation) -> str:
    """The first engine that waits, such as `engine 1 waits: ImagePullBackOff`; else empty."""
    for pod in current_engine_pods(observation.engine_pods):
        if why := pod.waiting or pod.unschedulable:
            return f"engine {pod.index} waits: {why}"
    return ""


def _end(pod: PodRecord) -> str:
    end = pod.termination
    if end is None:
        return ""
    # without a message of the container the kubelet's reason is the most precise: OOMKilled,
    # Evicted
    result = end.outcome.result
    how = result if end.reported else next(iter(end.reasons), result)
    exit_code = f", exit code {end.exit_code}" if end.exit_code else ""
    return f"engine {pod.index} ended with {how}{exit_code}"


def current_engine_pods(pods: Iterable[PodRecord]) -> list[PodRecord]:
    """One pod for each engine, by index: the one that lives, else the last that was bound."""
    newest = {pod.index: pod for pod in sorted(pods, key=_last_bound)}
    return [newest[index] for index in sorted(newest)]


def _last_bound(pod: PodRecord) -> tuple[bool, float, str]:
    """Sort key: pods that live come last, then those that were bound last."""
    return pod.is_live, pod.bound_at or 0.0, pod.name
