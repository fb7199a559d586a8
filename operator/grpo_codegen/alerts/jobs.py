"""Alerts on how a job gets on: steps, memory, restarts, checkpoints, its wait and its end.

What the operator knows stands in them wherever it does: it also knows of a rank 0 that answers
nobody.
"""

from grpo_api.report.metrics import (
    JOB_ATTEMPTS,
    JOB_CONDITION,
    JOB_PATIENCE,
    JOB_PROGRESS_TIME,
    JOBS_EXPECTED_WAIT,
    JOBS_LONGEST_WAIT,
    RESTARTS,
)
from grpo_api.report.report import Result
from grpo_api.report.training_metrics import (
    CHECKPOINT_STEP,
    CHECKPOINT_TIME,
    MAX_COMPLETION,
    MEMORY,
    PREDICTED_MEMORY,
    SAVE_EVERY,
    STEP,
    STEP_SECONDS,
    TRAINING,
    USABLE_MEMORY,
)
from grpo_api.status.status import ConditionType

from .alert import FLEET_UID, JOB, PER_JOB, Alert

_LONGEST = next(metric.name for metric in TRAINING if metric.key == "completion_length_max")
_STEP = f"{PER_JOB} ({STEP.name})"
_SAVED = f"({PER_JOB} ({CHECKPOINT_STEP.name}) or 0 * {_STEP})"
_SAVE_EVERY = f"{PER_JOB} ({SAVE_EVERY.name})"
_TRAINED = f"{PER_JOB} ({STEP_SECONDS.name}_sum)"
"""Seconds of the attempt's steps: one that has just resumed has an old checkpoint, and nothing to
lose."""
_PEAK = f"{PER_JOB} ({MEMORY.name})"
_PER_WAIT = "max by (cluster, job, reason)"
"""Of each operator: what one lets expect explains no wait of another's jobs."""
_LONGEST_WAIT = f"{_PER_WAIT} ({JOBS_LONGEST_WAIT.name})"
_RATIO = f"{PER_JOB} ({PREDICTED_MEMORY.name}) / {_PEAK}"
_HAS_LONG_COMPLETIONS = (
    f"{PER_JOB} (max_over_time({_LONGEST}[1d]) and {_LONGEST}) > "
    f"<predictionLength> * {PER_JOB} ({MAX_COMPLETION.name})"
)
"""The plan is made for completions as long as the limit: before one came near it, less memory is
used, and that says nothing."""

