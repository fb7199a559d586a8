"""Alerts on how a run learns: its KL, its rewards and non-finite numbers.

Nobody else looks at a run for hours, and GPUs work as hard for a model that nobody wants.
"""

from grpo_api.report.metrics import JOB_CONDITION
from grpo_api.report.report import Result
from grpo_api.report.training_metrics import (
    FINDING,
    MAX_KL,
    NONFINITE_STEPS,
    TRAINING,
    UNSCORED,
)

from .alert import JOB, PER_JOB, Alert

_BY_KEY = {metric.key: metric.name for metric in TRAINING}
_KL = f"{PER_JOB} ({_BY_KEY['kl']})"
_MEAN_KL = f"{PER_JOB} (avg_over_time({_BY_KEY['kl']}[30m]))"
_EARLIER_KL = f"{PER_JOB} (avg_over_time({_BY_KEY['kl']}[30m] offset 2h))"

ALERTS = (
    Alert(
        name="GRPORunFinding",
        expression=f"max by (namespace, grpojob, finding) ({FINDING.name}) > 0",
        for_="10m",
        severity="warning",
        summary=f"{{{{ $labels.finding }}}} in {JOB}",
        description=(
            "The numbers of the run's steps show that it does not learn as it should, or that it "
            "waits. `grpo status` has the numbers and what people change."
        ),
        runbook=(
            "`grpo status JOB` names the step since when, the evidence and what people change.",
            "[findings.md](findings.md) has the rule and its limits.",
        ),
        fires_in=(
            "collapsed reward",
            "diverging fast",
            "diverging slowly",
            "straggler",
            "engine computes otherwise",
        ),
    ),
    Alert(
        name="GRPOKLHigh",
        expression=f"{_KL} > <maxKL>",
        for_="5m",
        severity="warning",
        summary=f"The KL of {JOB} is {{{{ $value | humanize }}}} nats per token",
        description=(
            "The policy is far from its reference, and what it writes is likely to be useless. "
            "Look at samples, and "
            "stop "
            "the run or lower training.learningRate."
        ),
        runbook=(
            (
                "Look at what the policy writes: `/samples` of rank 0, or `samples.jsonl` beside "
                "the "
                "checkpoints."
            ),
            "Lower `training.learningRate`, or raise `training.beta`. Both need a new job; "
            "`resumeFrom` continues a "
            "checkpoint from before.",
            (
                "Set `guard.maxKL`, so that such a run ends by itself, or goes back with "
                "`guard.onDivergence: Rollback`."
            ),
        ),
        fires_in=("diverging fast", "diverging slowly"),
    ),
    Alert(
        name="GRPOKLNearGuard",
        expression=f"{_KL} > <guardShare> * {PER_JOB} ({MAX_KL.name})",
        for_="2m",
        severity="warning",
        summary=f"The KL of {JOB} is {{{{ $value | humanize }}}}, close to guard.maxKL",
        description=(
            "Above guard.maxKL for guard.maxKLSteps steps, the run ends as DivergedKL or goes back."
        ),
        runbook=(
            "If the run is to go on, suspend the job, raise `guard.maxKL`, and resume it.",
            "Otherwise nothing is to be done: the guard ends the run.",
        ),
        fires_in=("diverging slowly",),
    ),
    Alert(
        name="GRPOKLRising",
        expression=f"{_MEAN_KL} > <klFloor> and {_MEAN_KL} > <klGrowth> * {_EARLIER_KL}",
        for_="10m",
        severity="warning",
        summary=f"The KL of {JOB} has multiplied within two hours, to {{{{ $value | humanize }}}}",
        description=(
            "A KL that grows and grows ends far away, if slowly. The learning rate is likely to "
            "be too high for this "
            "beta."
        ),
        runbook=(
            (
                "Compare the reward: a KL that rises with it is learning, one that rises alone is "
                "drift."
            ),
            "As for [GRPOKLHigh](#grpoklhigh), while there is time.",
        ),
        fires_in=("diverging slowly",),
    ),
    Alert(
        name="GRPORewardCollapsed",
        expression=(
            f"{PER_JOB} ({_BY_KEY['reward_std']}) < <rewardStd> and "
            f"{PER_JOB} ({_BY_KEY['zero_variance_groups']}) > <zeroVarianceShare>"
        ),
        for_="30m",
        severity="warning",
        summary=f"All completions of a group get the same reward in {JOB}",
        description=(
            "Without a difference within a group there is no advantage and no gradient. The task "
            "is solved, too "
            "hard, or "
            "the reward function is constant."
        ),
        runbook=(
            "Is the reward at its maximum? Then the task is solved: stop the run.",
            "Is it at its minimum? Then look at samples: the policy may not have found the "
            "format, so give a reward "
            "for "
            "parts of it, or an easier task first.",
            "Otherwise try the reward function on a few completions by hand.",
        ),
        fires_in=("collapsed reward",),
    ),
    Alert(
        name="GRPONotFinite",
        expression=(
            f"sum by (namespace, grpojob) (increase({NONFINITE_STEPS.name}[15m])) > 0 or "
            f'{PER_JOB} ({JOB_CONDITION.name}{{reason="{Result.DIVERGED}"}}) > 0'
        ),
        for_="0m",
        severity="warning",
        summary=f"{JOB} has had a number that is none",
        description=(
            "A loss, gradient norm, KL, reward or entropy was infinite or NaN. The run ends as "
            "Diverged before a "
            "checkpoint is written, or goes back with guard.onDivergence: Rollback."
        ),
        runbook=(
            "`status.outcome.message` names the number, the step and the last good checkpoint.",
            (
                "Look for rewards of extreme size; a new job may have a lower "
                "`training.learningRate` "
                "or `maxGradNorm`."
            ),
            "`guard.onDivergence: Rollback` goes on without the batch that it happened on.",
        ),
        fires_in=("NaN",),
    ),
    Alert(
        name="GRPORewardsUnscored",
        expression=f"{PER_JOB} ({UNSCORED.name}) > <unscoredShare>",
        for_="5m",
        severity="warning",
        summary=f"{{{{ $value | humanizePercentage }}}} of the completions of {JOB} get no reward",
        description=(
            "A reward function or its service fails or takes too long. Above "
            "rewards[].maxFailureShare the run ends as "
            "RewardError."
        ),
        runbook=(
            "`grpo logs` has the failures' words; `grpo_training_reward_failures_total` and "
            "`grpo_training_reward_timeouts_total` tell failures from time-outs, by reward.",
            "Look after the service; its URL, time-outs and `maxFailureShare` may be changed "
            "while the job is "
            "suspended.",
        ),
        fires_in=("rewards unscored",),
    ),
)
