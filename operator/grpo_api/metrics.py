"""Every metric that the project exports, declared once: name, kind, unit, help and labels.

The exporters, the dashboard, the alert rules and docs/metrics.md can't disagree that way. The trainer exports TRAINING
and REWARD on rank 0, the operator exports OPERATOR.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from .report import MAX_METRICS

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


def _training(key: str, trl: str, unit: str, text: str, kind: Kind = "gauge") -> Metric:
    return Metric(f"grpo_training_{key}", kind, unit, text, key=key, trl=trl)


ALLREDUCE = _training(
    "allreduce_bytes_per_second",
    "",
    "bytes per second",
    "Bus bandwidth of an all-reduce of all ranks before the first step.",
)
PROMPTS = _training("prompts", "", "prompts", "Prompts that are trained on.")
PROMPTS_DROPPED = _training("prompts_dropped", "", "prompts", "Prompts left out because they are too long.")
PROMPTS_DUPLICATE = _training(
    "prompts_duplicate",
    "",
    "prompts",
    "Prompts that occurred before, kept or left out as dataset.onDuplicatePrompt says.",
)
CHECKPOINT_STEP = _training(
    "checkpoint_step", "", "steps", "Step of the newest complete checkpoint, which a restart goes back to."
)
TRAINING = (
    _training("kl", "kl", "nats per token", "Mean KL between policy and reference (k3 estimate) of the last step."),
    _training("reward", "reward", "1", "Mean weighted reward of the last generation."),
    _training("reward_std", "reward_std", "1", "Mean standard deviation of rewards within a group."),
    _training("loss", "loss", "1", "GRPO loss of the last step."),
    _training("grad_norm", "grad_norm", "1", "Norm of the gradient before clipping."),
    _training("learning_rate", "learning_rate", "1", "Learning rate of the last step."),
    _training("entropy", "entropy", "nats", "Mean entropy of the policy's token distribution."),
    _training("epoch", "epoch", "1", "Passes over the dataset."),
    _training("clip_ratio_low", "clip_ratio/low_mean", "1", "Share of tokens clipped below."),
    _training("clip_ratio_high", "clip_ratio/high_mean", "1", "Share of tokens clipped above."),
    _training("completion_length", "completions/mean_length", "tokens", "Mean length of completions."),
    _training("completion_length_max", "completions/max_length", "tokens", "Longest completion."),
    _training("completion_clipped_ratio", "completions/clipped_ratio", "1", "Share of completions cut at the limit."),
    _training("zero_variance_groups", "frac_reward_zero_std", "1", "Share of groups whose rewards are all equal."),
    _training(
        "kl_overflow_tokens",
        "kl_overflow_tokens",
        "tokens",
        "Tokens per micro-batch whose KL overflowed and was limited.",
    ),
    _training("tokens", "num_tokens", "tokens", "Tokens processed so far by all ranks."),
    _training("completion_length_min", "completions/min_length", "tokens", "Shortest completion."),
    _training("tokens_per_second", "", "tokens per second", "Tokens of the last step by all ranks per second."),
    _training("straggler_ratio", "", "1", "Slowest rank's own work in the last step over the mean of all ranks."),
    PROMPTS,
    PROMPTS_DROPPED,
    PROMPTS_DUPLICATE,
    _training("step_seconds", "step_time", "seconds", "Duration of the last step."),
    ALLREDUCE,
    CHECKPOINT_STEP,
    _training("checkpoint_seconds", "", "seconds", "How long training stood still for that checkpoint."),
    _training("checkpoint_failures", "", "1", "Checkpoints in a row that could not be written, until one could."),
)
"""One value per step, set from TRL's logs; absent until logged. The most telling stand first."""
OUTCOME_KEYS = tuple(metric.key for metric in TRAINING[:MAX_METRICS])
"""Keys of those that an Outcome carries, which is short."""

STEP = Metric("grpo_training_step", "gauge", "steps", "Finished optimizer steps.")
TOTAL_STEPS = Metric("grpo_training_total_steps", "gauge", "steps", "Optimizer steps of the whole run.")
ATTEMPT = Metric("grpo_training_attempt", "gauge", "1", "The attempt that this process belongs to.")
LAST_STEP_TIME = Metric(
    "grpo_training_last_step_timestamp_seconds", "gauge", "unix seconds", "When the last optimizer step finished."
)
REWARD = Metric(
    "grpo_training_reward_by_function",
    "gauge",
    "1",
    "Mean of one reward function before weighting.",
    ("reward",),
    key="reward_by_function",
)
MEMORY = Metric(
    "grpo_training_memory_bytes",
    "gauge",
    "bytes",
    "Peak of allocated GPU memory of any rank by phase; and reserved, device and host.",
    (STEP_PHASE,),
)
PHASE_SECONDS = Metric(
    "grpo_training_phase_seconds",
    "gauge",
    "seconds",
    "Time of the last step by part of it, slowest rank.",
    (STEP_PHASE,),
    key="phase_seconds",
)
REWARD_FAILURES = Metric(
    "grpo_training_reward_failures_total",
    "counter",
    "1",
    "Completions of this attempt that got no reward because its function or service failed.",
    ("reward",),
    key="reward_failures",
)
REWARD_TIMEOUTS = Metric(
    "grpo_training_reward_timeouts_total",
    "counter",
    "1",
    "Completions of this attempt that got no reward because its time was up.",
    ("reward",),
    key="reward_timeouts",
)
LABELLED = (REWARD, PHASE_SECONDS, REWARD_FAILURES, REWARD_TIMEOUTS)
"""Families whose values stand in Progress.metrics as `key/label`."""
TRAINER = (*TRAINING, STEP, TOTAL_STEPS, ATTEMPT, LAST_STEP_TIME, *LABELLED, MEMORY)
"""Everything that rank 0 of a training pod exports."""

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
