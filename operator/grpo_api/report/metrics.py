"""Every metric that the operator exports, declared once: name, kind, unit, help and labels.

The exporter, the dashboards, the alert rules and docs/reference/metrics.md can't disagree that way.
The trainer's are in training_metrics.py. Of vLLM's 300 series in pods with an engine 60 are here;
their names, kinds and labels are those of vLLM 0.30 (vllm/v1/metrics/loggers.py).
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]
STEP_PHASE = "step_phase"
"""Label for the phases of a step (report.STEP_PHASES), `load` among them for memory; `phase` is the
job's."""


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
    """Key in Progress.metrics, with a label as `key/value`; empty for metrics that are not in
    it."""
    trl: str = ""
    """Key in TRL's logs that it is read from; empty for our own."""


OPERATOR: list[Metric] = []
"""Everything that the operator exports, beside prometheus_client's `process_*`.

What controller-runtime has, too, has the name that its dashboards know.
"""
VLLM: list[Metric] = []
"""What is exported of vLLM."""


def _exported(name: str, unit: str, text: str, *labels: str, kind: Kind = "gauge") -> Metric:
    metric = Metric(name, kind, unit, text, labels)
    OPERATOR.append(metric)
    return metric


def _job(name: str, unit: str, text: str, *labels: str, kind: Kind = "gauge") -> Metric:
    return _exported(f"grpo_job_{name}", unit, text, "namespace", "grpojob", *labels, kind=kind)


def _operator(name: str, unit: str, text: str, *labels: str, kind: Kind = "gauge") -> Metric:
    return _exported(f"grpo_operator_{name}", unit, text, *labels, kind=kind)


def _controller(name: str, unit: str, text: str, *labels: str, kind: Kind = "gauge") -> Metric:
    return _exported(f"controller_runtime_{name}", unit, text, "controller", *labels, kind=kind)


def _queue(name: str, unit: str, text: str, kind: Kind = "gauge") -> Metric:
    return _exported(f"workqueue_{name}", unit, text, "name", kind=kind)


JOBS = _exported(
    "grpo_jobs", "1", "GRPOJobs by phase, those that have ended among them.", "namespace", "phase"
)
JOBS_WAITING = _exported(
    "grpo_jobs_waiting", "1", "Jobs that wait to run, by status.reason.", "reason"
)
JOBS_LONGEST_WAIT = _exported(
    "grpo_jobs_longest_wait_seconds",
    "seconds",
    "For how long the job that waits longest has not run, by status.reason.",
    "reason",
)
JOBS_EXPECTED_WAIT = _exported(
    "grpo_jobs_expected_wait_seconds",
    "seconds",
    "How long jobs wait at most if the jobs that run end at their ETA and later ones take as "
    "long, by status.reason; 0 where nothing but the cluster is waited for.",
    "reason",
)
BY_REASON = (JOBS_WAITING, JOBS_LONGEST_WAIT, JOBS_EXPECTED_WAIT)
"""What the operator exports of the jobs that wait."""
JOB_INFO = _job("info", "1", "One per GRPOJob, with its plan as labels.", "model", "strategy")
JOB_GPUS = _job(
    "gpus", "1", "GPUs of the job's plan, by product; 0 on CPUs, absent after its end.", "product"
)
JOB_CONDITION = _job(
    "condition",
    "1",
    "1 while the condition is True, absent otherwise; without those that the phase or rank 0 "
    "tells.",
    "type",
    "reason",
)
JOB_PHASE = _job("phase", "1", "1 for the job's phase; the others are absent.", "phase")
JOB_STEP = _job("step", "steps", "Finished steps as last seen by the operator.")
JOB_ATTEMPTS = _job("attempts_total", "1", "Gang starts so far.", kind="counter")
JOB_RESTARTS = _job("restarts_total", "1", "Restarts that count against the limit.", kind="counter")
JOB_GPU_SECONDS = _job(
    "gpu_seconds",
    "GPU-seconds",
    "What the job's GPUs were held for so far, by state, to a second; a gauge, for what is lost is "
    "taken out of other states.",
    "state",
)
JOB_QUEUED_SECONDS = _job(
    "queued_seconds", "seconds", "Finished waits of the job for GPUs and before restarts."
)
JOB_COST = _job(
    "cost", "currency of the prices", "Cost of the GPUs so far; absent without a price."
)
JOB_PROGRESS_TIME = _job(
    "progress_timestamp_seconds",
    "unix seconds",
    "When the operator last saw the running job get on: a step in training, else bytes or a "
    "part of its stage's work.",
)
JOB_PATIENCE = _job(
    "patience_seconds",
    "seconds",
    "How long the running job's stage may go without getting on before its own watchdog ends "
    "it as Hang.",
    "stage",
)
JOB_STAGE_TIME = _job(
    "stage_timestamp_seconds",
    "unix seconds",
    "Since when the job's attempt has been in its stage, by the operator's clock; absent while "
    "none runs.",
    "stage",
)
JOB_POD_INFO = _job(
    "pod_info",
    "1",
    "One per pod of the job's running attempt, bound to a node; component is trainer or engine.",
    "attempt",
    "pod",
    "node",
    "component",
)
JOB_RECONCILE_FAILURES = _job(
    "reconcile_failures",
    "1",
    "Reconciles of the job that have failed in a row; absent after one that succeeded.",
)
JOB = tuple(metric for metric in OPERATOR if metric.name.startswith("grpo_job_"))
"""What the operator exports of each GRPOJob that has not ended."""
ENDED_SECONDS, ENDED_JOBS = 3600.0, 300
"""A job that has ended keeps its series for ENDED_SECONDS, and only while it is among the
ENDED_JOBS newest."""


