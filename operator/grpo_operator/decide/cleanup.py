"""Finds Jobs and pods of attempts that must not run. The result depends only on observed state, so
a new operator repeats missed deletions."""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_api.status.status import ConditionType

from ..records.names import is_engines_job
from ..records.records import GRPOJobRecord, JobRecord, PodRecord
from .decisions import Limits
from .observation import Observation


@dataclass(frozen=True, slots=True)
class CleanUp:
    """Jobs to delete, by name, and attempts whose live pods are to be stopped, by number."""

    delete_jobs: tuple[str, ...] = ()
    stop_attempts: tuple[int, ...] = ()
    stop_engines: tuple[int, ...] = ()
    """Attempts with live engine pods that no Job has any more."""
    stop_orphans: bool = False
    """True if the running attempt has live pods that no Job of it controls."""


def clean_up(observation: Observation, limits: Limits) -> CleanUp:
    """What to delete or stop so that only the current attempt and the last logs remain."""
    pods = _pods_to_end(observation, limits)
    return CleanUp(
        delete_jobs=tuple(_jobs_to_delete(observation)),
        stop_attempts=_attempts_to_stop(pods),
        stop_engines=_attempts_with_orphaned_engines(observation, pods),
        # Without its Job the attempt ends, and its orphans are the next one's to end.
        stop_orphans=observation.child is not None and bool(observation.orphans),
    )


def _jobs_to_delete(observation: Observation) -> Iterator[str]:
    """Yield the names of Jobs that run no current attempt and keep no logs worth having."""
    job, current = observation.job, observation.child
    holds_nothing = _may_hold_nothing(job)
    for earlier in observation.earlier_jobs:
        if holds_nothing or not _keeps_last_logs(earlier, observation):
            yield earlier.name
    # Engines never exit by themselves: their Job is deleted as soon as a training pod of their
    # attempt has ended.
    if observation.engines and (observation.first_seen.over or not job.is_active):
        yield observation.engines.name
    if current and not job.is_active and not job.is_finished:
        has_logs = bool(observation.terminations or current.ended)
        if holds_nothing or not has_logs:
            yield current.name


_ENDED_TOO = ("count/jobs.batch", "count/pods")
"""What of a ResourceQuota Jobs and pods take also after their end."""


def _may_hold_nothing(job: GRPOJobRecord) -> bool:
    """True if no Job may stay, even for logs.

    Kueue has revoked or not given admission, or the next attempt waits for what the last one takes
    of a quota, which nobody else would ever delete.
    """
    if job.queue_name and not job.is_active and not job.is_finished:
        return True
    stated = filter(None, map(job.condition, (ConditionType.ADMITTED, ConditionType.SCHEDULED)))
    refusals = [condition.message for condition in stated if condition.status == "False"]
    # The API server's refusal has no field for what a quota counts.
    return any(resource in refusal for resource in _ENDED_TOO for refusal in refusals)


def _keeps_last_logs(earlier: JobRecord, observation: Observation) -> bool:
    """True for the gang's Job of the attempt before, unless it was made again later."""
    if earlier.attempt != observation.job.status.attempt - 1 or is_engines_job(earlier.name):
        return False
    # An operator that led once, and didn't know yet that it leads no more, may have made it again:
    # that Job has no logs worth keeping.
    made_again = observation.child is not None and earlier.created > observation.child.created
    return not made_again


def _pods_to_end(observation: Observation, limits: Limits) -> list[PodRecord]:
    """The pods of attempts that are not to run, the current one's if the job is not active."""
    pods = list(observation.earlier_pods)
    job = observation.job
    # Peers of a rank 0 that is done get a moment to end by themselves.
    has_just_succeeded = (
        job.is_true(ConditionType.SUCCEEDED)
        and observation.since(ConditionType.SUCCEEDED) < limits.survivor_grace_seconds
    )
    may_end_alone = has_just_succeeded and not job.deleting
    if not job.is_active and not may_end_alone:
        pods += observation.pods
    return pods


def _attempts_to_stop(pods: list[PodRecord]) -> tuple[int, ...]:
    """Return the attempts whose live training pods no controller ends."""
    live: set[tuple[int, str]] = set()
    failing: set[tuple[int, str]] = set()
    for pod in pods:
        if pod.engine:
            continue
        if pod.is_live:
            live.add((pod.attempt, pod.controller_uid))
        # The Job controller itself ends the survivors of a Job with a failed pod, a second later. A
        # pod whose container has just ended is not Failed yet for a moment, and deleting it then
        # would take its logs. No controller ends the survivors of a Job that was deleted without
        # its pods.
        if pod.controller_uid and _has_failed(pod):
            failing.add((pod.attempt, pod.controller_uid))
    return tuple(sorted({attempt for attempt, _ in live - failing}))


def _has_failed(pod: PodRecord) -> bool:
    """True if the pod has failed, or its container has and its phase is not set yet."""
    if pod.phase == "Failed":
        return True
    if pod.others_run:
        return False
    return pod.termination is not None and bool(pod.termination.exit_code)


def _attempts_with_orphaned_engines(
    observation: Observation, pods: list[PodRecord]
) -> tuple[int, ...]:
    """Return the attempts with live engine pods that no Job makes again or will end: theirs is
    gone, or is deleted and kept by somebody's finalizer."""
    known_jobs = (*observation.earlier_jobs, observation.engines)
    makers = {job.uid for job in known_jobs if job}
    engines = (pod for pod in pods if pod.engine and pod.is_live)
    return tuple(sorted({pod.attempt for pod in engines if pod.controller_uid not in makers}))
