"""Checks of a job that Kueue admits: its attempts run as long as their Workload is admitted.

An eviction is no failure: the gang ends, the job is queued again, and no restart is counted.
"""

from .decisions import Action, Decision, Limits
from .observe import Observation
from .reasons import Reason

UNKNOWN_PAUSE = 15.0
"""Seconds until it is looked again whether Kueue's objects can be seen."""


def evicted(seen: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """Release an attempt whose Workload isn't admitted any more. While that is not known, start none and end none."""
    job, workload = seen.job, seen.workload
    if not job.active or not job.queue_name:
        return None
    if seen.kueue_problem:
        message = f"not started while its Workload is not known: {seen.kueue_problem}"
        wait = Decision(Action.WAIT, Reason.FAILED_CREATE, message, look_again=UNKNOWN_PAUSE)
        return None if seen.child else wait
    if workload is None:
        return _taken_back("its Workload is gone")
    if workload.keeps:
        return None
    return _taken_back(f"Workload {workload.name}: {workload.lost or 'its Admitted condition is not True any more'}")


def _taken_back(why: str) -> Decision:
    return Decision(Action.RELEASE, Reason.EVICTED, f"Kueue has taken its admission back: {why}")
