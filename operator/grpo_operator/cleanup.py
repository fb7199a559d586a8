"""What is left over of attempts that are not to run, and must end.

Exists apart from the policies because it holds whatever was decided: it follows from the state of the world alone, so
an operator that died between a decision and its deletions makes up for it. Pure; called by reconcile after each look.
"""

from dataclasses import dataclass

from grpo_api.status import ConditionType

from .observe import Observation
from .policies import Limits


@dataclass(frozen=True, slots=True)
class CleanUp:
    """What is left over of attempts that are not to run: Jobs to delete, attempts whose live pods are to end."""

    delete_jobs: tuple[str, ...] = ()
    stop_attempts: tuple[int, ...] = ()


def clean_up(seen: Observation, limits: Limits) -> CleanUp:
    """Keeps the current attempt, and the last failed one for its logs; ends everything else of this GRPOJob.

    The Job controller itself ends the survivors of a Job with a failed pod, a second later, so those are left to it.
    """
    job = seen.job
    jobs = [child.name for child in seen.earlier_jobs if child.attempt < job.status.attempt - 1]
    if not job.active and not job.finished and seen.child and not seen.ends and not seen.child.ended:
        jobs.append(seen.child.name)
    stop = {pod.attempt for pod in seen.earlier_pods if pod.live and not _ends_by_itself(pod.attempt, seen)}
    done = job.holds(ConditionType.SUCCEEDED) and seen.since(ConditionType.SUCCEEDED) < limits.survivors
    if not job.active and not done and any(pod.live for pod in seen.pods):
        stop.add(job.status.attempt)
    return CleanUp(tuple(jobs), tuple(sorted(stop)))


def _ends_by_itself(attempt: int, seen: Observation) -> bool:
    return any(pod.attempt == attempt and pod.end and not pod.end.succeeded for pod in seen.earlier_pods)
