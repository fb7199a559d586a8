"""Dashboards as Grafana's JSON (schema 39, Grafana 10.4 and later): places, numbers, colours and
links."""

import json
import string
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from ..alerts.alert import TRAINING_UID
from .panels import Annotation, Dashboard, Kind, Look, Panel, Query, Row, Variable

JSON = dict[str, Any]
TAG = "grpo"
"""Dashboards with it link to each other."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24


def render(dashboard: Dashboard) -> str:
    """The file's text."""
    return json.dumps(_page(dashboard), indent=1, ensure_ascii=False) + "\n"


def _page(dashboard: Dashboard) -> JSON:
    links = {
        "type": "dashboards",
        "title": "GRPO",
        "tags": [TAG],
        "includeVars": True,
        "keepTime": True,
    }
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [TAG],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": dashboard.since, "to": "now"},
        "links": [links],
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "annotations": {"list": [_annotation(annotation) for annotation in dashboard.annotations]},
        "panels": _laid_out(dashboard.rows),
    }


def _datasource() -> JSON:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
    }


def _variable(variable: Variable) -> JSON:
    query = f"label_values({variable.series}, {variable.label})"
    choice = {
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    return {
        "name": variable.name,
        "label": variable.title,
        "type": "query",
        "datasource": _SOURCE,
        "refresh": 2,
        "sort": 1,
        "query": {"query": query, "refId": variable.name},
        **(choice if variable.many else {}),
    }


def _annotation(annotation: Annotation) -> JSON:
    return {
        "name": annotation.title,
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": annotation.color,
        "expr": annotation.expression,
        "step": "60s",
        "titleFormat": annotation.title,
        "textFormat": annotation.text,
    }


def _laid_out(rows: tuple[Row, ...]) -> list[JSON]:
    """All rows with their panels' places. A collapsed row holds its panels, at the places that they
    have once it is opened."""
    laid_out: list[JSON] = []
    ids, y = count(1), 0
    for row in rows:
        heading: JSON = {
            "id": next(ids),
            "type": "row",
            "title": row.title,
            "collapsed": row.is_collapsed,
            "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
            "panels": [],
        }
        y += 1
        panels, end = _placed(row.panels, ids, y)
        laid_out.append(heading)
        if row.is_collapsed:
            heading["panels"] = panels
        else:
            laid_out += panels
            y = end
    return laid_out


def _placed(panels: tuple[Panel, ...], ids: Iterator[int], y: int) -> tuple[list[JSON], int]:
    """The panels from left to right, from the line `y` on, and the line below them. A line is as
    high as its highest panel."""
    placed: list[JSON] = []
    x, height = 0, 0
    for panel in panels:
        if x + panel.width > _WIDTH:
            x, y, height = 0, y + height, 0
        place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        placed.append({"id": next(ids), "gridPos": place, **_panel(panel)})
        x, height = x + panel.width, max(height, panel.height)
    return placed, y + height


def _panel(panel: Panel) -> JSON:
    letters = zip(string.ascii_uppercase, panel.queries, strict=False)
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _OPTIONS[panel.kind](panel),
        "targets": [_target(panel, letter, query) for letter, query in letters],
        "transformations": _columns(panel.columns) if panel.columns else [],
    }


def _target(panel: Panel, letter: str, query: Query) -> JSON:
    now = panel.kind != "timeseries"
    return {
        "refId": letter,
        "datasource": _SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
        "instant": now,
        "range": not now,
        "format": "table" if panel.kind == "table" or panel.label else "time_series",
    }


def _defaults(panel: Panel) -> JSON:
    steps: list[JSON] = [{"value": None, "color": panel.lowest_color or "text"}]
    steps += [{"value": value, "color": color} for value, color in panel.bounds]
    defaults: JSON = {
        "unit": panel.unit,
        "noValue": panel.empty,
        "mappings": _mappings(panel),
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {
            "mode": "thresholds"
            if panel.kind in ("stat", "gauge", "bargauge")
            else "palette-classic"
        },
    }
    if panel.kind == "gauge":  # they show shares
        defaults |= {"min": 0, "max": 1}
    if panel.kind == "bargauge":
        defaults["min"] = 0
    if panel.kind == "timeseries":
        defaults["custom"] = _lines(panel)
    if panel.kind == "table":
        defaults["custom"] = {"minWidth": 60}
    if panel.to_job:
        defaults["links"] = [_job_link(panel.kind)]
    return defaults


