"""Around the job: others of three teams, their GPUs, and the operator."""

from dataclasses import dataclass
from importlib.metadata import version

from grpo_api.report import metrics as operator
from grpo_api.report import training_metrics as trainer
from grpo_api.report.metrics import CONTROLLER

from .. import recording_rules
from ..timelines import (
    Timeline,
    changed_between,
    clock,
    constant,
    counter,
    noisy,
    only_during,
    series,
    towards,
)
from .job_series import GIB, gpu_second_series
from .world import NEVER, World, constant_series, histogram, of_job, rank0

H100, A100, L40S = "H100-80GB", "A100-80GB", "L40S"


@dataclass(frozen=True, slots=True)
class Other:
    """A job that nothing befalls; it runs from minute `first` to before `end`."""

    namespace: str
    job: str
    product: str
    gpus: int
    kl: float
    first: int = 0
    end: int = NEVER

    def world(self, seed: int) -> World:
        """What rank 0 and the operator export of it."""
        lines = {
            rank0("kl", job=self.job, namespace=self.namespace): noisy(
                constant(self.kl), 0.2, seed
            ),
            rank0("reward", job=self.job, namespace=self.namespace): noisy(
                towards(0.3, 1.2, 200.0), 0.08, seed
            ),
            rank0("straggler_ratio", job=self.job, namespace=self.namespace): constant(
                1.02 + 0.03 * seed
            ),
            rank0(trainer.STEP, job=self.job, namespace=self.namespace): float,
            of_job(operator.JOB_PHASE, self.job, self.namespace, phase="Running"): constant(1),
        }
        return {name: only_during(line, self.first, self.end) for name, line in lines.items()}

    def accounts(self) -> World:
        """What the operator exports of its GPUs."""
        return {
            of_job(operator.JOB_GPUS, self.job, self.namespace, product=self.product): constant(
                self.gpus
            ),
            **gpu_second_series(
                (self.first, self.end, 0), job=self.job, namespace=self.namespace, gpus=self.gpus
            ),
        }


OTHERS = (
    Other("math", "gsm8k-small", A100, 4, 0.11),
    Other("math", "proofs", H100, 16, 0.31),
    Other("code", "unit-tests", H100, 8, 0.05),
    Other("code", "sql", L40S, 2, 0.18),
    Other("search", "ranking", A100, 4, 0.09, first=25),
)
_WAITED = constant_series(1, of_job(operator.JOB_PHASE, "ranking", "search", phase="Queued"))


def _phases(namespace: str, phase: str, line: Timeline) -> World:
    return {series(operator.JOBS.name, {"namespace": namespace, "phase": phase}): line}


