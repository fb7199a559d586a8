"""Alerts on the engines that sample completions: one that is gone, or got other weights.

One that computes otherwise than the trainer is the finding EngineDrift.
"""

from grpo_api.report.metrics import JOB_CONDITION
from grpo_api.report.report import Result
from grpo_api.report.training_metrics import (
    ENGINE_PROOF_FAILURES,
    ENGINE_UP,
)

from .alert import JOB, PER_JOB, Alert

ALERTS = (
    Alert(
        name="GRPOEngineDown",
        expression=f"max by (cluster, namespace, grpojob, engine) ({ENGINE_UP.name}) == 0",
        for_="5m",
        summary=f"Engine {{{{ $labels.engine }}}} of {JOB} has not served for a while",
        description=(
            "The run goes on with the other engines, slower. A new pod of it serves as soon as it "
            "is proven to have the newest weights."
        ),
        runbook=(
            (
                "`kubectl get pods -l grpo.dev/job-name=<job>`: is there a pod of that index, and "
                "what does it wait for?"
            ),
            "Its logs say whether it loads, and those of rank 0 why it was given up.",
            "Without a free GPU it stays away; the job ends as it would have, only later.",
        ),
    ),
    Alert(
        name="GRPOEngineProofFailed",
        expression=(
            f"sum by (cluster, namespace, grpojob) (increase({ENGINE_PROOF_FAILURES.name}[15m])) > 0 or "
            f'{PER_JOB} ({JOB_CONDITION.name}{{reason="{Result.ENGINE_WEIGHTS_DIFFER}"}}) > 0'
        ),
        for_="0m",
        summary=f"An engine of {JOB} did not have the trainer's weights after a sync",
        description=(
            "No completion was sampled with them: the weights were sent again. Where that fails "
            "too, the attempt ends as EngineWeightsDiffer."
        ),
        runbook=(
            "The logs of rank 0 name the tensors. The same node each time points at its memory or "
            "its GPU; all at once at vLLM's version.",
            (
                "If it happens again, set `generation.engine: Transformers` and report it with the "
                "log."
            ),
        ),
    ),
)
