"""Operator: whether the operator itself keeps up, what fails, and what it needs."""

from grpo_api.report import metrics as operator
from grpo_api.report.metrics import CONTROLLER

from ..alerts.alert import OPERATOR_UID
from ..alerts.controller import ALERTS
from .first_row import firing_alerts
from .panels import Color, Dashboard, Panel, Query, Row, Variable
from .promql import CLUSTER, UP, WINDOW, quantiles, rates, select, zero_if_uncounted

_OURS = f'{CLUSTER},name="{CONTROLLER}"'
_RECONCILER = f'{CLUSTER},controller="{CONTROLLER}"'
_WATCHES = select(operator.HEARD, CLUSTER)
_RESULTS: dict[str, Color] = {
    "success": "green",
    "error": "red",
    "sent": "green",
    "refused": "red",
    "dropped": "orange",
}


def _process(name: str) -> str:
    """A `process_*` metric of the operator's pods alone."""
    return f"{name}{{{CLUSTER}}} and on (cluster, job, instance) {UP}"


def _errors() -> str:
    every = f"sum(rate({select(operator.RECONCILES, _RECONCILER)}[10m]))"
    where = f'{_RECONCILER},result="error"'
    return f"(sum(rate({select(operator.RECONCILES, where)}[10m])) or vector(0)) / ({every} > 0)"


