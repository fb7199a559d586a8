"""The first row of every dashboard: what is wrong now, by name, in the colours of the findings and
the alerts themselves."""

from grpo_api.findings.diagnosis import RULES
from grpo_api.report import metrics as operator
from grpo_api.report import training_metrics as trainer
from grpo_api.spec.run_policy import FindingName
from grpo_api.status.status import Phase

from ..alerts import ALERTS
from .panels import Color, Panel, Query
from .promql import JOB, NONE, firing, of_job, or_none, select

_STEP = f"({of_job(trainer.STEP)} or {of_job(operator.JOB_STEP)})"
PHASE_COLORS: dict[str, Color] = {
    Phase.PENDING: "light-blue",
    Phase.QUEUED: "blue",
    Phase.STARTING: "yellow",
    Phase.RUNNING: "green",
    Phase.RESTARTING: "orange",
    Phase.SUSPENDED: "purple",
    Phase.SUCCEEDED: "dark-green",
    Phase.FAILED: "red",
}
"""What the dashboards paint a job's phase with."""


def _finding_color(finding: FindingName) -> Color:
    return "orange" if RULES[finding].costs == "Time" else "red"


FINDING_COLORS: dict[str, Color] = {
    NONE: "green",
    **{finding: _finding_color(finding) for finding in RULES},
}
"""Orange is what costs time alone."""
ALERT_COLORS: dict[str, Color] = {
    NONE: "green",
    **{alert.name: "red" if alert.severity == "critical" else "orange" for alert in ALERTS},
}
NAME_PIXELS = 14
"""Of four names beneath each other Grafana makes letters that are 4 pixels high."""
_FINDING = select(trainer.FINDING, JOB)
FINDINGS = Panel(
    kind="stat",
    title="Findings",
    description=(
        "What is wrong with the run, by the numbers of every step. `grpo status` has the evidence "
        "and what people change; docs/reference/findings.md has the rules."
    ),
    queries=(
        Query(
            or_none(f"max by (finding) ({_FINDING} == 1)", "finding", f"max({_FINDING}) == 0"), ""
        ),
    ),
    width=6,
    height=4,
    label="finding",
    text_pixels=NAME_PIXELS,
    colors=FINDING_COLORS,
    empty="No data of rank 0",
)


def firing_alerts(where: str, whose: str, width: int) -> Panel:
    """A panel with the names of the alerts that fire with such labels."""
    return Panel(
        kind="stat",
        title="Firing alerts",
        description=(
            f"Those {whose} that Prometheus evaluates, if it has the chart's rules; docs/reference/alerts.md "
            "has a runbook for each."
        ),
        queries=(Query(firing(where), ""),),
        width=width,
        height=4,
        label="alertname",
        text_pixels=NAME_PIXELS,
        colors=ALERT_COLORS,
    )


PHASE = Panel(
    kind="stat",
    title="Phase",
    description="What the operator says of the job now. `kubectl describe grpojob` says why.",
    queries=(Query(f"max by (phase) ({select(operator.JOB_PHASE, JOB)})", ""),),
    width=3,
    height=4,
    label="phase",
    colors=PHASE_COLORS,
    empty="No data of this job",
)
PANELS = (
    FINDINGS,
    firing_alerts(JOB, "on this job", 6),
    PHASE,
    Panel(
        kind="stat",
        title="Steps done, of all",
        description="Finished optimizer steps, and those of the whole run.",
        queries=(Query(_STEP, "done"), Query(of_job(trainer.TOTAL_STEPS), "of")),
        width=6,
        height=4,
        values_only=True,
        empty="No step reported",
    ),
    Panel(
        kind="stat",
        title="Time left",
        description="ETA, if steps go on taking what the recent ones took, without restarts.",
        unit="s",
        queries=(Query(of_job(trainer.ETA), "ETA"),),
        width=3,
        height=4,
        empty="No ETA reported",
    ),
)
"""The first row of Training health."""