ALERTS = (
    Alert(
        name="GRPOTrainingStalled",
        expression=(
            f"time() - {PER_JOB} ({JOB_PROGRESS_TIME.name}) > <stalledShare> * {PER_JOB} "
            f"({JOB_PATIENCE.name})"
        ),
        for_="1m",
        summary=f"{JOB} has not got on for {{{{ $value | humanizeDuration }}}}",
        description=(
            "No step has ended; or, while it loads, saves or exports, no part of that; or rank 0 "
            "answers nobody. Its watchdog ends the attempt as Hang after guard.hangTimeoutSeconds, "
            "the operator after twice that."
        ),
        runbook=(
            "`kubectl describe grpojob`: `ProgressUnknown` means that rank 0 doesn't answer; look "
            "whether it trains on (`grpo logs`), and for a NetworkPolicy in the way.",
            "Otherwise a rank hangs, or a reward function doesn't answer; "
            "`status.outcome.standstill` then names the rank and its frame.",
            "A step that may take so long needs a higher `guard.hangTimeoutSeconds`, which may be "
            "changed while the job is suspended.",
        ),
    ),
    Alert(
        name="GRPOMemoryTight",
        expression=f"{_PEAK} / {PER_JOB} ({USABLE_MEMORY.name}) > <memoryShare>",
        for_="5m",
        summary=(
            f"{JOB} uses {{{{ $value | humanizePercentage }}}} of what its fullest GPU has "
            "for torch"
        ),
        description=(
            "A longer completion may run out of memory. The operator would plan again with "
            "less then."
        ),
        runbook=(
            "`status.memory` has prediction and measurement by phase.",
            (
                "Nothing must be done: after OutOfMemory the next attempt has a plan that takes "
                "less, and trains the same."
            ),
        ),
    ),
    Alert(
        name="GRPOPredictionOff",
        expression=(
            f"({_RATIO} < <predictionLow> or {_RATIO} > <predictionHigh>) "
            f"and {_HAS_LONG_COMPLETIONS}"
        ),
        for_="10m",
        summary=(
            f"Memory of {JOB}: {{{{ $value | humanizePercentage }}}} of what is measured was "
            "predicted"
        ),
        description=(
            "Plans that rest on such a prediction fail or leave GPUs idle. Please report it with "
            "the job's status."
        ),
        runbook=(
            "`kubectl get grpojob -o yaml`: `status.memory` and `status.plan` make the report.",
            (
                "Below 100 % the job may run out of memory, and is planned again with what it has "
                "learned."
            ),
        ),
    ),
    Alert(
        name="GRPOJobRestarting",
        expression=(
            f"sum by (cluster, namespace, grpojob) (increase({JOB_ATTEMPTS.name}[1h])) >= <restartsPerHour>"
        ),
        for_="0m",
        summary=f'{JOB} was started {{{{ $value | printf "%.0f" }}}} times within an hour',
        description=(
            "See status.ends for the reasons. Each start costs loading and the steps since the "
            "last checkpoint."
        ),
        runbook=(
            "`status.ends` says how the last attempts ended, and on which node; "
            "[faults.md](../explanation/faults.md) what each means.",
            (
                "Where nodes come and go, the next job should save more often "
                "(`checkpoint.everySteps`)."
            ),
        ),
    ),
    Alert(
        name="GRPODisruptionStorm",
        expression=(
            f'sum by (cluster) (increase({RESTARTS.name}{{reason="{Result.PREEMPTED}"}}[15m])) '
            ">= <disruptions>"
        ),
        for_="0m",
        summary=(
            '{{ $value | printf "%.0f" }} gangs have lost their nodes within a quarter of an hour'
        ),
        description="A node pool is drained, or a higher priority takes its nodes.",
        runbook=(
            "`kubectl get nodes`, and the events of pods: who deleted them?",
            "The jobs start again by themselves as nodes come back.",
        ),
        dashboard=FLEET_UID,
    ),
    Alert(
        name="GRPOJobsWaiting",
        expression=(
            f"{_LONGEST_WAIT} > <waitSeconds> and "
            f"{_LONGEST_WAIT} > {_PER_WAIT} ({JOBS_EXPECTED_WAIT.name})"
        ),
        for_="5m",
        summary=(
            "Jobs wait longer than their queue explains, the longest for {{ $value | "
            "humanizeDuration }}: {{ $labels.reason }}"
        ),
        description=(
            "One alert for all jobs that wait for the same. What a queue explains is one turn of "
            "the jobs that run, until their ETA, for as many jobs as run now."
        ),
        runbook=(
            "`kubectl get grpojobs -A` shows the jobs of this reason; `kubectl describe grpojob` "
            "says for what one waits: GPUs, its turn, a quota, an image.",
            "[conditions.md](conditions.md) explains the reasons.",
            "`grpo plan` says what smaller hardware would do.",
        ),
        dashboard=FLEET_UID,
    ),
    Alert(
        name="GRPOCheckpointOld",
        expression=(
            f"{_STEP} - {_SAVED} > <checkpointsMissed> * {_SAVE_EVERY} or "
            f"{_TRAINED} > <checkpointSeconds> and {_STEP} > {_SAVED} and {_SAVE_EVERY} "
            f"unless time() - {PER_JOB} ({CHECKPOINT_TIME.name}) <= <checkpointSeconds>"
        ),
        for_="10m",
        summary=f"The newest checkpoint of {JOB} is old",
        description=(
            "A restart would lose all steps since. The Degraded condition has the volume's words "
            "if it can't be written."
        ),
        runbook=(
            "`CheckpointNotWritten` at `Degraded`: make room on the volume, or raise its quota. "
            "The run tries again after 1, 2, 4 … steps.",
            "Without that, checkpoints are rare by choice (`checkpoint.everySteps`).",
        ),
    ),
    Alert(
        name="GRPOJobFailed",
        expression=(
            "max by (cluster, namespace, grpojob, reason) "
            f'({JOB_CONDITION.name}{{type="{ConditionType.FAILED}"}}) > 0'
        ),
        for_="0m",
        summary=f"{JOB} has failed: {{{{ $labels.reason }}}}",
        description=(
            "`kubectl describe grpojob` says why and what to change; the last attempt's "
            "logs are kept."
        ),
        runbook=(
            "[faults.md](../explanation/faults.md) says what each reason means and what to do.",
            "The alert ends by itself an hour after the failure.",
        ),
    ),
)
