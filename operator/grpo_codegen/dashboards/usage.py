"""What became of GPU-seconds and what they cost (docs/explanation/usage.md): of one job for Training health, of
all for Fleet."""

from grpo_api.report import metrics as operator

from .. import recording_rules
from .panels import Bounds, Color, Panel, Query
from .promql import A_JOB, JOB, JOB_LEGEND, NAMESPACES, of_job, of_jobs, select

_PRODUCTIVE = 'state=~"generating|scoring|training"'
_COLORS: dict[str, Color] = {
    "generating": "green",
    "scoring": "green",
    "training": "green",
    "loading": "blue",
    "proving": "blue",
    "saving": "blue",
    "lost": "red",
    "other": "yellow",
}
_EFFECTIVE = (
    "Share of held GPU-seconds that went into steps that count. Loading, losses and idle "
    "time lower it."
)
_RATED: Bounds = ((0.5, "orange"), (0.8, "green"))
NO_DCGM = "No data of NVIDIA's DCGM exporter"
_UNPRICED = "No cost reported"


def _spent(state: str = "") -> str:
    """GPU-seconds of the chosen namespaces' jobs so far, those that ended within the time shown
    among them."""
    where = f"{NAMESPACES},{state}" if state else NAMESPACES
    last = f"last_over_time({select(operator.JOB_GPU_SECONDS, where)}[$__range])"
    return f"sum(max by ({A_JOB}, state) ({last}))"


def _of_job(state: str = "") -> str:
    where = f"{JOB},{state}" if state else JOB
    return f"sum(max by (state) ({select(operator.JOB_GPU_SECONDS, where)}))"


def _recorded(rule: recording_rules.Recorded) -> str:
    return f"max({rule.name}{{{JOB}}})"


OF_JOB = (
    Panel(
        kind="gauge",
        title="Effective training time",
        description=_EFFECTIVE,
        unit="percentunit",
        queries=(Query(f"{_of_job(_PRODUCTIVE)} / {_of_job()}", "effective"),),
        width=6,
        base="red",
        bounds=_RATED,
        empty="No GPU time reported",
    ),
    Panel(
        kind="bargauge",
        title="What its GPUs did",
        description="GPU-hours of all attempts by what they were spent on.",
        unit="suffix: GPU h",
        queries=(
            Query(f"max by (state) ({select(operator.JOB_GPU_SECONDS, JOB)}) / 3600", "{{state}}"),
        ),
        width=12,
        colors=_COLORS,
        empty="No GPU time reported",
    ),
    Panel(
        kind="stat",
        title="Cost so far",
        description="Of the GPUs, in the currency of the chart's gpuHourPrices.",
        queries=(Query(of_job(operator.JOB_COST), "cost"),),
        width=6,
        empty=_UNPRICED,
    ),
    Panel(
        title="How busy its GPUs are",
        description=(
            "Mean of all its GPUs, as DCGM reports: time in which any kernel ran, and that "
            "of tensor cores."
        ),
        unit="percentunit",
        queries=(
            Query(_recorded(recording_rules.UTILISATION), "any kernel"),
            Query(_recorded(recording_rules.TENSOR_ACTIVE), "tensor cores"),
        ),
        width=12,
        empty=NO_DCGM,
    ),
    Panel(
        title="Memory of its GPUs",
        description="Of the fullest, as DCGM reports: all memory in use there, by any process.",
        unit="bytes",
        queries=(Query(_recorded(recording_rules.MEMORY_USED), "fullest GPU"),),
        width=12,
        empty=NO_DCGM,
    ),
)
OF_ALL = (
    Panel(
        kind="gauge",
        title="Effective training time",
        description=_EFFECTIVE + " Of all jobs in the time shown.",
        unit="percentunit",
        queries=(Query(f"{_spent(_PRODUCTIVE)} / {_spent()}", "effective"),),
        width=6,
        base="red",
        bounds=_RATED,
        empty="No GPU time reported",
    ),
    Panel(
        kind="bargauge",
        title="What the GPUs did",
        description=(
            "GPU-hours of the time shown by what jobs spent them on. Lost: from a "
            "checkpoint to a failure."
        ),
        unit="suffix: GPU h",
        queries=(
            Query(
                (
                    "sum by (state) "
                    f"(delta({select(operator.JOB_GPU_SECONDS, NAMESPACES)}[$__range])) / 3600"
                ),
                "{{state}}",
            ),
        ),
        width=9,
        colors=_COLORS,
        empty="No GPU time reported",
    ),
    Panel(
        kind="table",
        title="Dearest jobs",
        description=(
            "Cost so far of jobs that run or have just ended, in the currency of the "
            "chart's prices."
        ),
        queries=(Query(f"topk(20, {of_jobs(operator.JOB_COST)})", JOB_LEGEND),),
        width=9,
        columns={"namespace": "Namespace", "grpojob": "Job", "Value": "Cost"},
        to_job=True,
        empty=_UNPRICED,
    ),
)
