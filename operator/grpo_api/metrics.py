"""Every metric that the operator exports, declared once: name, kind, unit, help and labels.

The exporter, the dashboard, the alert rules and docs/metrics.md can't disagree that way. The trainer's are in
training_metrics.py.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]
STEP_PHASE = "step_phase"
"""Label for the phases of a step (report.STEP_PHASES), `load` among them for memory; `phase` is the job's."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family."""

    name: str
    """Name in Prometheus."""
    kind: Kind
    """Type in Prometheus."""
    unit: str
    """Unit in words; `1` for ratios and counts."""
    help: str
    """A sentence on what it measures."""
    labels: tuple[str, ...] = ()
    """Label names, bounded in their values."""
    _: KW_ONLY
    key: str = ""
    """Key in Progress.metrics, with a label as `key/value`; empty for metrics that are not in it."""
    trl: str = ""
    """Key in TRL's logs that it is read from; empty for our own."""


_JOB = ("namespace", "grpojob")
JOB_INFO = Metric(
    "grpo_job_info", "gauge", "1", "One per GRPOJob, with its plan as labels.", (*_JOB, "model", "strategy", "gpus")
)
JOB_CONDITION = Metric(
    "grpo_job_condition",
    "gauge",
    "1",
    "1 while the condition is True, absent otherwise; without those that the phase tells.",
    (*_JOB, "type"),
)
JOB_PHASE = Metric("grpo_job_phase", "gauge", "1", "1 for the job's phase; the others are absent.", (*_JOB, "phase"))
JOBS = Metric("grpo_jobs", "gauge", "1", "GRPOJobs by phase, those that have ended among them.", ("namespace", "phase"))
JOB_STEP = Metric("grpo_job_step", "gauge", "steps", "Finished steps as last seen by the operator.", _JOB)
JOB_ATTEMPTS = Metric("grpo_job_attempts", "gauge", "1", "Gang starts so far.", _JOB)
JOB_MEMORY_PREDICTED = Metric(
    "grpo_job_memory_predicted_bytes", "gauge", "bytes", "Peak of allocated memory of one GPU by phase, as planned.",
    (*_JOB, STEP_PHASE),
)  # fmt: skip
JOB_MEMORY_MEASURED = Metric(
    "grpo_job_memory_measured_bytes", "gauge", "bytes", "Peak of allocated memory of any GPU by phase, as measured.",
    (*_JOB, STEP_PHASE),
)  # fmt: skip
JOB_MEMORY_RATIO = Metric(
    "grpo_job_memory_prediction_ratio", "gauge", "1", "Predicted over measured peak of allocated memory.", _JOB
)
JOB_RESTARTS = Metric("grpo_job_restarts", "gauge", "1", "Restarts that count against the limit.", _JOB)
RECONCILES = Metric(
    "grpo_operator_reconcile_total", "counter", "1", "Reconciles by result (success, error, requeue).", ("result",)
)
RECONCILE_SECONDS = Metric(
    "grpo_operator_reconcile_seconds", "histogram", "seconds", "Duration of a reconcile, API calls included."
)
API_REQUESTS = Metric(
    "grpo_operator_api_requests_total", "counter", "1", "Requests to the API server.", ("verb", "resource", "code")
)
QUEUE_DEPTH = Metric("grpo_operator_queue_depth", "gauge", "1", "Jobs waiting for a reconcile.")
QUEUE_SECONDS = Metric(
    "grpo_operator_queue_seconds", "histogram", "seconds", "Time from an event to the start of its reconcile."
)
PROGRESS_PULLS = Metric(
    "grpo_operator_progress_pulls_total", "counter", "1", "Pulls of /progress by result (success, error).", ("result",)
)
EVENTS = Metric(
    "grpo_operator_events_total",
    "counter",
    "1",
    "Events on GRPOJobs by what became of them (sent, refused, dropped).",
    ("result",),
)
LOOP_LAG = Metric(
    "grpo_operator_event_loop_lag_seconds",
    "histogram",
    "seconds",
    "By how much a timer of the operator's event loop was late.",
)
UNREADABLE_OBJECTS = Metric(
    "grpo_operator_unreadable_objects",
    "gauge",
    "1",
    "Objects that this version of the operator can't read and leaves alone.",
    ("resource",),
)
JOB = (
    JOB_INFO,
    JOB_CONDITION,
    JOB_PHASE,
    JOB_STEP,
    JOB_ATTEMPTS,
    JOB_RESTARTS,
    JOB_MEMORY_PREDICTED,
    JOB_MEMORY_MEASURED,
    JOB_MEMORY_RATIO,
)
"""What the operator exports of each GRPOJob that has not ended."""
ENDED_SECONDS, ENDED_JOBS = 3600.0, 300
"""A job that has ended has series of its own for so long, and only while it is one of so many newest."""
OPERATOR = (
    JOBS,
    *JOB,
    RECONCILES,
    RECONCILE_SECONDS,
    API_REQUESTS,
    QUEUE_DEPTH,
    QUEUE_SECONDS,
    PROGRESS_PULLS,
    EVENTS,
    LOOP_LAG,
    UNREADABLE_OBJECTS,
)
"""Everything that the operator exports."""
