"""Alerts on how a run learns: its findings, its rewards and non-finite numbers.

Nobody else looks at a run for hours, and GPUs work as hard for a model that nobody wants. The rules
on KL, entropy, gradients, groups and lengths are the trainer's own: it sees every step, Prometheus
one in several.
"""

from grpo_api.findings.diagnosis import TIME_FINDINGS
from grpo_api.report.metrics import JOB_CONDITION, JOB_PHASE, JOB_STEP
from grpo_api.report.report import Result
from grpo_api.report.training_metrics import (
    FINDING,
    NONFINITE_STEPS,
    STEP,
    UNSCORED,
)
from grpo_api.status.status import Phase

from .alert import JOB, PER_JOB, Alert

ALERTS = (
    Alert(
        name="GRPORunFinding",
        expression=f"max by (cluster, namespace, grpojob, finding) ({FINDING.name}) > 0",
        for_="10m",
        summary=f"{{{{ $labels.finding }}}} in {JOB}",
        description=(
            "The numbers of the run's steps show that it does not learn as it should, or that it "
            "waits. `grpo status` has since when, the evidence and what people change."
        ),
        runbook=(
            "Straggler: `grpo_training_straggler` names rank, pod and node. A restart avoids the "
            "node once the rank has been slow for 50 steps.",
            "[findings.md](findings.md) has the rule and its limits.",
        ),
        info_findings=TIME_FINDINGS,
    ),
    Alert(
        name="GRPOTrainingUnseen",
        expression=(
            # The operator has read a step of rank 0: a job's own program may serve none.
            f'{PER_JOB} ({JOB_PHASE.name}{{phase="{Phase.RUNNING}"}}) and '
            f"{PER_JOB} ({JOB_STEP.name}) unless {PER_JOB} ({STEP.name})"
        ),
        for_="10m",
        summary=f"Prometheus has no metrics of the running job {JOB}",
        description=(
            "No other alert on how it learns can fire, and its dashboard shows nothing. "
            "`grpo status` has its findings all the same: the operator asks rank 0 itself."
        ),
        runbook=(
            "Does Prometheus' page of targets have rank 0 (PodMonitor `…-training`)?",
            "The NetworkPolicy of training pods admits scrapes only from the pods that "
            "`trainerPods.networkPolicy.monitoring` selects: add those of VictoriaMetrics, Alloy "
            "or a renamed Prometheus.",
            "`grpo status` says `ProgressUnknown`: rank 0 answers nobody.",
        ),
    ),
    Alert(
        name="GRPONotFinite",
        expression=(
            f"sum by (cluster, namespace, grpojob) (increase({NONFINITE_STEPS.name}[15m])) > 0 or "
            f'{PER_JOB} ({JOB_CONDITION.name}{{reason="{Result.DIVERGED}"}}) > 0'
        ),
        for_="0m",
        summary=f"{JOB} has logged a number that is not finite",
        description=(
            "A loss, gradient norm, KL, reward or entropy was infinite or NaN. The run ends as "
            "Diverged before a checkpoint is written. With guard.onDivergence: Rollback it goes on "
            "without that batch."
        ),
        runbook=(
            "`status.outcome.message` names the number, the step and the last good checkpoint.",
            (
                "Look for rewards of extreme size; a new job may have a lower "
                "`training.learningRate` or `maxGradNorm`."
            ),
        ),
    ),
    Alert(
        name="GRPORewardsUnscored",
        expression=f"{PER_JOB} ({UNSCORED.name}) > <unscoredShare>",
        for_="5m",
        summary=f"{{{{ $value | humanizePercentage }}}} of the completions of {JOB} get no reward",
        description=(
            "A reward function or its service fails or takes too long. Above "
            "rewards[].maxFailureShare the run ends as RewardError."
        ),
        runbook=(
            "`grpo logs` has the failures' words; `grpo_training_reward_failures_total` and "
            "`grpo_training_reward_timeouts_total` distinguish failures from time-outs, by reward.",
            "Look after the service; its URL, time-outs and `maxFailureShare` may be changed while "
            "the job is suspended.",
        ),
    ),
)
