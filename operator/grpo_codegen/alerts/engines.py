"""Alerts on the engines that sample completions: one that is gone, or computes otherwise, or got
other weights."""

from grpo_api.report.metrics import JOB_CONDITION
from grpo_api.report.report import Result
from grpo_api.report.training_metrics import (
    ENGINE_MISMATCH,
    ENGINE_PROOF_FAILURES,
    ENGINE_UP,
    MAX_ENGINE_MISMATCH,
)

from .alert import JOB, PER_JOB, Alert

_MISMATCH = f"{PER_JOB} ({ENGINE_MISMATCH.name})"
_ALLOWED = f"<guardShare> * {PER_JOB} ({MAX_ENGINE_MISMATCH.name})"

ALERTS = (
    Alert(
        name="GRPOEngineDown",
        expression=f"max by (namespace, grpojob, engine) ({ENGINE_UP.name}) == 0",
        for_="5m",
        severity="warning",
        summary=f"Engine {{{{ $labels.engine }}}} of {JOB} has not served for a while",
        description=(
            "The run goes on with the other engines, slower. A new pod of it serves as soon as it "
            "is proven to have "
            "the newest weights."
        ),
        runbook=(
            (
                "`kubectl get pods -l grpo.dev/job-name=<job>`: is there a pod of that index, and "
                "what does it wait for?"
            ),
            "Its logs say whether it loads, and those of rank 0 why it was given up.",
            "Without a free GPU it stays away; the job ends as it would have, only later.",
        ),
        fires_in=("engine gone",),
    ),
    Alert(
        name="GRPOEngineMismatchHigh",
        expression=f"{_MISMATCH} > <engineMismatch> or {_MISMATCH} > {_ALLOWED}",
        for_="5m",
        severity="warning",
        summary=f"Engine and trainer of {JOB} are {{{{ $value | humanize }}}} nats per token apart",
        description=(
            "Completions come from another distribution than the one that is trained. Their "
            "weights are corrected for "
            "it, and the larger the difference, the less they teach. Above "
            "guard.maxEngineMismatch the attempt ends, and the next one has another engine "
            "(spec.generation.fallback)."
        ),
        runbook=(
            "The weights are proven to be the same, so the engine computes otherwise: set "
            "`generation.engineArguments.kvCacheDtype` to `auto`, or `training.dtype` to "
            "`float32`.",
            "Does it grow over the run, and entropy fall? Long completions of a policy that is "
            "sure of itself make it "
            "larger.",
            "`generation.engine: Transformers` has none, and is slower.",
        ),
        fires_in=("engine computes otherwise",),
    ),
    Alert(
        name="GRPOEngineProofFailed",
        expression=(
            f"sum by (namespace, grpojob) (increase({ENGINE_PROOF_FAILURES.name}[15m])) > 0 or "
            f'{PER_JOB} ({JOB_CONDITION.name}{{reason="{Result.ENGINE_WEIGHTS_DIFFER}"}}) > 0'
        ),
        for_="0m",
        severity="warning",
        summary=f"An engine of {JOB} did not have the trainer's weights after a sync",
        description=(
            "No completion was sampled with them: the weights were sent again. Where that fails "
            "too, the attempt ends "
            "as EngineWeightsDiffer."
        ),
        runbook=(
            "The logs of rank 0 name the tensors. The same node each time points at its memory or "
            "its GPU; all at once "
            "at vLLM's version.",
            (
                "If it happens again, set `generation.engine: Transformers` and report it with the "
                "log."
            ),
        ),
        fires_in=("engine with other weights",),
    ),
)
