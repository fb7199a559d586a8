"""Fleet: what all jobs do, who waits for how long, what the GPUs are doing, what fails, and which
run is odd."""

from grpo_api.report import metrics as operator
from grpo_api.report import training_metrics as trainer
from grpo_api.report.metrics import Metric
from grpo_api.status.status import ConditionType, Phase

from .. import recording_rules
from ..alerts.alert import FLEET_UID
from . import usage
from .first_row import PHASE_COLORS, firing_alerts
from .panels import Dashboard, Panel, Query, Row, Variable
from .promql import (
    A_JOB,
    CLUSTER,
    JOB_LEGEND,
    NAMESPACES,
    UP,
    of_jobs,
    select,
    zero_if_uncounted,
)

_JOBS = f"max by (cluster, namespace, phase) ({select(operator.JOBS, NAMESPACES)})"
"""Of several operators each may count all jobs."""
_FINDINGS = f"max by ({A_JOB}, finding) ({select(trainer.FINDING, NAMESPACES)}) == 1"
_WAITING = of_jobs(operator.JOB_PHASE, f'phase=~"{Phase.PENDING}|{Phase.QUEUED}"')
_HOLDING = of_jobs(operator.JOB_PHASE, f'phase=~"{Phase.STARTING}|{Phase.RUNNING}"')
_FAILED = select(operator.JOB_CONDITION, f'{NAMESPACES},type="{ConditionType.FAILED}"')
_RESTARTS = select(operator.RESTARTS, CLUSTER)
_REWARD = of_jobs("reward")
_CHANGED_MOST = (
    f"{_REWARD} and on ({A_JOB}) topk(12, stddev_over_time({_REWARD}[$__range:5m] @ end()))"
)
_UNKNOWN = "No data of an operator"
_JOB_COLUMNS = {"namespace": "Namespace", "grpojob": "Job"}


def _gpus(by: str) -> str:
    gpus = f"max by ({A_JOB}, product) ({select(operator.JOB_GPUS, NAMESPACES)})"
    return f"sum by ({by}) ({gpus} * on ({A_JOB}) group_left () {_HOLDING})"


def _waited(metric: Metric) -> tuple[Query, ...]:
    buckets = f"sum by (le) (increase({select(metric, CLUSTER, '_bucket')}[$__range]))"
    what = (
        metric.name.removeprefix("grpo_jobs_time_to_")
        .removesuffix("_seconds")
        .replace("first_step", "1st step")
    )
    return tuple(
        Query(f"histogram_quantile({share}, {buckets})", f"{what}, {share:.0%}")
        for share in (0.5, 0.95)
    )


def _jobs_in(title: str, phases: tuple[Phase, ...], description: str) -> Panel:
    where = f'{NAMESPACES},phase=~"{"|".join(phases)}"'
    chosen = f"max by (cluster, namespace, phase) ({select(operator.JOBS, where)})"
    return Panel(
        kind="stat",
        title=title,
        description=description,
        queries=(Query(zero_if_uncounted(f"sum({chosen})"), "jobs"),),
        width=8,
        height=3,
        empty=_UNKNOWN,
    )


