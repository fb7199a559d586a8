"""Fleet: what all jobs do, who waits for how long, what the GPUs are doing, what fails, and which
run is odd."""

from grpo_api.report import metrics as operator
from grpo_api.report.metrics import Metric
from grpo_api.status.status import ConditionType, Phase

from .. import recording
from . import usage
from .panels import Dashboard, Panel, Query, Row, Variable
from .promql import (
    A_JOB,
    CLUSTER,
    JOB_LEGEND,
    NAMESPACES,
    of_jobs,
    select,
    trend,
    zero_if_uncounted,
)
from .verdicts import PHASE_COLORS

_JOBS = select(operator.JOBS, NAMESPACES)
_WAITING = of_jobs(operator.JOB_PHASE, f'phase=~"{Phase.PENDING}|{Phase.QUEUED}"')
_HOLDING = of_jobs(operator.JOB_PHASE, f'phase=~"{Phase.STARTING}|{Phase.RUNNING}"')
_FAILED = select(operator.JOB_CONDITION, f'{NAMESPACES},type="{ConditionType.FAILED}"')
_RESTARTS = select(operator.RESTARTS, CLUSTER)
_UNKNOWN = "No operator answers"
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
    chosen = select(operator.JOBS, f'{NAMESPACES},phase=~"{"|".join(phases)}"')
    return Panel(
        kind="stat",
        title=title,
        description=description,
        unit="none",
        queries=(Query(zero_if_uncounted(f"sum({chosen})"), "jobs"),),
        width=5,
        height=3,
        empty=_UNKNOWN,
    )


_NOW = (
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
    Panel(
        kind="stat",
        title="Failed within an hour",
        description="Jobs that ended so; the table below says why.",
        unit="none",
        queries=(Query(zero_if_uncounted(f"count({_FAILED})"), "jobs"),),
        width=5,
        height=3,
        base="green",
        bounds=((1, "orange"), (5, "red")),
        empty=_UNKNOWN,
    ),
    Panel(
        kind="stat",
        title="GPUs held",
        description="By all gangs that start or run.",
        unit="none",
        queries=(Query(zero_if_uncounted(f"sum({_gpus('product')})"), "GPUs"),),
        width=4,
        height=3,
        empty=_UNKNOWN,
    ),
)
_QUEUE = (
    Panel(
        title="Jobs by phase",
        description="All GRPOJobs there are, those that have ended among them.",
        unit="none",
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
        empty="Nobody is known to wait",
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
        empty="No job got that far in this time",
    ),
)
_GPUS = (
    Panel(
        title="GPUs held, by product",
        description="By gangs that start or run, as planned for them.",
        unit="none",
        queries=(Query(_gpus("product"), "{{product}}"),),
        width=12,
        stacked=True,
        empty="No gang holds a GPU",
    ),
    Panel(
        title="GPUs held, by namespace",
        description="By gangs that start or run; the twelve namespaces with most.",
        unit="none",
        queries=(Query(f"topk(12, {_gpus('namespace')})", "{{namespace}}"),),
        width=12,
        stacked=True,
        empty="No gang holds a GPU",
    ),
    Panel(
        title="GPUs free, by product",
        description="Held by no pod, whoever's they would be.",
        unit="none",
        queries=(
            Query(f"sum by (modelName) ({recording.FREE.name}{{{CLUSTER}}})", "{{modelName}}"),
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
        unit="none",
        queries=(
            Query(
                f"topk(12, {recording.IDLE.name}{{{NAMESPACES}}})", "{{modelName}} {{namespace}}"
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
        unit="none",
        queries=(Query(f"round(sum by (reason) (increase({_RESTARTS}[$__range])))", "{{reason}}"),),
        base="blue",
        bounds=((10, "orange"),),
        empty="No restart since the operator started",
    ),
    Panel(
        kind="bargauge",
        title="Failed jobs by reason",
        description="Jobs that failed within the last hour.",
        unit="none",
        queries=(Query(f"count by (reason) ({_FAILED})", "{{reason}}"),),
        base="orange",
        empty="No failure is known",
    ),
    Panel(
        kind="table",
        title="Failed jobs",
        description="Within the last hour. `kubectl describe grpojob` says what to change.",
        unit="none",
        queries=(Query(f"max by ({A_JOB}, reason) ({_FAILED})", ""),),
        columns={**_JOB_COLUMNS, "reason": "Reason"},
        to_job=True,
        empty="No failure is known",
    ),
)
_ODD_ONES = (
    Panel(
        title="Highest KL",
        description="Nats per token, the ten jobs furthest from their reference.",
        unit="none",
        queries=(Query(f"topk(10, {of_jobs('kl')})", JOB_LEGEND),),
        base="green",
        bounds=((2, "red"),),
        reach=2.2,
        to_job=True,
        empty="No job trains with a reference",
    ),
    Panel(
        title="Falling rewards",
        description="Mean of half an hour less the half hour before: the ten jobs that lost most.",
        unit="none",
        queries=(Query(f"bottomk(10, {trend(of_jobs('reward'))})", JOB_LEGEND),),
        to_job=True,
        empty="No job has trained for an hour",
    ),
    Panel(
        title="Slowest rank over the median",
        description="The ten jobs that wait most for one of their ranks.",
        unit="none",
        queries=(Query(f"topk(10, {of_jobs('straggler_ratio')})", JOB_LEGEND),),
        base="green",
        bounds=((1.5, "orange"), (2, "red")),
        reach=2.2,
        to_job=True,
        empty="No job has several ranks",
    ),
)
_INFO = operator.JOB_INFO.name
DASHBOARD = Dashboard(
    uid="grpo-fleet",
    title="GRPO / Fleet",
    description="All jobs: their phases, the queue, the GPUs, failures, and runs that are odd.",
    since="now-12h",
    variables=(
        Variable("cluster", "Cluster", _INFO, "cluster", many=True),
        Variable("namespace", "Namespace", f"{_INFO}{{{CLUSTER}}}", "namespace", many=True),
    ),
    rows=(
        Row("Now", _NOW),
        Row("Who waits?", _QUEUE),
        Row("What do the GPUs do?", _GPUS),
        Row("What came of it, and what did it cost?", usage.OF_ALL),
        Row("What fails?", _FAILURES),
        Row("Which run is odd?", _ODD_ONES),
    ),
)
