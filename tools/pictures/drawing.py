"""A dashboard's queries asked of Prometheus, and what it answers drawn in the browser.

Grafana's server does the former: it puts its variables in, asks for lines by steps and for single
values at the end.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_codegen.dashboards import DASHBOARDS, grafana
from grpo_codegen.stories.story import Story
from grpo_codegen.stories.world import World, constant_series
from grpo_codegen.timelines import exposition, series
from harness.programs import prometheus

from .browser import Browser

JSON = dict[str, Any]
STEP = 60
"""Seconds between two samples of a story."""
EVERY_NAMESPACE = "fleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a reader has chosen: whose dashboard, until when, and how finely."""

    title: str
    end: int
    """Unix seconds."""
    seconds: int | None = None
    """How much of the past before it is shown; None: as much as the dashboard wants, or there
    is."""
    namespace: str = "team"
    job: str = "run"
    step: int = STEP
    """Seconds between two points of a line, and between two scrapes."""

    @property
    def start(self) -> int:
        """Unix seconds of the earliest time that is shown."""
        return 0 if self.seconds is None else max(0, self.end - self.seconds)

    @classmethod
    def of(cls, story: Story) -> "View":
        """That of a story, at the minute in which it says most."""
        return cls(title=story.name, end=story.drawn_at * 60)


@dataclass(frozen=True, slots=True)
class Drawing:
    """One dashboard of one story."""

    panels: list[JSON]
    """By panel what can be read on it: page/measure.js."""
    errors: list[str]
    """What the page's code complained of."""
    answers: dict[int, list[list[JSON]]]
    """By the panel's id the series of each of its queries."""
    marks: list[JSON]
    """Times, titles and colours of annotations."""
    height: int
    """Of the whole page, in pixels at the width of the smallest screen."""

    @property
    def empty(self) -> set[str]:
        """Titles of panels whose queries have found nothing."""
        answered = zip(self.panels, self.answers.values(), strict=True)
        return {panel["title"] for panel, answers in answered if not any(answers)}


def with_alerts(story: Story) -> World:
    """The story's series, and those that Prometheus makes of the alerts that fire at its minute."""
    whose = {"namespace": "team", "grpojob": "run"} if story.board == "training-health" else {}
    firing = [
        series("ALERTS", {"alertname": name, "alertstate": "firing", **whose})
        for name in sorted(story.firing)
    ]
    return {**story.world, **constant_series(1.0, *firing)}


@contextmanager
def scraped(story: Story, folder: Path) -> Iterator[str]:
    """A Prometheus that has scraped the story, every minute from its beginning to its end; yields
    its address."""
    lines = (
        line
        for name, timeline in with_alerts(story).items()
        for line in exposition(name, timeline, story.minutes)
    )
    with prometheus.filled(folder, "\n".join([*lines, "# EOF", ""])) as address:
        yield address


def draw(browser: Browser, server: str, name: str, view: View, *, is_open: bool = True) -> Drawing:
    """The dashboard of this name as it is at the view's end, with all of the time before or what
    fits of it; with all rows open, or as it is when somebody comes to it."""
    board = DASHBOARDS[name]
    if is_open:
        board = replace(board, rows=tuple(replace(row, is_collapsed=False) for row in board.rows))
    page = json.loads(grafana.render(board))
    view = replace(view, seconds=view.seconds or _seconds(page["time"]["from"]))
    asker = _Asker(server, name, view)
    answers = {
        panel["id"]: [asker.ask(one) for one in panel["targets"]]
        for panel in page["panels"]
        if _shown(panel)
    }
    marks = [mark for one in page["annotations"]["list"] for mark in asker.marks(one)]
    return draw_answers(browser, page, answers, marks, view)


def draw_answers(
    browser: Browser,
    page: JSON,
    answers: dict[int, list[list[JSON]]],
    marks: list[JSON],
    view: View,
) -> Drawing:
    """A dashboard's page with what is answered to its panels' queries, by their ids."""
    given = {
        "dashboard": page,
        "answers": answers,
        "annotations": marks,
        "range": {"from": view.start * 1000, "to": view.end * 1000, "step": view.step * 1000},
        "chosen": view.title,
    }
    seen = browser.evaluate(f"draw({json.dumps(given)})")
    return Drawing(seen["panels"], seen["errors"], answers, marks, seen["height"])


def _shown(panel: JSON) -> bool:
    return bool(panel["type"] != "row")


def _seconds(since: str) -> int:
    return int(since.removeprefix("now-").removesuffix("h")) * 3600


class _Asker:
    """Asks as Grafana does, for a time that ends with the view."""

    def __init__(self, server: str, name: str, view: View) -> None:
        self.server, self.start, self.end, self.step = server, view.start, view.end, view.step
        self.variables = {
            "$__range": f"{view.end - self.start}s",
            "$__rate_interval": f"{5 * view.step}s",
            "$namespace": ".*" if name == EVERY_NAMESPACE else view.namespace,
            "$cluster": ".*",
            "$job": view.job,
        }

    def ask(self, target: JSON) -> list[JSON]:
        """The series of a panel's query."""
        return self._over_time(target["expr"]) if target["range"] else self._now(target["expr"])

    def marks(self, annotation: JSON) -> list[JSON]:
        """A mark wherever the annotation's expression has a value, one for values in a row."""
        times = sorted(
            {time for one in self._over_time(annotation["expr"]) for time, _ in one["values"]}
        )
        first = [time for time in times if time - self.step not in times]
        return [
            {"title": annotation["name"], "color": annotation["iconColor"], "time": time * 1000}
            for time in first
        ]

    def _over_time(self, expression: str) -> list[JSON]:
        times = {"start": self.start, "end": self.end, "step": self.step}
        return self._result("query_range", expression, **times)

    def _now(self, expression: str) -> list[JSON]:
        return self._result("query", expression, time=self.end)

    def _result(self, what: str, expression: str, **times: int) -> list[JSON]:
        query = self._put_in(expression)
        found: list[JSON] = prometheus.ask(self.server, what, query=query, **times)["result"]
        return found

    def _put_in(self, expression: str) -> str:
        for name, value in self.variables.items():
            expression = expression.replace(name, value)
        return expression