_NOW = (
    firing_alerts(f'{CLUSTER},alertname=~"GRPO.*"', "on jobs and on the operator", 10),
    Panel(
        kind="stat",
        title="Runs with findings",
        description="Jobs of which the numbers of their steps say that something is wrong.",
        queries=(Query(f"count(max by ({A_JOB}) ({_FINDINGS})) or 0 * count({UP})", "jobs"),),
        width=5,
        height=4,
        bounds=((1, "orange"),),
        empty=_UNKNOWN,
    ),
    Panel(
        kind="stat",
        title="Failed within an hour",
        description="Jobs that ended so; the table below says why.",
        queries=(Query(zero_if_uncounted(f"count({_FAILED})"), "jobs"),),
        width=5,
        height=4,
        bounds=((1, "orange"), (5, "red")),
        empty=_UNKNOWN,
    ),
    Panel(
        kind="stat",
        title="GPUs held",
        description="By all gangs that start or run.",
        queries=(Query(zero_if_uncounted(f"sum({_gpus('product')})"), "GPUs"),),
        width=4,
        height=4,
        empty=_UNKNOWN,
    ),
    _jobs_in(
        "Jobs that run",
        (Phase.STARTING, Phase.RUNNING),
        "Whose gang starts or runs, on GPUs or CPUs.",
    ),
    _jobs_in(
        "Jobs that wait",
        (Phase.PENDING, Phase.QUEUED),
        "For GPUs, quota, a dependency or their turn.",
    ),
    _jobs_in(
        "Jobs that begin again",
        (Phase.RESTARTING,),
        "Between two attempts, while the former gang ends or a pause goes on.",
    ),
)
_QUEUE = (
    Panel(
        title="Jobs by phase",
        description="All GRPOJobs there are, those that have ended among them.",
        queries=(Query(f"sum by (phase) ({_JOBS})", "{{phase}}"),),
        stacked=True,
        colors=PHASE_COLORS,
    ),
    Panel(
        kind="table",
        title="Who waits longest",
        description="Time that the job was Pending or Queued within the last day, to a minute.",
        unit="s",
        queries=(Query(f"topk(20, 60 * count_over_time({_WAITING}[1d:1m]) and {_WAITING})", ""),),
        columns={**_JOB_COLUMNS, "Value": "Waited"},
        to_job=True,
        empty="No waiting job reported",
    ),
    Panel(
        kind="bargauge",
        title="Time from creation to each milestone",
        description=(
            "Of first attempts in the time shown: half of the jobs, and 95 of 100, needed "
            "no longer."
        ),
        unit="s",
        queries=tuple(query for metric in operator.TIMES_TO for query in _waited(metric)),
        base="blue",
        empty="No milestone in this time",
    ),
)
_GPUS = (
    Panel(
        title="GPUs held, by product",
        description="By gangs that start or run, as planned for them.",
        queries=(Query(_gpus("product"), "{{product}}"),),
        width=12,
        stacked=True,
        empty="No held GPU reported",
    ),
    Panel(
        title="GPUs held, by namespace",
        description="By gangs that start or run; the twelve namespaces with most.",
        queries=(Query(f"topk(12, {_gpus('namespace')})", "{{namespace}}"),),
        width=12,
        stacked=True,
        empty="No held GPU reported",
    ),
    Panel(
        title="GPUs free, by product",
        description="Held by no pod of any owner.",
        queries=(
            Query(
                f"sum by (modelName) ({recording_rules.FREE.name}{{{CLUSTER}}})", "{{modelName}}"
            ),
        ),
        width=12,
        stacked=True,
        empty=usage.NO_DCGM,
    ),
    Panel(
        title="GPUs held and idle, by namespace",
        description=(
            "Held by any pod, less than 5 % busy for ten minutes: the twelve largest groups."
        ),
        queries=(
            Query(
                f"topk(12, {recording_rules.IDLE.name}{{{NAMESPACES}}})",
                "{{modelName}} {{namespace}}",
            ),
        ),
        width=12,
        stacked=True,
        empty=usage.NO_DCGM,
    ),
)
_FAILURES = (
    Panel(
        kind="bargauge",
        title="Restarts by reason",
        description=(
            "How the attempts before ended, in the time shown. Preempted and node loss "
            "are the cluster's."
        ),
        queries=(Query(f"round(sum by (reason) (increase({_RESTARTS}[$__range])))", "{{reason}}"),),
        base="blue",
        bounds=((10, "orange"),),
        empty="No restart reported",
    ),
    Panel(
        kind="bargauge",
        title="Failed jobs by reason",
        description="Jobs that failed within the last hour.",
        queries=(Query(f"count by (reason) ({_FAILED})", "{{reason}}"),),
        base="orange",
        empty="No failure reported",
    ),
    Panel(
        kind="table",
        title="Failed jobs",
        description="Within the last hour. `kubectl describe grpojob` says what to change.",
        queries=(Query(f"max by ({A_JOB}, reason) ({_FAILED})", ""),),
        columns={**_JOB_COLUMNS, "reason": "Reason"},
        to_job=True,
        empty="No failure reported",
    ),
)
_ODD_ONES = (
    Panel(
        kind="table",
        title="Findings of runs",
        description="`grpo status` has the evidence and what people change.",
        queries=(Query(_FINDINGS, ""),),
        width=12,
        columns={**_JOB_COLUMNS, "finding": "Finding"},
        to_job=True,
        empty="No finding reported",
    ),
    Panel(
        title="Reward of runs",
        description="The twelve jobs with the largest change within the time shown.",
        queries=(Query(_CHANGED_MOST, JOB_LEGEND),),
        width=12,
        to_job=True,
        empty="No reward reported",
    ),
)
_INFO = operator.JOB_INFO.name
DASHBOARD = Dashboard(
    uid=FLEET_UID,
    title="GRPO / Fleet",
    description="All jobs: their phases, the queue, the GPUs, failures, and runs that are odd.",
    since="now-12h",
    variables=(
        Variable("cluster", "Cluster", _INFO, "cluster", many=True),
        Variable("namespace", "Namespace", f"{_INFO}{{{CLUSTER}}}", "namespace", many=True),
    ),
    rows=(
        Row("What is wrong now?", _NOW),
        Row("Who waits?", _QUEUE),
        Row("What do the GPUs do?", _GPUS),
        Row("What came of it, and what did it cost?", usage.OF_ALL),
        Row("What fails?", _FAILURES),
        Row("Which run is odd?", _ODD_ONES),
    ),
)