_UNREADABLE = f"max by (cluster, resource) ({select(operator.UNREADABLE_OBJECTS, CLUSTER)})"
"""Every operator counts them, followers too."""
_WAITING = f"max by (cluster, job, reason) ({select(operator.JOBS_WAITING, CLUSTER)})"
"""Of each operator: there may be several, each with jobs of its own."""
_OWN_ALERTS = "|".join(alert.name for alert in ALERTS)
_LEADERS = f"sum by (cluster, job) ({select(operator.LEADER, CLUSTER)})"
"""Of each operator: shown is that of one that has none or two, if there is any."""
_LEADER_BY_REPLICA = f"max by (instance) ({select(operator.LEADER, CLUSTER)})"
_MEMORY_SHARE = (
    f"max by (instance) ({_process('process_resident_memory_bytes')}) / "
    f"max by (instance) ({select(operator.MEMORY_LIMIT, CLUSTER)})"
)
_NOW = (
    firing_alerts(f'{CLUSTER},alertname=~"{_OWN_ALERTS}"', "on the operator", 10),
    Panel(
        kind="stat",
        title="Leaders",
        description="Of each operator. Without one nothing starts; two of them contradict.",
        queries=(Query(f"max({_LEADERS} != 1) or max({_LEADERS}) or vector(0)", "leaders"),),
        width=4,
        height=4,
        base="red",
        bounds=((1, "green"), (2, "red")),
    ),
    Panel(
        kind="stat",
        title="Replicas",
        description="Pods of the operator that were scraped.",
        queries=(Query(f"count({UP}) or vector(0)", "replicas"),),
        width=5,
        height=4,
        base="red",
        bounds=((1, "green"),),
    ),
    Panel(
        kind="stat",
        title="Version",
        description="Of the replicas; two while one replaces the other.",
        queries=(Query(f"count by (version) ({UP})", ""),),
        width=5,
        height=4,
        label="version",
        empty="No data of an operator",
    ),
    Panel(
        kind="stat",
        title="Reconciles that fail",
        description=(
            "Share in ten minutes. The log says whether the API server denies something "
            "or doesn't answer."
        ),
        unit="percentunit",
        queries=(Query(_errors(), "share"),),
        width=6,
        height=3,
        bounds=((0.01, "orange"), (0.1, "red")),
        empty="No reconcile reported",
    ),
    Panel(
        kind="stat",
        title="Deafest watch",
        description="Time since the last LIST, event or bookmark, of the kind that has waited longest.",
        unit="s",
        queries=(Query(f"time() - min({_WATCHES})", "age"),),
        width=6,
        height=3,
        bounds=((300, "orange"), (600, "red")),
        empty="No data of an operator",
    ),
    Panel(
        kind="stat",
        title="Objects it can't read",
        description=(
            "Left alone, since this version doesn't understand them; the Readable "
            "condition says why."
        ),
        queries=(Query(zero_if_uncounted(f"sum({_UNREADABLE})"), "objects"),),
        width=6,
        height=3,
        bounds=((1, "orange"),),
        empty="No data of an operator",
    ),
    Panel(
        kind="stat",
        title="Memory, of its limit",
        description="Resident bytes of the fullest replica over its container's limit.",
        unit="percentunit",
        queries=(Query(f"max({_MEMORY_SHARE})", "share"),),
        width=6,
        height=3,
        bounds=((0.8, "orange"), (0.9, "red")),
        empty="No memory limit reported",
    ),
    Panel(
        title="Leader by replica",
        # Without a line at 2: a cluster may have several operators, each with a leader.
        description="1 for the replica that leads. Those of an operator make 1 together.",
        queries=(Query(_LEADER_BY_REPLICA, "{{instance}}"),),
        width=12,
        height=6,
        reach=2,
        stacked=True,
        empty="No data of an operator",
    ),
    Panel(
        title="Jobs that wait, by reason",
        description="By status.reason; docs/reference/conditions.md explains each.",
        queries=(Query(f"sum by (reason) ({_WAITING})", "{{reason}}"),),
        width=12,
        height=6,
        stacked=True,
        empty="No waiting job reported",
    ),
)
_QUEUE = (
    Panel(
        title="Jobs that wait for a reconcile",
        description=(
            "Near 0 when it keeps up; beside it those that are worked on, and how many "
            "may be at a time."
        ),
        queries=(
            Query(f"sum({select(operator.QUEUE_DEPTH, _OURS)})", "wait"),
            Query(f"sum({select(operator.ACTIVE_WORKERS, _RECONCILER)})", "worked on"),
            Query(
                f"sum({select(operator.MAX_WORKERS, _RECONCILER)})", "at most at a time", "limit"
            ),
        ),
    ),
    Panel(
        title="Time in the queue",
        description="From an event to the start of its reconcile.",
        unit="s",
        queries=quantiles(operator.QUEUE_SECONDS, _OURS),
        bounds=((5, "orange"), (60, "red")),
        empty="No event in this time",
    ),
    Panel(
        title="Duration of a reconcile",
        description=(
            "API calls included. When it grows with the API server's answers, the API "
            "server is slow."
        ),
        unit="s",
        queries=quantiles(operator.RECONCILE_SECONDS, _RECONCILER),
        bounds=((5, "orange"), (30, "red")),
        empty="No reconcile in this time",
    ),
    Panel(
        title="Put into the queue",
        description="Jobs per second, by events and timers, and again after a failure.",
        unit="ops",
        queries=(
            Query(f"sum(rate({select(operator.QUEUE_ADDS, _OURS)}{WINDOW}))", "put"),
            Query(
                f"sum(rate({select(operator.QUEUE_RETRIES, _OURS)}{WINDOW}))",
                "again after a failure",
            ),
        ),
    ),
    Panel(
        title="Reconciles by result",
        description="Per second. A requeue after a conflict is harmless, an error is in the log.",
        unit="ops",
        queries=(Query(rates("result", operator.RECONCILES, _RECONCILER), "{{result}}"),),
        colors=_RESULTS,
        empty="No reconcile in this time",
    ),
    Panel(
        title="Oldest reconcile under way",
        description=(
            "One that never ends holds a worker: see the log for the last line about its job."
        ),
        unit="s",
        queries=(Query(f"max({select(operator.QUEUE_LONGEST, _OURS)})", "oldest"),),
        bounds=((60, "orange"), (300, "red")),
    ),
)
_TALK = (
    Panel(
        title="Requests to the API server by answer",
        description=(
            "Per second. 409 is a conflict that is tried again, 403 a missing right, 429 "
            "and 5xx its trouble."
        ),
        unit="reqps",
        queries=(Query(rates("code", operator.API_REQUESTS), "{{code}}"),),
        empty="No request in this time",
    ),
    Panel(
        title="Requests to the API server by what for",
        description="Per second, by verb and kind of object, the twelve most frequent.",
        unit="reqps",
        queries=(
            Query(
                f"topk(12, {rates('method, resource', operator.API_REQUESTS)})",
                "{{method}} {{resource}}",
            ),
        ),
        empty="No request in this time",
    ),
    Panel(
        title="Time since a watch received something",
        description=(
            "By kind of object. The API server sends bookmarks every minute or so, so "
            "that age means deafness."
        ),
        unit="s",
        queries=(Query(f"time() - min by (resource) ({_WATCHES})", "{{resource}}"),),
        bounds=((300, "orange"), (600, "red")),
    ),
    Panel(
        title="Looks at running gangs",
        description=(
            "Pulls of rank 0's progress per second. Errors mean a network policy, or a "
            "process that hangs."
        ),
        unit="ops",
        queries=(Query(rates("result", operator.PROGRESS_PULLS), "{{result}}"),),
        width=8,
        colors=_RESULTS,
        empty="No pull in this time",
    ),
    Panel(
        title="Spans of traces",
        description="Per second, by what became of them. Dropped ones found a collector away.",
        unit="ops",
        queries=(Query(rates("result", operator.SPANS), "{{result}}"),),
        width=8,
        colors=_RESULTS,
        empty="No span in this time",
    ),
    Panel(
        title="Events on jobs",
        description=(
            "Per second, by what became of them. Refused ones lack a right, dropped ones "
            "came too fast."
        ),
        unit="ops",
        queries=(Query(rates("result", operator.EVENTS), "{{result}}"),),
        width=8,
        colors=_RESULTS,
        empty="No event in this time",
    ),
)
_PROCESS = (
    Panel(
        title="Lateness of its timers",
        description=(
            "Lag of the event loop. Above a second, something computes too long, or the "
            "CPU is short."
        ),
        unit="s",
        queries=quantiles(operator.LOOP_LAG, CLUSTER),
        bounds=((0.25, "orange"), (1, "red")),
    ),
    Panel(
        title="Memory of the operator",
        description="Resident bytes; they grow with the objects that it watches, not with time.",
        unit="bytes",
        queries=(
            Query(
                f"max by (instance) ({_process('process_resident_memory_bytes')})", "{{instance}}"
            ),
            Query(f"max({select(operator.MEMORY_LIMIT, CLUSTER)})", "limit", "limit"),
        ),
    ),
    Panel(
        title="CPU of the operator",
        description=(
            "Cores in use. It has one thread for its work, so that near 1 it can't keep up."
        ),
        queries=(
            Query(
                f"max by (instance) (rate(process_cpu_seconds_total{{{CLUSTER}}}{WINDOW}) "
                f"and on (cluster, job, instance) {UP})",
                "{{instance}}",
            ),
        ),
        bounds=((0.8, "orange"),),
    ),
)
_CHANGES = (
    Panel(
        kind="bargauge",
        title="Time without a leader at the last change",
        description="From the last sign of the leader before until the present one worked.",
        unit="s",
        queries=(
            Query(f"max by (instance) ({select(operator.TAKEOVER, CLUSTER)})", "{{instance}}"),
        ),
        width=12,
        height=5,
        bounds=((30, "orange"),),
        empty="No change reported",
    ),
    Panel(
        kind="table",
        title="Jobs whose reconcile fails",
        description="Failures in a row. The operator's log has the error of each.",
        queries=(
            Query(
                f"max by (cluster, namespace, grpojob) ({select(operator.JOB_RECONCILE_FAILURES, CLUSTER)})",
                "",
            ),
        ),
        width=12,
        height=5,
        columns={"namespace": "Namespace", "grpojob": "Job", "Value": "Failures"},
        to_job=True,
        empty="No failing job reported",
    ),
)
DASHBOARD = Dashboard(
    uid=OPERATOR_UID,
    title="GRPO / Operator",
    description="Whether the operator keeps up, what fails, and what it needs.",
    since="now-3h",
    variables=(Variable("cluster", "Cluster", operator.BUILD_INFO.name, "cluster", many=True),),
    rows=(
        Row("What is wrong now?", _NOW),
        Row("Does somebody lead, and which job fails?", _CHANGES),
        Row("Does it keep up?", _QUEUE),
        Row("Whom does it talk to?", _TALK),
        Row("What does it need?", _PROCESS),
    ),
)
