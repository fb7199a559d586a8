"""Series by name, and small changes to many of them at a time."""

from collections.abc import Mapping

from grpo_api.report import training_metrics as trainer
from grpo_api.report.metrics import Metric

from ..timelines import (
    Timeline,
    constant,
    except_during,
    frozen_during,
    noisy,
    replaced_during,
    series,
)

World = Mapping[str, Timeline]
"""Timelines by series."""
NEVER = 10**6
"""A minute that no story gets to."""
_BY_KEY = {metric.key: metric for metric in trainer.TRAINING}


def rank0(
    metric: Metric | str, attempt: int = 1, job: str = "run", namespace: str = "team", **labels: str
) -> str:
    """A series of a job's rank 0, by the metric or its key."""
    family = _BY_KEY[metric] if isinstance(metric, str) else metric
    pod = {
        "namespace": namespace,
        "grpojob": job,
        "attempt": str(attempt),
        "pod": f"{job}-{attempt}-0",
    }
    return series(family.name, {**pod, **labels})


def of_job(metric: Metric, job: str = "run", namespace: str = "team", **labels: str) -> str:
    """A series of the operator's about a job."""
    return series(metric.name, {"namespace": namespace, "grpojob": job, **labels})


def absent_during(world: World, first: int = 0, end: int = NEVER) -> World:
    """These series, but not from minute `first` to before minute `end`."""
    return {name: except_during(line, first, end) for name, line in world.items()}


def constant_during(world: World, first: int, end: int = NEVER) -> World:
    """These series, but from minute `first` to before minute `end` none of them changes."""
    return {name: frozen_during(line, first, end) for name, line in world.items()}


def changed_during(world: World, first: int, end: int, values: Mapping[str, float]) -> World:
    """Some of these series with other values, more or less, from minute `first` to before minute
    `end`."""
    others = {
        name: noisy(constant(value), 0.1, seed) for seed, (name, value) in enumerate(values.items())
    }
    return {name: replaced_during(world[name], first, end, other) for name, other in others.items()}


def histogram(
    metric: Metric, count: Timeline, shares: Mapping[float, float], **labels: str
) -> World:
    """A histogram's buckets: of all that were counted, which share took at most so long."""

    def bucket(share: float) -> Timeline:
        return lambda minute: (
            None if (counted := count(minute)) is None else round(counted * share, 3)
        )

    bounds = {f"{bound:g}": share for bound, share in shares.items()} | {"+Inf": 1.0}
    return {
        series(f"{metric.name}_bucket", {**labels, "le": le}): bucket(share)
        for le, share in bounds.items()
    }


def constant_series(value: float, *names: str) -> World:
    """Series that always have this value."""
    return dict.fromkeys(names, constant(value))
