"""PromQL over declared metrics: a panel can't ask for one that nothing exports.

Values are of a job, never of a pod: a restart's new pod goes on in the same line, under the same
legend.
"""

from grpo_api.report.metrics import BUILD_INFO, Metric
from grpo_api.report.training_metrics import STEP_SECONDS, TRAINING

from .panels import Query

CLUSTER = 'cluster=~"$cluster"'
"""Matches everything where no cluster has a label, too."""
NAMESPACES = f'{CLUSTER},namespace=~"$namespace"'
JOB = f'{CLUSTER},namespace="$namespace",grpojob="$job"'
A_JOB = "cluster, namespace, grpojob"
"""Labels of a job among many."""
JOB_LEGEND = "{{namespace}}/{{grpojob}}"
WINDOW = "[$__rate_interval]"
QUANTILES = (0.5, 0.95, 0.99)
NONE = "none"
"""What a list of names says that has none."""
BY_KEY = {metric.key: metric for metric in TRAINING}


def select(metric: Metric, where: str, suffix: str = "") -> str:
    """The series of a metric, or of a histogram's part."""
    return f"{metric.name}{suffix}{{{where}}}"


UP = select(BUILD_INFO, CLUSTER)
"""One for each operator that answers."""


def zero_if_uncounted(number: str) -> str:
    """Default a count to 0, but only while the operator is up."""
    return f"{number} or 0 * count({UP})"


def of_job(metric: Metric | str, where: str = "") -> str:
    """The chosen job's value; `metric` may be a key of Progress.metrics, `where` further labels."""
    declared = BY_KEY[metric] if isinstance(metric, str) else metric
    return f"max({select(declared, f'{JOB},{where}' if where else JOB)})"


def of_job_by(label: str, metric: Metric) -> str:
    """The chosen job's values by label."""
    return f"max by ({label}) ({select(metric, JOB)})"


def largest(label: str, metric: Metric) -> str:
    """The twelve of the chosen job's values by label that are largest at the end of the time
    shown."""
    last = f"last_over_time({select(metric, JOB)}[$__range] @ end())"
    return f"{of_job_by(label, metric)} and on ({label}) topk(12, max by ({label}) ({last}))"


def of_jobs(metric: Metric | str, where: str = "") -> str:
    """One value for each job of the chosen namespaces."""
    declared = BY_KEY[metric] if isinstance(metric, str) else metric
    return (
        f"max by ({A_JOB}) ({select(declared, f'{NAMESPACES},{where}' if where else NAMESPACES)})"
    )


def rates(label: str, metric: Metric, where: str = CLUSTER) -> str:
    """A counter's rate per second by label."""
    return f"sum by ({label}) (rate({select(metric, where)}{WINDOW}))"


MEAN_WINDOW = "[15m]"
"""A step may take minutes, and a mean needs one that has ended."""


def per_second(metric: Metric) -> str:
    """How fast a counter of the chosen job grows, over all of its attempts."""
    return f"sum(rate({select(metric, JOB)}{MEAN_WINDOW}))"


def per_step(label: str, metric: Metric) -> str:
    """What a step adds to a counter of the chosen job, by label: the mean of the last steps."""
    added = f"sum by ({label}) (increase({select(metric, JOB)}{MEAN_WINDOW}))"
    steps = f"sum(increase({select(STEP_SECONDS, JOB, '_count')}{MEAN_WINDOW}))"
    return f"{added} / on () group_left () ({steps} > 0)"


def quantiles(metric: Metric, where: str, window: str = WINDOW) -> tuple[Query, ...]:
    """The median, p95 and p99 of what a histogram saw lately."""
    buckets = f"sum by (le) (rate({select(metric, where, '_bucket')}{window}))"
    return tuple(
        Query(f"histogram_quantile({share}, {buckets})", f"p{share * 100:.0f}")
        for share in QUANTILES
    )


def new_maximum(metric: Metric | str) -> str:
    """The chosen job's value where it is above all of the six hours before: it may have been
    unknown for a while."""
    return f"{of_job(metric)} > 0 unless {of_job(metric)} <= {highest(metric)}"


def highest(metric: Metric | str) -> str:
    """The chosen job's highest value of the six hours that ended a minute ago."""
    declared = BY_KEY[metric] if isinstance(metric, str) else metric
    return f"max(max_over_time({select(declared, JOB)}[6h] offset 1m))"


def or_none(names: str, label: str, is_known: str) -> str:
    """The series, or one with the label's value NONE while there are none of them and `is_known`
    has a value."""
    none = f'label_replace({is_known}, "{label}", "{NONE}", "", "")'
    return f"{names} or {none}"


def firing(where: str) -> str:
    """The names of the alerts that fire with such labels, or NONE."""
    chosen = f'ALERTS{{alertstate="firing",{where}}}'
    return or_none(f"max by (alertname) ({chosen})", "alertname", f"max(absent({chosen}))")
