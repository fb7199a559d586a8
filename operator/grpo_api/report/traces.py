"""Every span and attribute of an attempt's trace, declared once.

What the operator sends and what docs/reference/traces.md explains can't disagree that way. Names of
attributes are those of OpenTelemetry's semantic conventions where there is one, else they begin
with `grpo.`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpanName:
    """A kind of span."""

    name: str
    """What it is called; the same in every trace."""
    parent: str
    """Name of the span that it is a part of; empty for the root."""
    help: str
    """From when till when it is."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of a resource or a span."""

    key: str
    """Its key."""
    on: str
    """What has it: `resource`, or names of spans."""
    help: str
    """A sentence on its value."""


ATTEMPT = SpanName(
    "attempt", "", "The whole attempt: from when the job began to wait for it until it ended."
)
QUEUED = SpanName("queued", "attempt", "Until it was admitted.")
BOUND = SpanName("bound", "attempt", "From there until all of its pods had a node.")
STARTED = SpanName("started", "attempt", "From there until all of its pods ran.")
LOADED = SpanName(
    "loaded",
    "attempt",
    "From rank 0's start until the ranks had met, and model and data were loaded.",
)
PROVEN = SpanName(
    "proven",
    "attempt",
    "From there to training: weights proven equal, trainer built, checkpoint restored.",
)
FIRST_STEP = SpanName("first step", "attempt", "The attempt's first step, with parts as any other.")
STEP = SpanName("step", "attempt", "Every Nth step, with the checkpoint that was written after it.")
PARTS = tuple(
    SpanName(name, "step", what)
    for name, what in (
        ("generating", "Generating completions."),
        ("scoring", "Waiting for their rewards."),
        ("training", "The rest of the step."),
        ("saving", "Writing and sealing a checkpoint."),
    )
)
"""Parts of a step, by their names in grpo_api.text.timing.Clock; those that took no time have no
span."""
SPAN_NAMES = (ATTEMPT, QUEUED, BOUND, STARTED, LOADED, PROVEN, FIRST_STEP, STEP, *PARTS)

MAX_STEPS = 1000
"""Steps of an attempt that have a span, at most."""


def stride(every: int, total_steps: int) -> int:
    """Every which step has a span: every Nth, or of a run with more than MAX_STEPS of these, a
    multiple of it."""
    return every * max(1, -(-total_steps // (every * MAX_STEPS)))


_ALL, _ROOT = "resource", ATTEMPT.name
SERVICE_NAME = Attribute("service.name", _ALL, "`grpo-operator`, which sends for the pods.")
SERVICE_VERSION = Attribute("service.version", _ALL, "The operator's version.")
NAMESPACE = Attribute("k8s.namespace.name", _ALL, "Namespace of the GRPOJob.")
K8S_JOB = Attribute("k8s.job.name", _ALL, "The attempt's Job, `<job>-<attempt>`.")
JOB_NAME = Attribute("grpo.job.name", _ALL, "Name of the GRPOJob.")
JOB_UID = Attribute("grpo.job.uid", _ALL, "Its uid.")
ATTEMPT_NUMBER = Attribute("grpo.attempt", _ALL, "Number of the attempt, from 1.")
MODEL = Attribute("grpo.model", _ROOT, "spec.model.name.")
STRATEGY = Attribute("grpo.strategy", _ROOT, "Reference strategy of the plan.")
NODES = Attribute("grpo.nodes", _ROOT, "Pods of the gang.")
GPUS = Attribute("grpo.gpus", _ROOT, "GPUs of the gang; 0 on CPUs.")
RESULT = Attribute(
    "grpo.result",
    _ROOT,
    "How it ended: the result of its outcome, or the reason in the status; `Deleted` where the "
    "GRPOJob is gone or another controller's.",
)
ERROR = Attribute(
    "error.type",
    _ROOT,
    "The same, if the attempt failed; the span's status is then ERROR and says why. Preemption, "
    "suspension and a gang that was released are no failures.",
)
STEP_NUMBER = Attribute(
    "grpo.step",
    f"{_ROOT}, {FIRST_STEP.name}, {STEP.name}",
    "Number of the step; of an attempt, the last known.",
)
_LOADED_PARTS = {
    "imports": "from the process's start until its libraries were imported",
    "rendezvous": "until the ranks had met",
    "load": "of loading the policy",
    "data": "of loading the data",
    "verify": "of finding the checkpoint to begin with",
}
_PROVEN_PARTS = {
    "trainer": "of building the trainer, proof and engine included",
    "engine": "of constructing a colocated engine, which compiles for its GPU",
    "proof": "of proving that all ranks have the same weights",
}


def _startup_attributes(span: str, parts: Mapping[str, str]) -> tuple[Attribute, ...]:
    return tuple(
        Attribute(f"grpo.startup.{part}", span, f"Seconds {what}.") for part, what in parts.items()
    )


STARTUP = {
    LOADED.name: _startup_attributes(LOADED.name, _LOADED_PARTS),
    PROVEN.name: _startup_attributes(PROVEN.name, _PROVEN_PARTS),
}
"""By span: parts of the start-up as rank 0 reports them in Progress.startup_seconds, by the last
word of the key."""
ATTRIBUTES = (
    *(SERVICE_NAME, SERVICE_VERSION, NAMESPACE, K8S_JOB, JOB_NAME, JOB_UID, ATTEMPT_NUMBER),
    *(MODEL, STRATEGY, NODES, GPUS, RESULT, ERROR, STEP_NUMBER),
    *(attribute for parts in STARTUP.values() for attribute in parts),
)