WAITING: World = {name: only_during(line, 5, 25) for name, line in _WAITED.items()}
PHASES: World = {
    **_phases("team", "Running", constant(1)),
    **_phases("math", "Running", constant(2)),
    **_phases("code", "Running", constant(2)),
    **_phases("search", "Running", only_during(constant(1), 25, NEVER)),
    **_phases("search", "Queued", only_during(constant(1), 5, 25)),
    **_phases("math", "Succeeded", counter(40, 110, 200, first=3)),
    **_phases("code", "Succeeded", counter(20, 90, first=5)),
}
_DONE: tuple[tuple[operator.Metric, dict[float, float]], ...] = (
    (operator.TIME_TO_ADMITTED, {1: 0.5, 5: 0.7, 60: 0.8, 600: 0.9, 1800: 1.0}),
    (operator.TIME_TO_SCHEDULED, {1: 0.2, 5: 0.7, 60: 0.8, 600: 0.9, 1800: 1.0}),
    (operator.TIME_TO_RUNNING, {15: 0.2, 60: 0.6, 120: 0.8, 600: 0.9, 1800: 1.0}),
    (operator.TIME_TO_FIRST_STEP, {120: 0.3, 300: 0.7, 600: 0.9, 1800: 1.0}),
)
_MILESTONES: World = {
    name: line
    for metric, shares in _DONE
    for name, line in histogram(metric, lambda m: m // 4 * 1.0, shares).items()
}
PREEMPTIONS = series(operator.RESTARTS.name, {"reason": "Preempted"})
OUT_OF_MEMORY = series(operator.RESTARTS.name, {"reason": "OutOfMemory"})
GPU_ACCOUNTS: World = {name: line for job in OTHERS for name, line in job.accounts().items()}
_RUN = {"namespace": "team", "grpojob": "run"}
_IDLE = recording_rules.IDLE.name
UTILISATION: World = {
    series(recording_rules.UTILISATION.name, _RUN): noisy(constant(0.82), 0.1),
    series(recording_rules.TENSOR_ACTIVE.name, _RUN): noisy(constant(0.31), 0.1, 1),
    series(recording_rules.MEMORY_USED.name, _RUN): constant(69 * GIB),
    series(recording_rules.FREE.name, {"modelName": "NVIDIA H100"}): constant(4),
    series(recording_rules.FREE.name, {"modelName": "NVIDIA L40S"}): changed_between(60, 120, 4, 6),
    series(_IDLE, {"namespace": "math", "modelName": "NVIDIA H100"}): changed_between(30, 80, 2, 0),
    series(_IDLE, {"namespace": "code", "modelName": "NVIDIA L40S"}): constant(1),
}
"""What the chart records of NVIDIA's own exporter."""
OTHER_RUNS: World = {
    name: line for seed, job in enumerate(OTHERS) for name, line in job.world(seed).items()
}

_OWN = {"controller": CONTROLLER}
_POD = {"job": "grpo-operator", "instance": "10.0.3.7:8080"}
_FOLLOWER = {**_POD, "instance": "10.0.4.8:8080"}
_VERSION = version("grpo-operator")
SUCCESSES = series(operator.RECONCILES.name, {**_OWN, "result": "success"})
ERRORS = series(operator.RECONCILES.name, {**_OWN, "result": "error"})
DEPTH = series(operator.QUEUE_DEPTH.name, {"name": CONTROLLER})
LONGEST = series(operator.QUEUE_LONGEST.name, {"name": CONTROLLER})
HEARD = series(operator.HEARD.name, {"resource": "pods"})
DENIED = series(
    operator.API_REQUESTS.name, {"method": "PATCH", "resource": "grpojobs", "code": "403"}
)
LEADER = series(operator.LEADER.name, _POD)
FOLLOWER = series(operator.LEADER.name, _FOLLOWER)
EVENTS_REFUSED = series(operator.EVENTS.name, {"result": "refused"})
SPANS_DROPPED = series(operator.SPANS.name, {"result": "dropped"})
RESIDENT = series("process_resident_memory_bytes", _POD)
MEMORY_LIMIT = series(operator.MEMORY_LIMIT.name, _POD)
RETRIES = series(operator.QUEUE_RETRIES.name, {"name": CONTROLLER})
_REQUESTS = {
    ("PATCH", "grpojobs", "200"): 12.0,
    ("POST", "jobs", "201"): 2.0,
    ("GET", "pods", "200"): 1.0,
}
_COUNTED: dict[str, float] = {
    SUCCESSES: 30.0,
    series(operator.QUEUE_ADDS.name, {"name": CONTROLLER}): 31.0,
    series(operator.PROGRESS_PULLS.name, {"result": "success"}): 6.0,
    series(operator.EVENTS.name, {"result": "sent"}): 1.0,
    series("process_cpu_seconds_total", _POD): 2.4,
    **{
        series(
            operator.API_REQUESTS.name, {"method": method, "resource": resource, "code": code}
        ): rate
        for (method, resource, code), rate in _REQUESTS.items()
    },
}
"""Counters by what they grow in a minute."""


def growing_counter(rate: float) -> Timeline:
    """A counter that grows by `rate` each minute."""
    return lambda minute: minute * rate


def reconcile_histograms(count: Timeline) -> World:
    """Histograms of how long reconciles took and waited in the queue, after `count` of them."""
    return {
        **histogram(
            operator.RECONCILE_SECONDS, count, {0.025: 0.5, 0.1: 0.9, 0.5: 0.98, 2.5: 1.0}, **_OWN
        ),
        **histogram(
            operator.QUEUE_SECONDS, count, {0.005: 0.6, 0.05: 0.95, 0.25: 1.0}, name=CONTROLLER
        ),
    }


LAG_COUNT = growing_counter(60.0)


def lag_histogram(count: Timeline, slow_count: Timeline) -> World:
    """How late the event loop's timers were: of `count`, nearly all by less than 10 ms, and as many
    as `late` by more than a second."""
    usual = {"0.001": 0.7, "0.01": 0.97, "0.1": 1.0, "1.0": 1.0}

    def in_time(share: float) -> Timeline:
        return lambda minute: round((count(minute) or 0.0) * share, 3)

    def all_of_them(minute: int) -> float:
        return (count(minute) or 0.0) + (slow_count(minute) or 0.0)

    bucket = f"{operator.LOOP_LAG.name}_bucket"
    lines = {series(bucket, {"le": bound}): in_time(share) for bound, share in usual.items()}
    return {**lines, **{series(bucket, {"le": bound}): all_of_them for bound in ("2.5", "+Inf")}}


GROWING = tuple(_COUNTED)
OPERATOR: World = {
    **constant_series(
        1,
        *(
            series(operator.BUILD_INFO.name, {"version": _VERSION, **pod_labels})
            for pod_labels in (_POD, _FOLLOWER)
        ),
        LEADER,
    ),
    **constant_series(
        0,
        FOLLOWER,
        EVENTS_REFUSED,
        SPANS_DROPPED,
        ERRORS,
        DEPTH,
        PREEMPTIONS,
        RETRIES,
        series(operator.UNREADABLE_OBJECTS.name, {"resource": "pods"}),
    ),
    **constant_series(0.1, LONGEST),
    **constant_series(1, series(operator.ACTIVE_WORKERS.name, _OWN)),
    **constant_series(8, series(operator.MAX_WORKERS.name, _OWN)),
    **{name: growing_counter(rate) for name, rate in _COUNTED.items()},
    **{
        series(operator.HEARD.name, {"resource": kind}): clock
        for kind in ("grpojobs", "jobs", "nodes")
    },
    HEARD: clock,
    **reconcile_histograms(growing_counter(30.0)),
    **lag_histogram(LAG_COUNT, constant(0.0)),
    RESIDENT: noisy(constant(88 * 2.0**20), 0.02),
    MEMORY_LIMIT: constant(512 * 2.0**20),
    series(operator.TAKEOVER.name, _POD): constant(2.4),
    **PHASES,
    **_MILESTONES,
    **WAITING,
    **GPU_ACCOUNTS,
}
