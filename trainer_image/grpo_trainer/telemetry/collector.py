"""The trainer's Prometheus samples, made from Progress and the plan at the time of the scrape.

So an absent key is absent there too, and NaN stays what it is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report import training_metrics as catalogue
from grpo_api.report.metrics import Metric
from grpo_api.report.report import Progress

Value = float | None
Values = Mapping[tuple[str, ...], float]
"""Values of a family by the values of its labels."""
_DISTRIBUTIONS = ("grpo-operator", "torch", "trl")
"""Whose versions are the labels of BUILD_INFO, in their order."""


class ProgressCollector:
    """Samples of a run as it is now, beside the limits that its plan sets."""

    def __init__(self, read: Callable[[], Progress], limits: Mapping[Metric, Values]) -> None:
        """`limits`: see `limits_of`."""
        self._read = read
        self._limits = limits
        self._versions = [version(name) for name in _DISTRIBUTIONS]

    def collect(self) -> Iterable[Family]:
        """The samples of one scrape."""
        progress = self._read()
        for metric, value in _single(progress):
            if value is not None:
                yield _family(metric, {(): value})
        for metric, values in self._limits.items():
            yield _family(metric, values)
        yield _family(catalogue.MEMORY, {(name,): float(size) for name, size in _by_phase(progress)})
        for metric in catalogue.LABELLED:
            by_name = with_prefix(progress.metrics, metric.key)
            yield _family(metric, {(name,): value for name, value in by_name.items()})
        yield _family(catalogue.BUILD_INFO, {tuple(self._versions): 1.0})


def _single(progress: Progress) -> Iterator[tuple[Metric, Value]]:
    """The families of one value each."""
    yield catalogue.STEP, progress.step
    yield catalogue.TOTAL_STEPS, progress.total_steps
    yield catalogue.ATTEMPT, progress.attempt
    yield catalogue.LAST_STEP_TIME, progress.last_step_time
    yield catalogue.ETA, progress.eta_seconds
    for metric in catalogue.TRAINING:
        yield metric, progress.metrics.get(metric.key)
    for key, metric in catalogue.MEMORY_BESIDE.items():
        yield metric, progress.memory.get(key)


def limits_of(plan: TrainingPlan) -> dict[Metric, Values]:
    """The limits that the plan sets, by metric. Unset limits are left out."""
    execution, sync, memory = plan.execution, plan.reference.sync, plan.execution.memory
    save_every = execution.save_every_steps if plan.checkpoint_directory else None
    reference_every = sync.every_steps if sync else None
    usable_memory = memory.usable_bytes if memory else None
    single = {
        catalogue.MAX_KL: plan.guard.max_kl,
        catalogue.MAX_ENGINE_MISMATCH: plan.guard.max_engine_mismatch,
        catalogue.HANG_TIMEOUT: plan.guard.hang_timeout_seconds,
        catalogue.MAX_COMPLETION: plan.training.max_completion_length,
        catalogue.SAVE_EVERY: save_every,
        catalogue.REFERENCE_EVERY: reference_every,
        catalogue.USABLE_MEMORY: usable_memory,
    }
    found: dict[Metric, Values] = {metric: {(): value} for metric, value in single.items() if value is not None}
    if memory:
        phases = memory.phases.model_dump(by_alias=False)
        found[catalogue.PREDICTED_MEMORY] = {(name,): float(size) for name, size in phases.items()}
    return found


def with_prefix(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The entries `<prefix>/<name>` by name."""
    return {key.removeprefix(f"{prefix}/"): value for key, value in values.items() if key.startswith(f"{prefix}/")}


def _by_phase(progress: Progress) -> Iterator[tuple[str, int]]:
    return ((name, size) for name, size in progress.memory.items() if name not in catalogue.MEMORY_BESIDE)


def _family(metric: Metric, values: Values) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