def _time_to(name: str, what: str) -> Metric:
    text = f"Time from a GRPOJob's creation until {what}, in its first attempt."
    return _exported(f"grpo_jobs_time_to_{name}_seconds", "seconds", text, kind="histogram")


TIME_TO_ADMITTED = _time_to("admitted", "it was admitted")
TIME_TO_SCHEDULED = _time_to("scheduled", "all of its pods had a node")
TIME_TO_RUNNING = _time_to("running", "all of its pods ran")
TIME_TO_FIRST_STEP = _time_to("first_step", "the operator read of a finished step")
TIMES_TO = (TIME_TO_ADMITTED, TIME_TO_SCHEDULED, TIME_TO_RUNNING, TIME_TO_FIRST_STEP)
RESTARTS = _exported(
    "grpo_jobs_restarts_total",
    "1",
    "Restarts of all jobs since this operator started, by how the attempt before ended.",
    "reason",
    kind="counter",
)
CONTROLLER = "grpojob"
"""Value of the labels `controller` and `name` under which controller-runtime's dashboards find this
controller."""
RECONCILES = _controller(
    "reconcile_total",
    "1",
    "Reconciles by result (success, error, requeue after a conflict, requeue_after a while).",
    "result",
    kind="counter",
)
RECONCILE_SECONDS = _controller(
    "reconcile_time_seconds",
    "seconds",
    "Duration of a reconcile, API calls included.",
    kind="histogram",
)
ACTIVE_WORKERS = _controller("active_workers", "1", "Jobs that are being worked on.")
MAX_WORKERS = _controller("max_concurrent_reconciles", "1", "Jobs that may be worked on at a time.")
API_REQUESTS = _exported(
    "rest_client_requests_total",
    "1",
    "Requests to the API server.",
    "method",
    "resource",
    "code",
    kind="counter",
)
QUEUE_DEPTH = _queue("depth", "1", "Jobs waiting for a reconcile.")
QUEUE_ADDS = _queue("adds_total", "1", "Jobs that were put into the queue.", kind="counter")
QUEUE_RETRIES = _queue(
    "retries_total", "1", "Jobs that were put into it again after a failure.", kind="counter"
)
QUEUE_SECONDS = _queue(
    "queue_duration_seconds",
    "seconds",
    "Time from an event to the start of its reconcile.",
    kind="histogram",
)
QUEUE_LONGEST = _queue(
    "longest_running_processor_seconds",
    "seconds",
    "How long the oldest reconcile that has not ended takes already.",
)
PROGRESS_PULLS = _operator(
    "progress_pulls_total",
    "1",
    "Pulls of /progress by result (success, error).",
    "result",
    kind="counter",
)
LOSSES = ("refused", "dropped")
"""Results of events and spans that were not delivered."""
EVENTS = _operator(
    "events_total",
    "1",
    "Events on GRPOJobs by what became of them (sent, folded into one that waited, refused, "
    "dropped).",
    "result",
    kind="counter",
)
SPANS = _operator(
    "spans_total",
    "1",
    "Spans of attempts' traces by what became of them (sent, refused, dropped).",
    "result",
    kind="counter",
)
LOOP_LAG = _operator(
    "event_loop_lag_seconds",
    "seconds",
    "By how much a timer of the operator's event loop was late.",
    kind="histogram",
)
UNREADABLE_OBJECTS = _operator(
    "unreadable_objects",
    "1",
    "Objects that this version of the operator can't read and leaves alone.",
    "resource",
)
MEMORY_LIMIT = _operator(
    "memory_limit_bytes", "bytes", "Memory limit of the operator's container; absent without one."
)
HEARD = _operator(
    "watch_heard_timestamp_seconds",
    "unix seconds",
    "Time of the last LIST, event or bookmark of a kind of object, in the namespace where that "
    "is longest ago.",
    "resource",
)
LEADER = _operator(
    "leader",
    "1",
    "1 for the operator that works, 0 for those that wait to take its place; the jobs' metrics "
    "are the leader's.",
)
TAKEOVER = _operator(
    "takeover_seconds",
    "seconds",
    "Time from the last sign of the leader before, or this operator's start, until this one "
    "worked; absent before.",
)
BUILD_INFO = _operator("build_info", "1", "1, with the operator's version as a label.", "version")


