"""What a status write adds to the metrics of all jobs: times to a milestone, and the reason of a restart.

Only the process that wrote a status counts it, once the API server has accepted it. So a restarted operator counts
nothing twice; its counters begin at 0, which Prometheus recognises as a reset.
"""

from collections.abc import Iterator

from grpo_api.metrics import TIME_TO_ADMITTED, TIME_TO_FIRST_STEP, TIME_TO_RUNNING, TIME_TO_SCHEDULED, Metric
from grpo_api.status import ConditionType, GRPOJobStatus

from .records import GRPOJobRecord

_BY_CONDITION = {
    ConditionType.ADMITTED: TIME_TO_ADMITTED,
    ConditionType.SCHEDULED: TIME_TO_SCHEDULED,
    ConditionType.RUNNING: TIME_TO_RUNNING,
}


def milestones(job: GRPOJobRecord, new: GRPOJobStatus, now: float) -> Iterator[tuple[Metric, float]]:
    """The histograms that a write of the new status over the job's adds to, each with seconds since its creation.

    Only the first attempt has them, and only until it is interrupted: later ones began long after the job.
    """
    old = job.status
    if new.attempt != 1 or old.active_seconds:
        return
    since = max(0.0, now - job.created)  # the API server's clock may be ahead of ours
    for kind, metric in _BY_CONDITION.items():
        if new.is_true(kind) and not old.is_true(kind):
            yield metric, since
    if _has_stepped(new) and not _has_stepped(old):
        yield TIME_TO_FIRST_STEP, since


def restart_reason(job: GRPOJobRecord, new: GRPOJobStatus) -> str | None:
    """Return how the last attempt ended if the new status restarts the job; None if it doesn't."""
    old = job.status
    before = old.restarts + old.uncounted_restarts
    after = new.restarts + new.uncounted_restarts
    if after <= before or not new.ends:
        return None
    return new.ends[-1].reason


def _has_stepped(status: GRPOJobStatus) -> bool:
    return status.progress is not None and status.progress.last_step_time is not None
