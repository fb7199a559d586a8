"""One job's verdicts: the first row of Training health, where each number has a colour."""

from grpo_api.report import metrics as operator
from grpo_api.report import training_metrics as trainer
from grpo_api.status.status import Phase

from .panels import Color, Panel, Query
from .promql import JOB, of_job, select

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

_PROGRESS = (
    Panel(
        kind="stat",
        title="Phase",
        description="What the operator says of the job now. `kubectl describe grpojob` says why.",
        unit="none",
        queries=(Query(f"max by (phase) ({select(operator.JOB_PHASE, JOB)})", ""),),
        width=4,
        height=3,
        label="phase",
        colors=PHASE_COLORS,
        empty="No such job, or ended long ago",
    ),
    Panel(
        kind="stat",
        title="Steps done, of all",
        description="Finished optimizer steps, and those of the whole run.",
        unit="none",
        queries=(Query(_STEP, "done"), Query(of_job(trainer.TOTAL_STEPS), "of")),
        width=5,
        height=3,
        values_only=True,
        empty="No step yet",
    ),
    Panel(
        kind="stat",
        title="Time left",
        description="If steps go on taking what the recent ones took, without restarts.",
        unit="s",
        queries=(Query(of_job(trainer.ETA), "time left"),),
        width=5,
        height=3,
        empty="Not training",
    ),
    Panel(
        kind="stat",
        title="Restarts",
        description=(
            "Restarts that count against the limit. Preemptions don't; marks across the "
            "panels show all."
        ),
        unit="none",
        queries=(Query(of_job(operator.JOB_RESTARTS), "restarts"),),
        width=5,
        height=3,
        base="green",
        bounds=((1, "orange"), (3, "red")),
        empty="No such job, or ended long ago",
    ),
    Panel(
        kind="stat",
        title="Age of the last checkpoint",
        description=(
            "A restart loses what was learned since. If old, see the events, and whether "
            "the volume has room."
        ),
        unit="s",
        queries=(Query(f"time() - {of_job('checkpoint_timestamp_seconds')}", "age"),),
        width=5,
        height=3,
        base="green",
        bounds=((3600, "orange"), (14400, "red")),
        empty="None, or not training",
    ),
)
_STILL = f"(time() - {of_job(operator.JOB_PROGRESS_TIME)}) / {of_job(operator.JOB_PATIENCE)}"
_VERDICTS = (
    Panel(
        kind="stat",
        title="Standstill, of what is allowed",
        description=(
            "Time since the operator saw a step, or bytes loaded, saved or exported, over the "
            "time after which its "
            "watchdog ends the attempt as Hang."
        ),
        unit="percentunit",
        queries=(Query(_STILL, "share"),),
        width=5,
        height=3,
        base="green",
        bounds=((0.25, "orange"), (0.5, "red")),
        empty="Not running",
    ),
    Panel(
        kind="stat",
        title="KL, of what the guard allows",
        description=(
            "Mean KL of the last step over guard.maxKL, at which the run is ended as Diverged."
        ),
        unit="percentunit",
        queries=(Query(f"{of_job('kl')} / {of_job(trainer.MAX_KL)}", "share"),),
        width=5,
        height=3,
        base="green",
        bounds=((0.5, "orange"), (0.8, "red")),
        empty="No KL, or guard.maxKL unset",
    ),
    Panel(
        kind="stat",
        title="Findings",
        description=(
            "How much is wrong with the run, by the numbers of its steps. `grpo status` names it, "
            "with evidence and what people change; docs/findings.md has the rules."
        ),
        unit="none",
        queries=(Query(f"sum({of_job(trainer.FINDING)})", "findings"),),
        width=4,
        height=3,
        base="green",
        bounds=((1, "red"),),
        empty="Not training",
    ),
    Panel(
        kind="stat",
        title="Completions not scored",
        description=(
            "Largest share of any reward function, in ten generations, for failures and time-outs."
        ),
        unit="percentunit",
        queries=(Query(of_job(trainer.UNSCORED), "share"),),
        width=5,
        height=3,
        base="green",
        bounds=((0.01, "orange"), (0.05, "red")),
        empty="Not training",
    ),
    Panel(
        kind="stat",
        title="Steps with NaN or infinity",
        description=(
            "Steps whose loss, gradient norm, KL, reward or entropy was no finite number, "
            "in the time shown."
        ),
        unit="none",
        queries=(
            Query(f"sum(max_over_time({select(trainer.NONFINITE_STEPS, JOB)}[$__range]))", "steps"),
        ),
        width=5,
        height=3,
        base="green",
        bounds=((1, "red"),),
        empty="No step yet",
    ),
)
PANELS = (*_PROGRESS, *_VERDICTS)
