"""Every query of the dashboards is run by the real Prometheus over a cluster's last hours.

No panel is without data, and none has two series of one name, also after a restart. Where GPUs, a
reference or engines are missing, panels that are empty say why.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_codegen.dashboards import DASHBOARDS
from grpo_codegen.dashboards.panels import NOTHING, Dashboard, Panel, Query
from harness.programs import prometheus
from tests.integration.dashboard_world import END, MINUTES, World

CHOSEN = {
    "$__rate_interval": "5m",
    "$__range": f"{MINUTES - 1}m",
    "$cluster": ".*",
    "$namespace": "team",
    "$job": "run",
}
"""What Grafana puts in."""
ALL = [
    (board, panel) for board in DASHBOARDS.values() for row in board.rows for panel in row.panels
]
MOST = 12
"""Most series in a panel about one job."""
Series = list[dict[str, Any]]


class Shown:
    """What a Prometheus shows of a world."""

    def __init__(self, server: str) -> None:
        self.server = server

    def over_time(self, expression: str) -> Series:
        """The series of the expression over all of the time, as Grafana draws them."""
        times = {"start": END - 60 * (MINUTES - 10), "end": END, "step": 60}
        return self._result("query_range", expression, **times)

    def now(self, expression: str) -> Series:
        """The series of the expression at the end."""
        return self._result("query", expression, time=END)

    def _result(self, what: str, expression: str, **times: int) -> Series:
        answer = prometheus.ask(self.server, what, query=interpolated(expression), **times)
        found: Series = answer["result"]
        return found

    def shown(self, panel: Panel) -> list[str]:
        """Names of all that a panel shows."""
        ask = self.over_time if panel.kind == "timeseries" else self.now
        return [
            legend(query, one["metric"]) for query in panel.queries for one in ask(query.expression)
        ]


def interpolated(expression: str) -> str:
    """The expression with Grafana's variables put in, longest name first."""
    for name, value in CHOSEN.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def legend(query: Query, labels: dict[str, str]) -> str:
    """A series' name; a table's rows are told apart by all labels."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), query.legend) or str(labels)


@contextmanager
def shown(folder: Path, world: World) -> Iterator[Shown]:
    """What Prometheus shows of this world."""
    with prometheus.filled(folder, world.text()) as server:
        yield Shown(server)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with shown(tmp_path_factory.mktemp("healthy"), World()) as everything:
        yield everything


def test_no_panel_is_empty(healthy: Shown) -> None:
    asked = ((panel, query) for _, panel in ALL for query in panel.queries)
    ask = {True: healthy.over_time, False: healthy.now}
    empty = [
        (panel.title, query)
        for panel, query in asked
        if not ask[panel.kind == "timeseries"](query.expression)
    ]
    assert empty == []


def test_no_panel_shows_two_series_under_one_name_though_the_job_has_restarted(
    healthy: Shown,
) -> None:
    for _, panel in ALL:
        shown = healthy.shown(panel)
        assert len(shown) == len(set(shown)), panel.title


def test_a_panel_about_one_job_shows_no_more_than_can_be_told_apart(healthy: Shown) -> None:
    shown = {
        panel.title: len(healthy.shown(panel)) for panel in panels(DASHBOARDS["training-health"])
    }
    assert {title: number for title, number in shown.items() if number > MOST} == {}


def panels(board: Dashboard) -> list[Panel]:
    """The panels of a dashboard."""
    return [panel for row in board.rows for panel in row.panels]


def test_annotations_mark_attempts_checkpoints_and_the_end_of_memory(healthy: Shown) -> None:
    marks = DASHBOARDS["training-health"].annotations
    found = {mark.title: healthy.over_time(mark.expression) for mark in marks}
    assert found.keys() == {
        "Finding",
        "Attempt",
        "Restart",
        "Checkpoint",
        "Out of memory",
        "Reference",
    }
    assert all(found.values())
    assert [len(one["values"]) for one in found["Attempt"]] == [MINUTES // 10], "once per new value"


def test_variables_offer_what_there_is(healthy: Shown) -> None:
    for board in DASHBOARDS.values():
        for variable in board.variables:
            found = prometheus.ask(
                healthy.server,
                "series",
                **{"match[]": interpolated(variable.series), "start": END - 600, "end": END},
            )
            assert found, variable
            assert variable.name == "cluster" or variable.label in found[0]


def test_on_cpus_without_a_reference_and_engines_an_empty_panel_says_why(tmp_path: Path) -> None:
    with shown(tmp_path, World(gpus=False, reference=False, engines=False)) as everything:
        empty = [panel for _, panel in ALL if not everything.shown(panel)]
    titles = {panel.title for panel in empty}
    assert titles > {
        "KL from the reference",
        "Peak memory by phase",
        "Effective training time",
        "Dearest jobs",
        "Engines that serve",
    }
    assert [panel.title for panel in empty if panel.empty == NOTHING] == []
