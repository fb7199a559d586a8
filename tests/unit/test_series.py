"""How many series a job has, as docs/reference/metrics.md says."""

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from grpo_api.findings.diagnosis import RULES
from grpo_api.report import training_metrics
from grpo_api.report.metrics import Metric
from grpo_api.report.report import LOAD, STEP_PHASES, Progress
from grpo_kube.objects.times import Observed
from grpo_operator.decide.observation import Pull
from grpo_operator.process.job_metrics import JobMetrics, pod_samples, progress_samples
from grpo_trainer.process.step_counters import StepCounters
from grpo_trainer.telemetry.progress_server import ProgressCollector
from tests.unit.operator_world import (
    GPU_PLAN,
    NOW,
    active_status,
    at,
    condition,
    make_job,
    make_pod,
)
from tests.virtual_time import virtually

REWARDS = ("accuracy", "format")
PLANNED = ("load", "generate", "reference", "forward", "backward", "step")
OF_ENGINES = ("engine", "weight", "importance")
PAGE = Path("docs/reference/metrics.md").read_text()


def rank0_series(engines: int) -> int:
    """Series of rank 0 of a job with these engines, on GPUs, that has a value for everything."""

    def is_exported(metric: Metric) -> bool:
        return bool(engines) or not any(part in metric.name for part in OF_ENGINES)

    metrics = {metric.key: 1.0 for metric in training_metrics.TRAINING if is_exported(metric)}
    for metric in training_metrics.LABELLED:
        names: list[str] = list(REWARDS)
        if metric in training_metrics.BY_ENGINE:
            names = [str(number) for number in range(engines)]
        elif metric is training_metrics.FINDING:
            names = list(RULES)
        metrics |= {f"{metric.key}/{name}": 1.0 for name in names}
    sizes = dict.fromkeys((LOAD, *STEP_PHASES, *training_metrics.MEMORY_BESIDE), 1)
    progress = Progress(
        attempt=1, step=7, total_steps=9, seconds_per_step=2.0, metrics=metrics, memory=sizes
    )
    limits: dict[Metric, dict[tuple[str, ...], float]] = {
        metric: {(phase,): 1.0 for phase in PLANNED} if metric.labels else {(): 1.0}
        for metric in filter(is_exported, training_metrics.LIMITS)
    }
    counters = StepCounters()
    counters.add_step(1.0, dict.fromkeys(STEP_PHASES, 1.0))
    rewards = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    counters.add_rewards(rewards, REWARDS, (1.0, 0.5), group_size=2)
    registry = CollectorRegistry()
    registry.register(ProgressCollector(lambda: progress, limits))
    registry.register(counters)
    return count(generate_latest(registry).decode())


def count(page: str) -> int:
    """Lines that are samples."""
    return sum(not line.startswith("#") for line in page.splitlines())


def test_the_documents_say_how_many_series_rank_0_has() -> None:
    plain, served = rank0_series(0), rank0_series(2)
    assert f"no engine | {plain} | {plain},000 |" in PAGE
    assert f"pods of their own | {served - plain} more |" in PAGE


def test_the_documents_say_how_many_series_the_operator_has_of_a_job() -> None:
    spent = {"generating": 1, "scoring": 1, "training": 1, "loading": 1, "proving": 1}
    usage = {
        "asOf": at(-1),
        "gpuSeconds": {**spent, "saving": 1, "lost": 1, "other": 1},
        "queuedSeconds": 1,
        "cost": 1,
    }
    job = make_job(
        status=active_status(
            plan=GPU_PLAN,
            phase="Running",
            progress={"step": 140},
            usage=usage,
            conditions=[condition(kind) for kind in ("Admitted", "Running", "Degraded")],
        )
    )
    pods = [make_pod(index, node=f"gpu-{index}") for index in range(4)]
    pull = Pull(Progress(attempt=1, stage="Training"), Observed(1), Observed(1))
    metrics = JobMetrics(
        lambda: [job],
        lambda: NOW,
        lambda job: [
            *progress_samples(job, pull, None, lambda at: at.at),
            *pod_samples(job, pods),
        ],
    )
    series = count(virtually(metrics.text())) - 1  # that of grpo_jobs is of all jobs
    assert f"a job of four pods | {series} | {series},000 |" in PAGE
