"""What is left over of attempts that are not to run, and must end.

It follows from the state of the world alone, whatever was decided: so an operator that died between a decision and its
deletions makes up for it.
"""

from dataclasses import dataclass

from grpo_api.status import ConditionType

from .decisions import Limits
from .names import runs_engines
from .observe import Observation


@dataclass(frozen=True, slots=True)
class CleanUp:
    """What is left over of attempts that are not to run: Jobs to delete, attempts whose live pods are to end."""

    delete_jobs: tuple[str, ...] = ()
    stop_attempts: tuple[int, ...] = ()
    stop_engines: tuple[int, ...] = ()
    """Attempts with live engine pods that no Job has any more."""


def clean_up(seen: Observation, limits: Limits) -> CleanUp:
    """Keeps the current attempt, and the last failed one for its logs; ends everything else of this GRPOJob.

    The Job controller itself ends the survivors of a Job with a failed pod, a second later, so those are left to it:
    a pod whose container has just ended is not Failed yet for a moment, and deleting it then would take its logs.
    Nobody ends those of a Job that was deleted without its pods. Engines never end by themselves: their Job goes as
    soon as a training pod of their attempt has ended.

    An earlier attempt's Job that is younger than the current one's has no logs worth keeping: an operator that led
    once, and didn't know yet that it leads no more, has made it again.
    """
    job = seen.job
    earlier = [(child.name, job.status.attempt - child.attempt) for child in seen.earlier_jobs]
    again = {child.name for child in seen.earlier_jobs if seen.child and child.created > seen.child.created}
    # what Kueue has taken back or not given yet holds nothing, not even for its logs
    bare = bool(job.queue_name) and not job.active and not job.finished
    jobs = [name for name, before in earlier if before > 1 or runs_engines(name) or name in again or bare]
    if seen.engines and (seen.sighting.over or not job.active):
        jobs.append(seen.engines.name)
    if not job.active and not job.finished and seen.child and (bare or not (seen.terminations or seen.child.ended)):
        jobs.append(seen.child.name)
    done = job.is_true(ConditionType.SUCCEEDED) and seen.since(ConditionType.SUCCEEDED) < limits.survivors
    pods = [*seen.earlier_pods, *(() if job.active or done else seen.pods)]
    orphans = {pod.attempt for pod in pods if pod.engine and pod.live and not pod.controller_uid}
    pods = [pod for pod in pods if not pod.engine]
    ended = [pod for pod in pods if pod.phase == "Failed" or (pod.termination and pod.termination.exit_code)]
    failing = {pod.attempt for pod in ended if pod.controller_uid}
    stop = {pod.attempt for pod in pods if pod.live} - failing
    return CleanUp(tuple(jobs), tuple(sorted(stop)), tuple(sorted(orphans)))
