"""What is left over of attempts that are not to run, and must end.

It follows from the state of the world alone, whatever was decided: so an operator that died between a decision and its
deletions makes up for it.
"""

from dataclasses import dataclass

from grpo_api.status import ConditionType

from .decisions import Limits
from .observe import Observation


@dataclass(frozen=True, slots=True)
class CleanUp:
    """What is left over of attempts that are not to run: Jobs to delete, attempts whose live pods are to end."""

    delete_jobs: tuple[str, ...] = ()
    stop_attempts: tuple[int, ...] = ()


def clean_up(seen: Observation, limits: Limits) -> CleanUp:
    """Keeps the current attempt, and the last failed one for its logs; ends everything else of this GRPOJob.

    The Job controller itself ends the survivors of a Job with a failed pod, a second later, so those are left to it:
    a pod whose container has just ended is not Failed yet for a moment, and deleting it then would take its logs.
    Nobody ends those of a Job that was deleted without its pods.
    """
    job = seen.job
    jobs = [child.name for child in seen.earlier_jobs if child.attempt < job.status.attempt - 1]
    if not job.active and not job.finished and seen.child and not seen.terminations and not seen.child.ended:
        jobs.append(seen.child.name)
    done = job.is_true(ConditionType.SUCCEEDED) and seen.since(ConditionType.SUCCEEDED) < limits.survivors
    pods = [*seen.earlier_pods, *(() if job.active or done else seen.pods)]
    ended = [pod for pod in pods if pod.phase == "Failed" or (pod.termination and pod.termination.exit_code)]
    failing = {pod.attempt for pod in ended if pod.controller_uid}
    stop = {pod.attempt for pod in pods if pod.live} - failing
    return CleanUp(tuple(jobs), tuple(sorted(stop)))
