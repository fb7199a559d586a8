"""The grpo_job_* families of /metrics, joined from text lines that are cached for each GRPOJob.

A job's lines are rebuilt only when its version changes, so a scrape of thousands of jobs joins text
and computes nothing. A finished job keeps its series for a while, so that its last value is scraped
and its alerts can fire. All jobs are counted by namespace and phase. A deleted job's series
disappear at once. So the number of series does not grow with the number of jobs that the cluster
has ever had.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client.utils import floatToGoString

from grpo_api.plan.hang_timeouts import hang_timeout_seconds
from grpo_api.report.metrics import (
    BY_REASON,
    ENDED_JOBS,
    ENDED_SECONDS,
    JOB,
    JOB_ATTEMPTS,
    JOB_CONDITION,
    JOB_COST,
    JOB_GPU_SECONDS,
    JOB_GPUS,
    JOB_INFO,
    JOB_PATIENCE,
    JOB_PHASE,
    JOB_POD_INFO,
    JOB_PROGRESS_TIME,
    JOB_QUEUED_SECONDS,
    JOB_RECONCILE_FAILURES,
    JOB_RESTARTS,
    JOB_STAGE_TIME,
    JOB_STEP,
    JOBS,
    Metric,
)
from grpo_api.report.report import STEP_STAGES, Stage
from grpo_api.status.status import ConditionType, GRPOJobStatus
from grpo_api.status.usage import Usage
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed, seconds
from grpo_kube.pacing import yield_often

from ..decide.observation import Pull, Silence
from ..records.names import COMPONENT_ENGINE, COMPONENT_TRAINER
from ..records.packed_job import typed_status
from ..records.records import ENDED_PHASES, GRPOJobRecord, PodRecord
from ..report.queue_waits import QueueWaits

SAID_BY_PHASE = {
    ConditionType.ADMITTED,
    ConditionType.PLANNED,
    ConditionType.SCHEDULED,
    ConditionType.RUNNING,
    ConditionType.SUSPENDED,
}
"""Conditions without series: they would repeat the phase, for thousands of jobs."""
TOLD_ELSEWHERE = SAID_BY_PHASE | {
    ConditionType.RECOVERABLE,
    ConditionType.FINISHED,
    ConditionType.RECONCILING,
    ConditionType.STALLED,
}
"""Conditions without series. Rank 0's metrics show by the steps between checkpoints that a job can
resume; the last three only repeat others."""
Sample = tuple[Metric, Sequence[str], float | str]
Lines = dict[str, str]
"""Lines by family, each with its line break."""
Live = Callable[[GRPOJobRecord], Iterable[Sample]]
"""Samples of a job that has not ended which change while its object doesn't."""
_STAGES = frozenset(get_args(Stage))


@dataclass(frozen=True, slots=True)
class _CachedLines:
    uid: str
    version: int
    lines: Lines


class JobMetrics:
    """Writes the families in the text format 0.0.4."""

    def __init__(
        self,
        jobs: Callable[[], Iterable[GRPOJobRecord]],
        clock: Callable[[], float],
        live: Live = lambda _: (),
    ) -> None:
        """`jobs` gives the cache's content; `clock` unix seconds."""
        self._jobs = jobs
        self._clock = clock
        self._live = live
        self._cache: dict[ObjectKey, _CachedLines] = {}

    async def text(self) -> str:
        """All families, as the jobs are now."""
        counts: Counter[tuple[str, str]] = Counter()
        shown, ended = [], []
        earliest = self._clock() - ENDED_SECONDS
        for job in self._jobs():
            if not job.is_ours:  # alerts would say that this operator neglects it
                continue
            counts[job.key.namespace, job.phase] += 1
            if not job.is_finished:
                shown.append(job)
            elif job.completed >= earliest:
                ended.append(job)
        waits = QueueWaits(self._clock())
        live_lines = []
        async for job in yield_often(shown):
            waits.add(job)
            live_lines.append(_format_samples(job, self._live(job)))
        shown += heapq.nlargest(ENDED_JOBS, ended, key=lambda job: job.completed)
        cached = await self._refresh_lines(shown)
        all_lines = [*(entry.lines for entry in cached), *live_lines]
        count_lines = [_line(JOBS, labels, str(count)) for labels, count in counts.items()]
        families = [_family(JOBS, "".join(count_lines))]
        wait_lines: Lines = dict.fromkeys((metric.name for metric in BY_REASON), "")
        for metric, reason, value in waits.samples():
            wait_lines[metric.name] += _line(metric, (reason,), _number(value))
        families += [_family(metric, wait_lines[metric.name]) for metric in BY_REASON]
        for metric in JOB:
            lines = "".join(job_lines.get(metric.name, "") for job_lines in all_lines)
            families.append(_family(metric, lines))
            await asyncio.sleep(0)
        return "".join(families)

    async def _refresh_lines(self, jobs: list[GRPOJobRecord]) -> list[_CachedLines]:
        """Return the lines of these jobs, and keep those of no others."""
        fresh: dict[ObjectKey, _CachedLines] = {}
        async for job in yield_often(jobs):
            cached = self._cache.get(job.key)
            if cached is None or cached.uid != job.uid or cached.version != job.version:
                cached = _CachedLines(job.uid, job.version, _format_samples(job, _samples(job)))
            fresh[job.key] = cached
        self._cache = fresh
        return list(fresh.values())


