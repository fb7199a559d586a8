"""How a job gets on: restarts, checkpoints, pods, and what it has counted so far."""

from grpo_api.report import metrics as operator
from grpo_api.report import training_metrics as trainer

from .panels import Panel, Query
from .promql import JOB, of_job, of_job_by, select

_STILL = f"(time() - {of_job(operator.JOB_PROGRESS_TIME)}) / {of_job(operator.JOB_PATIENCE)}"
PANELS = (
    Panel(
        kind="stat",
        title="Restarts",
        description=(
            "Restarts that count against the limit. Preemptions don't; marks across the "
            "panels show all."
        ),
        queries=(Query(of_job(operator.JOB_RESTARTS), "restarts"),),
        width=4,
        height=3,
        bounds=((1, "orange"), (3, "red")),
        empty="No data of this job",
    ),
    Panel(
        kind="stat",
        title="Age of the last checkpoint",
        description="A restart loses what was learned since.",
        unit="s",
        queries=(Query(f"time() - {of_job('checkpoint_timestamp_seconds')}", "age"),),
        width=5,
        height=3,
        empty="No checkpoint reported",
    ),
    Panel(
        kind="stat",
        title="Standstill, of what is allowed",
        description=(
            "Time since the operator saw progress: a step, or bytes loaded, saved or exported. "
            "At 100 % the watchdog ends the attempt as Hang."
        ),
        unit="percentunit",
        queries=(Query(_STILL, "share"),),
        width=5,
        height=3,
        bounds=((0.25, "orange"), (0.5, "red")),
        empty="No running attempt reported",
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
        bounds=((0.01, "orange"), (0.05, "red")),
        empty="No completion reported",
    ),
    Panel(
        kind="stat",
        title="Steps with NaN or infinity",
        description=(
            "Steps whose loss, gradient norm, KL, reward or entropy was no finite number, "
            "in the time shown."
        ),
        queries=(
            Query(f"sum(max_over_time({select(trainer.NONFINITE_STEPS, JOB)}[$__range]))", "steps"),
        ),
        width=5,
        height=3,
        bounds=((1, "red"),),
        empty="No step reported",
    ),
    Panel(
        kind="bargauge",
        title="In its stage since",
        description="Time since the attempt entered the stage that it is in, from pull to export.",
        unit="s",
        queries=(
            Query(f"time() - max by (stage) ({select(operator.JOB_STAGE_TIME, JOB)})", "{{stage}}"),
            Query(of_job_by("stage", trainer.STAGE), "{{stage}}, by rank 0"),
        ),
        width=8,
        height=5,
        base="blue",
        empty="No running attempt reported",
    ),
    Panel(
        title="Checkpoints of this attempt",
        description="Those that were sealed and those that could not be written.",
        unit="short",
        queries=(
            Query(of_job(trainer.CHECKPOINTS), "sealed"),
            Query(of_job(trainer.CHECKPOINT_FAILURES), "not written", "limit"),
        ),
        width=8,
        height=5,
    ),
    Panel(
        title="Duration of a checkpoint",
        description="How long training stood still for the newest one.",
        unit="s",
        queries=(Query(of_job(trainer.CHECKPOINT_SECONDS), "duration"),),
        width=8,
        height=5,
        empty="No checkpoint reported",
    ),
    Panel(
        kind="table",
        title="Pods",
        description="Of the running attempt, those that are bound to a node.",
        queries=(
            Query(
                f"max by (component, attempt, pod, node) ({select(operator.JOB_POD_INFO, JOB)})",
                "",
            ),
        ),
        width=12,
        height=6,
        columns={"component": "Part", "attempt": "Attempt", "pod": "Pod", "node": "Node"},
        empty="No pod reported",
    ),
    Panel(
        kind="stat",
        title="Time in queues",
        description="Finished waits for GPUs and before restarts.",
        unit="s",
        queries=(Query(of_job(operator.JOB_QUEUED_SECONDS), "time"),),
        width=4,
        height=3,
        empty="No wait reported",
    ),
    Panel(
        kind="stat",
        title="Epoch",
        description="TRL's `epoch`: passes over the dataset.",
        queries=(Query(of_job("epoch"), "epoch"),),
        width=4,
        height=3,
        empty="No step reported",
    ),
    Panel(
        kind="stat",
        title="Completions",
        description="Of this attempt, that were put to the rewards.",
        unit="short",
        queries=(Query(of_job(trainer.COMPLETIONS), "completions"),),
        width=4,
        height=3,
        empty="No completion reported",
    ),
    Panel(
        kind="stat",
        title="Prompts: all, too long, duplicate",
        description="All that are trained on, those that were left out, and those seen before.",
        unit="short",
        queries=(
            Query(of_job(trainer.PROMPTS), "trained on"),
            Query(of_job(trainer.PROMPTS_DROPPED), "too long"),
            Query(of_job(trainer.PROMPTS_DUPLICATE), "duplicate"),
        ),
        width=8,
        height=3,
        values_only=True,
        empty="No prompt reported",
    ),
    Panel(
        kind="stat",
        title="Tokens whose KL overflowed",
        description="In this attempt; their KL was limited.",
        unit="short",
        queries=(Query(of_job(trainer.KL_OVERFLOW), "tokens"),),
        width=6,
        height=3,
        bounds=((1, "orange"),),
        empty="No step reported",
    ),
    Panel(
        kind="stat",
        title="Rows lost by trackers",
        description="Logged steps of this attempt that a tracker of spec.tracking did not get.",
        unit="short",
        queries=(Query(f"sum({of_job_by('tracker', trainer.TRACKING_LOST)})", "rows"),),
        width=5,
        height=3,
        bounds=((1, "orange"),),
        empty="No tracker reported",
    ),
    Panel(
        kind="stat",
        title="Trainer",
        description="Version of the trainer's image.",
        queries=(Query(f"max by (version) ({select(trainer.BUILD_INFO, JOB)})", ""),),
        width=5,
        height=3,
        label="version",
        empty="No version reported",
    ),
)
