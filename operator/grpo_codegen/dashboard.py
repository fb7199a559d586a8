"""The chart's Grafana dashboard, laid out over the metrics that grpo_api.metrics declares.

A panel can't name a metric that nothing exports, and takes its title and unit from the declaration. The chart ships
charts/grpo-operator/files/dashboard.json in a ConfigMap.
"""

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

from grpo_api import metrics, training_metrics
from grpo_api.metrics import Metric
from grpo_api.training_metrics import TRAINING

_WIDTH, _HEIGHT = 8, 8
_COLUMNS = 24 // _WIDTH
_SELECTOR = '{namespace=~"$namespace", grpojob=~"$grpojob"}'
_NAMESPACE = '{namespace=~"$namespace"}'
_UNITS = {"seconds": "s", "bytes": "bytes", "unix seconds": "dateTimeAsIso"}
_ROWS: tuple[tuple[str, Sequence[Metric]], ...] = (
    ("Learning", TRAINING),
    (
        "Progress and resources",
        (
            *(training_metrics.STEP, training_metrics.TOTAL_STEPS, training_metrics.ETA, training_metrics.REWARD),
            *(training_metrics.PHASE_SECONDS, training_metrics.MEMORY),
            *(metrics.JOB_MEMORY_PREDICTED, metrics.JOB_MEMORY_MEASURED, metrics.JOB_MEMORY_RATIO),
        ),
    ),
    ("Jobs", (metrics.JOBS, metrics.JOB_PHASE, metrics.JOB_STEP, metrics.JOB_ATTEMPTS, metrics.JOB_RESTARTS)),
    (
        "Operator",
        (
            metrics.RECONCILES,
            metrics.RECONCILE_SECONDS,
            metrics.API_REQUESTS,
            metrics.QUEUE_DEPTH,
            metrics.QUEUE_SECONDS,
            metrics.PROGRESS_PULLS,
            metrics.EVENTS,
            metrics.LOOP_LAG,
        ),
    ),
)


def render() -> str:
    """charts/grpo-operator/files/dashboard.json."""
    return json.dumps(_dashboard(), indent=1) + "\n"


def _dashboard() -> dict[str, Any]:
    return {
        "title": "GRPO jobs",
        "uid": "grpo-operator",
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_datasource(), _variable("namespace", ""), _variable("grpojob", _NAMESPACE)]},
        "panels": _panels(),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(name: str, selector: str) -> dict[str, Any]:
    query = f"label_values({metrics.JOB_INFO.name}{selector}, {name})"
    source = {"type": "prometheus", "uid": "${datasource}"}
    common = {"name": name, "type": "query", "datasource": source, "refresh": 2}
    return {**common, "includeAll": True, "multi": True, "query": {"query": query, "refId": name}}


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    ids, y = count(1), 0
    for title, declared in _ROWS:
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": next(ids), "type": "row", "title": title, "gridPos": place, "panels": []})
        for position, metric in enumerate(declared):
            row, column = divmod(position, _COLUMNS)
            place = {"x": column * _WIDTH, "y": y + 1 + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(next(ids), metric, place))
        y += 1 + -(-len(declared) // _COLUMNS) * _HEIGHT
    return panels


def _panel(number: int, metric: Metric, place: dict[str, int]) -> dict[str, Any]:
    expression, legend = _query(metric)
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": metric.name,
        "description": f"{metric.help} Unit: {metric.unit}.",
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": _UNITS.get(metric.unit, "short")}, "overrides": []},
        "targets": [{"refId": "A", "datasource": source, "expr": expression, "legendFormat": legend}],
    }


def _query(metric: Metric) -> tuple[str, str]:
    """PromQL and the legend of a metric: the value of a gauge, the rate of a counter, the mean of a histogram."""
    if metric.kind == "histogram":
        total, number = (f"sum(rate({metric.name}_{part}[5m]))" for part in ("sum", "count"))
        return f"{total} / {number}", "mean"
    per_job = metric in training_metrics.TRAINER or "grpojob" in metric.labels
    series = metric.name + (_SELECTOR if per_job else "")
    extra = [label for label in metric.labels if label not in ("namespace", "grpojob")]
    shown = (*(["namespace", "grpojob"] if per_job else []), *extra)
    if metric.kind == "counter":
        series = f"sum by ({', '.join(shown)}) (rate({series}[5m]))"
    return series, " ".join(f"{{{{{label}}}}}" for label in shown if label != "namespace") or metric.name