def _vllm(name: str, kind: Kind, unit: str, text: str, *labels: str) -> Metric:
    metric = Metric(f"vllm:{name}", kind, unit, text, ("engine", "model_name", *labels))
    VLLM.append(metric)
    return metric


RUNNING = _vllm("num_requests_running", "gauge", "1", "Requests in the engine's batch.")
WAITING = _vllm("num_requests_waiting", "gauge", "1", "Requests that wait for a place in it.")
CACHE_USAGE = _vllm("kv_cache_usage_perc", "gauge", "1", "Share of the KV cache in use.")
SLEEP_STATE = _vllm(
    "engine_sleep_state",
    "gauge",
    "1",
    "1 for the state that the engine is in: awake, weights_offloaded or discard_all.",
    "sleep_state",
)
PREEMPTIONS = _vllm(
    "num_preemptions_total",
    "counter",
    "1",
    "Requests that lost their place in the KV cache and began again.",
)
PROMPT_TOKENS = _vllm("prompt_tokens_total", "counter", "tokens", "Prompt tokens computed.")
GENERATION_TOKENS = _vllm("generation_tokens_total", "counter", "tokens", "Tokens sampled.")
PREFIX_QUERIES = _vllm(
    "prefix_cache_queries_total", "counter", "tokens", "Tokens looked up in the prefix cache."
)
PREFIX_HITS = _vllm(
    "prefix_cache_hits_total", "counter", "tokens", "Tokens found in the prefix cache."
)
TIME_TO_FIRST_TOKEN = _vllm(
    "time_to_first_token_seconds", "histogram", "seconds", "Time to a request's first token."
)
REQUEST_SECONDS = _vllm(
    "e2e_request_latency_seconds", "histogram", "seconds", "Duration of a request."
)
