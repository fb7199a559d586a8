"""A cluster's last three hours as Prometheus would have them, with a value for every metric that is
declared.

So a panel without data asks for something that is not exported, or with labels that it doesn't
have. The job `run` of namespace `team` restarts in minute 60; others wait and have failed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from grpo_api.plan.plan import MemoryPhases
from grpo_api.report import metrics as operator
from grpo_api.report import training_metrics as trainer
from grpo_api.report.metrics import CONTROLLER, VLLM, Metric
from grpo_api.report.report import STEP_PHASES
from grpo_api.status.usage import GPUSeconds
from grpo_codegen import recording_rules

START, MINUTES, RESTART = 1_700_000_000, 180, 60
END = START + 60 * MINUTES
Labels = Mapping[str, str]
_VALUES: dict[str, tuple[str, ...]] = {
    operator.STEP_PHASE: tuple({**MemoryPhases.model_fields, **dict.fromkeys(STEP_PHASES)}),
    "state": tuple(GPUSeconds.model_fields),
    "result": ("success", "error"),
    "reason": ("Preempted", "OutOfMemory"),
    "reward": tuple(f"reward{number}" for number in range(14)),
    "code": ("200", "409"),
    "finding": ("EntropyCollapsed", "Straggler"),
    "sign": ("positive", "negative"),
    "resource": ("pods", "jobs"),
    "controller": (CONTROLLER,),
    "name": (CONTROLLER,),
}
"""Values of labels; all others have one."""
_BOUNDS = ("0.1", "1", "+Inf")
_OPERATOR: Labels = {"job": "operator", "instance": "10.0.0.1:8080"}
_OTHERS = {"waits": "Queued", "broken": "Failed"}


@dataclass(frozen=True, slots=True)
class World:
    """What is not there: GPUs, a reference to be far from, and engines that sample."""

    gpus: bool = True
    reference: bool = True
    engines: bool = True

    def text(self) -> str:
        """All of it in OpenMetrics' text."""
        lines = (
            line
            for name, labels, first, last in self._series()
            for line in _samples(name, labels, first, last)
        )
        return "\n".join([*lines, "# EOF", ""])

    def _series(self) -> Iterator[tuple[str, Labels, int, int]]:
        """Names and labels, with the first minute and the last."""
        for metric in (*trainer.TRAINER, *VLLM):
            for attempt, first, last in (("1", 0, RESTART - 2), ("2", RESTART, MINUTES)):
                pod = {
                    "namespace": "team",
                    "grpojob": "run",
                    "attempt": attempt,
                    "pod": f"run-{attempt}-0",
                }
                yield from (
                    (name, {**pod, **labels}, first, last) for name, labels in self._of(metric)
                )
        for metric in operator.OPERATOR:
            yield from (
                (name, {**_OPERATOR, **labels}, 0, MINUTES) for name, labels in self._of(metric)
            )
        for name in ("process_resident_memory_bytes", "process_cpu_seconds_total"):
            yield name, _OPERATOR, 0, MINUTES
        if self.gpus:
            whose = {"namespace": "team", "grpojob": "run", "modelName": "H100"}
            yield from ((rule.name, whose, 0, MINUTES) for rule in recording_rules.RULES)

    def _of(self, metric: Metric) -> Iterator[tuple[str, Labels]]:
        if metric in _special():
            yield from _special()[metric]
        elif not self._absent(metric):
            choices = [_VALUES.get(label, (_single(label),)) for label in metric.labels]
            for values in product(*choices):
                labels = dict(zip(metric.labels, values, strict=True))
                yield from _parts(metric, labels)

    def _absent(self, metric: Metric) -> bool:
        of_gpus = "memory" in metric.name and "host" not in metric.name
        unpriced = metric in (operator.JOB_GPU_SECONDS, operator.JOB_COST)
        of_reference = metric.key == "kl" or metric in (trainer.MAX_KL, trainer.REFERENCE_EVERY)
        of_engines = any(part in metric.name for part in ("engine", "weight", "importance", "vllm"))
        absent = (
            (self.gpus, of_gpus or unpriced),
            (self.reference, of_reference),
            (self.engines, of_engines),
        )
        return any(concerned and not there for there, concerned in absent)


def _single(label: str) -> str:
    return {"namespace": "team", "grpojob": "run", "phase": "Running"}.get(label, f"a-{label}")


def _special() -> dict[Metric, list[tuple[str, Labels]]]:
    def of(metric: Metric, job: str, **more: str) -> tuple[str, Labels]:
        return metric.name, {"namespace": "team", "grpojob": job, **more}

    phases = [
        of(operator.JOB_PHASE, job, phase=phase)
        for job, phase in {"run": "Running", **_OTHERS}.items()
    ]
    failed = of(operator.JOB_CONDITION, "broken", type="Failed", reason="DivergedKL")
    degraded = of(operator.JOB_CONDITION, "run", type="Degraded", reason="OutOfMemory")
    return {operator.JOB_PHASE: phases, operator.JOB_CONDITION: [failed, degraded]}


def _parts(metric: Metric, labels: Labels) -> Iterator[tuple[str, Labels]]:
    if metric.kind == "histogram":
        yield from ((f"{metric.name}_bucket", {**labels, "le": bound}) for bound in _BOUNDS)
        yield f"{metric.name}_count", labels
    else:
        yield metric.name, labels


def _samples(name: str, labels: Labels, first: int, last: int) -> Iterator[str]:
    named = ",".join(f'{label}="{value}"' for label, value in labels.items())
    for minute in range(first, last + 1):
        yield f"{name}{{{named}}} {_value(name, labels, minute)} {START + 60 * minute}"


def _value(name: str, labels: Labels, minute: int) -> float:
    if "timestamp_seconds" in name:
        return START + 60.0 * minute
    if name == trainer.FINDING.name:
        return float(minute >= 2 * RESTART)
    slope = 1 + _BOUNDS.index(labels["le"]) if "le" in labels else 1
    return (
        1.0
        if name.endswith(("_info", "_phase", "_condition", "_every_steps"))
        else 1.0 + slope * minute // 10
    )