_AMOUNTS = ("bytes", "ops", "percentunit", "reqps", "s", "short")
"""Units of which half is half as high."""


def _mappings(panel: Panel) -> list[JSON]:
    """Texts in place of values that are no numbers: without a colour if there is no value, red for
    NaN."""
    looks = {"null": {"text": panel.empty, "color": "text"}, "nan": {"text": "NaN", "color": "red"}}
    specials = [
        {"type": "special", "options": {"match": match, "result": look}}
        for match, look in looks.items()
    ]
    painted = (
        {value: {"color": color} for value, color in panel.colors.items()} if panel.label else {}
    )
    return [*specials, {"type": "value", "options": painted}] if painted else specials


def _lines(panel: Panel) -> JSON:
    bottom = {"axisSoftMin": 0} if panel.stacked or panel.reach or panel.unit in _AMOUNTS else {}
    top = {"axisSoftMax": panel.reach} if panel.reach else {}
    return {
        **bottom,
        **top,
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.stacked else 0,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.bounds else "off"},
    }


def _job_link(kind: Kind) -> JSON:
    labels = "__data.fields" if kind == "table" else "__field.labels"
    chosen = "&".join(f"var-{name}=${{{labels}.{label}}}" for name, label in _JOB_VARIABLES.items())
    url = f"/d/{TRAINING_UID}?var-datasource=${{datasource}}&{chosen}&${{__url_time_range}}"
    return {"title": "Training health", "url": url}


_JOB_VARIABLES = {"namespace": "namespace", "job": "grpojob"}


def _overrides(panel: Panel) -> list[JSON]:
    edge = next((query.legend for query in panel.queries if query.look == "edge"), "")
    looks: dict[Look, dict[str, Any]] = {
        "limit": {"color": _fixed("red"), "custom.lineStyle": {"fill": "dash", "dash": [10, 10]}},
        "edge": {"color": _fixed("blue"), "custom.lineWidth": 0},
        "band": {
            "color": _fixed("blue"),
            "custom.lineWidth": 0,
            "custom.fillBelowTo": edge,
            "custom.fillOpacity": 15,
        },
    }
    overrides = [
        _override(query.legend, looks[query.look]) for query in panel.queries if query.look in looks
    ]
    painted = {} if panel.label else panel.colors
    return overrides + [
        _override(legend, {"color": _fixed(color)}) for legend, color in painted.items()
    ]


def _fixed(color: str) -> JSON:
    return {"mode": "fixed", "fixedColor": color}


def _override(legend: str, properties: Mapping[str, Any]) -> JSON:
    listed = [{"id": name, "value": value} for name, value in properties.items()]
    return {"matcher": {"id": "byName", "options": legend}, "properties": listed}


def _columns(columns: Mapping[str, str]) -> list[JSON]:
    """One row per set of labels, with these columns."""
    shown = {
        "indexByName": {name: place for place, name in enumerate(columns)},
        "renameByName": dict(columns),
    }
    return [
        {"id": "merge", "options": {}},
        {"id": "filterFieldsByName", "options": {"include": {"names": list(columns)}}},
        {"id": "organize", "options": shown},
    ]


def _series_options(_: Panel) -> JSON:
    legend = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _value_options(panel: Panel) -> JSON:
    many = len(panel.queries) > 1
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    listed = {"calcs": [], "fields": f"/^{panel.label}$/", "values": True}
    # Names side by side would share the width: three findings were 9 pixels high.
    beneath_each_other = "horizontal" if panel.label else "auto"
    fixed_size = {"text": {"valueSize": panel.text_pixels}} if panel.text_pixels else {}
    return {
        "reduceOptions": listed if panel.label else reduced,
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "value_and_name" if many and not panel.values_only else "value",
        "orientation": "vertical" if many else beneath_each_other,
        **fixed_size,
    }


def _bar_options(_: Panel) -> JSON:
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {
        "reduceOptions": reduced,
        "orientation": "horizontal",
        "displayMode": "basic",
        "valueMode": "color",
        "sizing": "manual",
        "minVizHeight": 16,
        "maxVizHeight": 28,
        "text": {"valueSize": 13},
    }


def _table_options(_: Panel) -> JSON:
    return {"showHeader": True, "cellHeight": "sm"}


_OPTIONS: dict[Kind, Callable[[Panel], JSON]] = {
    "timeseries": _series_options,
    "stat": _value_options,
    "gauge": _value_options,
    "bargauge": _bar_options,
    "table": _table_options,
}