def _family(metric: Metric, lines: str) -> str:
    return f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n{lines}"


def progress_samples(
    job: GRPOJobRecord,
    pull: Pull | None,
    silence: Silence | None,
    unix: Callable[[Observed], float],
) -> Iterator[Sample]:
    """Since when a running job has not got on, and how long it may; nothing of one whose rank 0 was
    not asked yet.

    `unix` gives the unix time of what was observed. A rank 0 that falls silent doesn't get on as
    far as anybody knows.
    """
    plan, spec = job.status.plan, job.spec
    if not (job.is_active and job.is_true(ConditionType.RUNNING) and plan and spec):
        return
    if pull and pull.progress.attempt == job.status.attempt:
        reported_stage, since = pull.progress.stage, pull.advanced_at
    elif silence and not spec.command:
        # A program of the user's own need not serve progress.
        reported_stage, since = "Importing", silence.since
    else:
        return
    stage = _known_stage(reported_stage)
    if stage in STEP_STAGES:
        # A series that ends with each phase of a step would end its alerts, too.
        stage = "Training"
    yield JOB_PROGRESS_TIME, (), unix(since)
    yield JOB_PATIENCE, (stage,), hang_timeout_seconds(stage, spec.guard, plan)


def pod_samples(job: GRPOJobRecord, pods: Iterable[PodRecord]) -> Iterator[Sample]:
    """The pods of the job's attempt, so that what names a pod can be asked by job.

    Pods that have no node or have ended hold no GPU. Without them, and without earlier attempts,
    a job has as many series as its gang has pods.
    """
    for pod in pods:
        is_placed = bool(pod.node) and pod.phase not in ENDED_PHASES
        if is_placed and pod.grpojob_uid == job.uid and pod.attempt == job.status.attempt:
            component = COMPONENT_ENGINE if pod.engine else COMPONENT_TRAINER
            yield JOB_POD_INFO, (str(pod.attempt), pod.name, pod.node, component), 1


def failure_samples(failures: int) -> Iterator[Sample]:
    """How often a job's reconcile has failed in a row; nothing while it succeeds."""
    if failures:
        yield JOB_RECONCILE_FAILURES, (), failures


def _known_stage(stage: str) -> str:
    """The stage as the value of a label: whatever a trainer says, there are few."""
    return stage if stage in _STAGES else "Unknown"


def _format_samples(job: GRPOJobRecord, samples: Iterable[Sample]) -> Lines:
    """A job's lines; each series once, whatever its status says twice."""
    lines: dict[str, dict[str, None]] = {}
    for metric, labels, value in samples:
        try:
            number = _number(value)
        except ValueError:  # a status may say anything, and no number is no sample
            continue
        line = _line(metric, (*job.key, *labels), number)
        lines.setdefault(metric.name, {})[line] = None
    return {name: "".join(metric_lines) for name, metric_lines in lines.items()}


def _samples(job: GRPOJobRecord) -> Iterator[Sample]:
    status = typed_status(job.raw_status) if job.is_finished else job.status
    plan = status.plan
    model = plan.parameters if plan else ""
    yield JOB_INFO, (model, plan.strategy if plan else ""), 1
    true_conditions = [condition for condition in status.conditions if condition.status == "True"]
    reasons = {condition.type: condition.reason for condition in true_conditions}
    for kind in sorted(reasons.keys() - TOLD_ELSEWHERE):
        yield JOB_CONDITION, (kind, reasons[kind]), 1
    if status.phase:
        yield JOB_PHASE, (status.phase,), 1
    yield JOB_RESTARTS, (), status.restarts
    if status.progress:
        yield JOB_STEP, (), status.progress.step
        if status.progress.stage and status.progress.stage_since:
            since = seconds(status.progress.stage_since) or 0.0
            yield JOB_STAGE_TIME, (_known_stage(status.progress.stage),), since
    if status.usage:
        yield from _of_usage(status.usage)
    if not job.is_finished:
        yield from _of_live(status)


def _of_usage(usage: Usage) -> Iterator[Sample]:
    for state, spent in usage.gpu_seconds:
        if spent:
            yield JOB_GPU_SECONDS, (state,), round(spent)
    yield JOB_QUEUED_SECONDS, (), round(usage.queued_seconds)
    if usage.cost is not None:
        yield JOB_COST, (), usage.cost


def _of_live(status: GRPOJobStatus) -> Iterator[Sample]:
    yield JOB_ATTEMPTS, (), status.attempt
    plan = status.plan
    if plan:
        gpus = Counter({plan.gpu_product: plan.gpus})
        if plan.engine:
            gpus[plan.engine.gpu_product] += plan.engine.gpus
        for product, count in gpus.items():
            if count or product == plan.gpu_product:
                yield JOB_GPUS, (product,), count


def _number(value: float | str) -> str:
    """The value as text; ValueError if it is no number."""
    if isinstance(value, int):
        return str(value)
    text: str = floatToGoString(float(value))  # type: ignore[no-untyped-call]
    return text


def _line(metric: Metric, labels: Iterable[str], value: str) -> str:
    names_and_texts = zip(metric.labels, labels, strict=True)
    pairs = ",".join(f'{name}="{_escape_label(text)}"' for name, text in names_and_texts)
    return f"{metric.name}{{{pairs}}} {value}\n"


def _escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
