"""Dashboards are for people: every panel has a title in words, a unit and a description, and asks
for what exists."""

import json
import re
from typing import Any

import pytest

from grpo_api.report import metrics, training_metrics
from grpo_codegen.alerts import ALERTS
from grpo_codegen.dashboards import DASHBOARDS, grafana
from grpo_codegen.dashboards.panels import NOTHING, Dashboard, Panel
from grpo_codegen.recording_rules import RULES

EXPORTED = (*training_metrics.TRAINER, *metrics.VLLM, *metrics.OPERATOR)
DECLARED = {metric.name: metric.kind for metric in EXPORTED}
FOREIGN = {
    "ALERTS",
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    *(rule.name for rule in RULES),
}
"""Prometheus' own, those of prometheus_client, and what the chart records of NVIDIA's exporter."""
KINDS = {"timeseries", "stat", "gauge", "bargauge", "table", "row"}
"""What Grafana's components draw outside Grafana, too."""
EVERY = pytest.mark.parametrize("board", DASHBOARDS.values(), ids=DASHBOARDS.keys())


def panels(board: Dashboard) -> list[Panel]:
    return [panel for row in board.rows for panel in row.panels]


def page(board: Dashboard) -> dict[str, Any]:
    text: dict[str, Any] = json.loads(grafana.render(board))
    return text


def expressions(board: Dashboard) -> list[str]:
    queries = [query.expression for panel in panels(board) for query in panel.queries]
    return (
        queries
        + [mark.expression for mark in board.annotations]
        + [choice.series for choice in board.variables]
    )


def metrics_in(expression: str) -> set[str]:
    """Names that stand before a selector, and those of a bare variable's series."""
    return set(re.findall(r"[A-Za-z_][\w:]*(?={)", expression)) or {expression}


@EVERY
def test_every_panel_is_titled_explained_and_has_a_unit(board: Dashboard) -> None:
    for panel in panels(board):
        assert re.fullmatch(r"[A-Z][^_{}]{3,50}", panel.title), panel.title
        assert panel.title not in DECLARED
        assert panel.unit
        assert len(panel.description) > len(panel.title)
        assert panel.description.endswith(".")
    titles = [panel.title for panel in panels(board)]
    assert len(titles) == len(set(titles))


@EVERY
def test_every_query_asks_for_metrics_that_something_exports(board: Dashboard) -> None:
    for expression in expressions(board):
        for name in metrics_in(expression):
            family = re.sub(r"_(bucket|count|sum)$", "", name)
            known = DECLARED.get(family)
            assert (
                name in FOREIGN or known == ("histogram" if family != name else known) is not None
            ), expression


def test_every_metric_is_on_a_board_or_in_an_alert() -> None:
    asked = " ".join(
        [one for board in DASHBOARDS.values() for one in expressions(board)]
        + [alert.expression for alert in ALERTS]
        + [rule.expression for rule in RULES]
    )
    names = {metric.name for metric in EXPORTED}
    shown = {name for name in names if re.search(rf"\b{name}(?:_bucket|_count)?\b", asked)}
    assert names - shown == set()


@EVERY
def test_numbers_that_are_good_or_bad_have_rising_bounds_and_a_colour_below_them(
    board: Dashboard,
) -> None:
    for panel in panels(board):
        values = [value for value, _ in panel.bounds]
        assert values == sorted(values)
        assert panel.lowest_color or not panel.bounds, panel.title
        assert all(color != panel.lowest_color for _, color in panel.bounds[:1])


@EVERY
def test_only_panels_that_can_be_drawn_anywhere_are_used_and_none_lies_on_another(
    board: Dashboard,
) -> None:
    drawn = page(board)["panels"]
    assert {panel["type"] for panel in drawn} <= KINDS
    places = [panel["gridPos"] for panel in drawn]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


@EVERY
def test_a_panel_without_data_says_what_it_lacks_and_no_cause(board: Dashboard) -> None:
    for panel in panels(board):
        assert panel.empty == NOTHING or re.fullmatch(r"No [^:,.]+", panel.empty), panel.title


def test_whoever_opens_a_run_sees_what_is_wrong_and_six_curves_with_their_limits() -> None:
    """All other rows wait for a click, and a collapsed row asks for nothing."""
    first, curves, *others = DASHBOARDS["training-health"].rows
    assert [panel.title for panel in first.panels][:2] == ["Findings", "Firing alerts"]
    assert len(curves.panels) == 6
    assert [panel.title for panel in curves.panels if not panel.bounds] == ["Reward"]
    assert all(row.is_collapsed for row in others)
    drawn = page(DASHBOARDS["training-health"])["panels"]
    folded = [panel for panel in drawn if panel.get("collapsed")]
    assert [len(panel["panels"]) for panel in folded] == [len(row.panels) for row in others]
    assert len(drawn) == 2 + len(first.panels) + len(curves.panels) + len(others)


def test_names_are_given_once() -> None:
    pages = [page(board) for board in DASHBOARDS.values()]
    assert len({one["uid"] for one in pages}) == len({one["title"] for one in pages}) == len(pages)
    for one in pages:
        nested = [inner for panel in one["panels"] for inner in panel.get("panels", [])]
        numbers = [panel["id"] for panel in (*one["panels"], *nested)]
        assert len(numbers) == len(set(numbers))


@EVERY
def test_dashboards_lead_to_each_other_and_share_the_crosshair(board: Dashboard) -> None:
    text = page(board)
    (link,) = text["links"]
    assert set(link["tags"]) <= set(text["tags"])
    assert link["includeVars"]
    assert link["keepTime"]
    assert text["graphTooltip"] == 1
    assert [choice["name"] for choice in text["templating"]["list"]][:2] == [
        "datasource",
        "cluster",
    ]


def test_a_job_of_the_fleet_leads_to_its_own_dashboard() -> None:
    training = page(DASHBOARDS["training-health"])
    offered = {f"var-{choice['name']}" for choice in training["templating"]["list"]}
    links = [
        link["url"]
        for panel in page(DASHBOARDS["fleet"])["panels"]
        for link in panel.get("fieldConfig", {"defaults": {}})["defaults"].get("links", [])
    ]
    assert len(links) > 3
    for url in links:
        assert url.startswith(f"/d/{training['uid']}?")
        assert set(re.findall(r"var-\w+", url)) <= offered


def test_what_is_asked_about_one_job_is_about_no_pod() -> None:
    for panel in panels(DASHBOARDS["training-health"]):
        for query in panel.queries:
            is_list = panel.kind == "table"
            names = re.findall(r"\b(pod|attempt|instance)\b", query.expression)
            assert is_list or not names, panel.title


@EVERY
def test_what_grows_once_a_step_is_asked_about_over_several_steps(board: Dashboard) -> None:
    """A step may take minutes, and nothing grows within Grafana's own interval."""
    short = re.compile(r"grpo_training_\w+{[^}]*}\[\$__rate_interval\]")
    assert not [expression for expression in expressions(board) if short.search(expression)]


def test_jobs_that_wait_are_those_of_all_operators_together() -> None:
    (panel,) = [
        panel
        for panel in panels(DASHBOARDS["operator"])
        if panel.title == "Jobs that wait, by reason"
    ]
    assert panel.queries[0].expression.startswith("sum by (reason) (max by (cluster, job, reason) ")


def test_a_gpu_has_its_share_of_the_tokens_whatever_the_products() -> None:
    (query,) = [
        query
        for panel in panels(DASHBOARDS["training-health"])
        for query in panel.queries
        if query.legend == "per GPU"
    ]
    assert "sum(max by (product) (grpo_job_gpus{" in query.expression
