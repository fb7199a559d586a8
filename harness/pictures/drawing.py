"""A dashboard's queries asked of Prometheus, and what it answers drawn in the browser.

Grafana's server does the former: it puts its variables in, asks for lines by steps and for single values at the end.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_codegen.dashboards import DASHBOARDS, grafana
from grpo_codegen.stories import Story
from grpo_codegen.timelines import exposition

from ..backfill import Prometheus, filled
from .browser import Browser

JSON = dict[str, Any]
STEP = 60
"""Seconds between two points of a line, and between two samples."""
VARIABLES = {"$__rate_interval": "5m", "$cluster": ".*", "$job": "run"}
EVERY_NAMESPACE = "fleet"


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


@contextmanager
def told(story: Story, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the story, every minute from its beginning to its end."""
    lines = (line for name, timeline in story.world.items() for line in exposition(name, timeline, story.minutes))
    with filled(folder, "\n".join([*lines, "# EOF", ""])) as server:
        yield server


def draw(browser: Browser, server: Prometheus, name: str, story: Story) -> Drawing:
    """The dashboard of this name as it is at the story's minute, with all of the time before or what fits of it."""
    page = json.loads(grafana.render(DASHBOARDS[name]))
    asker = _Asker(server, name, story.drawn_at * 60, _seconds(page["time"]["from"]))
    answers = {panel["id"]: [asker.ask(one) for one in panel["targets"]] for panel in page["panels"] if _shown(panel)}
    marks = [mark for one in page["annotations"]["list"] for mark in asker.marks(one)]
    times = {"from": asker.start * 1000, "to": asker.end * 1000, "step": STEP * 1000}
    given = {"dashboard": page, "answers": answers, "annotations": marks, "range": times, "chosen": story.name}
    seen = browser.evaluate(f"draw({json.dumps(given)})")
    return Drawing(seen["panels"], seen["errors"], answers, marks, seen["height"])


def _shown(panel: JSON) -> bool:
    return bool(panel["type"] != "row")


def _seconds(since: str) -> int:
    return int(since.removeprefix("now-").removesuffix("h")) * 3600


class _Asker:
    """Asks as Grafana does, for a time that ends at the second `end`."""

    def __init__(self, server: Prometheus, name: str, end: int, seconds: int) -> None:
        self.server, self.end = server, end
        self.start = max(0, end - seconds)
        namespace = ".*" if name == EVERY_NAMESPACE else "team"
        self.variables = {**VARIABLES, "$__range": f"{end - self.start}s", "$namespace": namespace}

    def ask(self, target: JSON) -> list[JSON]:
        """The series of a panel's query."""
        return self._over_time(target["expr"]) if target["range"] else self._now(target["expr"])

    def marks(self, annotation: JSON) -> list[JSON]:
        """A mark wherever the annotation's expression has a value, one for values in a row."""
        times = sorted({time for one in self._over_time(annotation["expr"]) for time, _ in one["values"]})
        first = [time for time in times if time - STEP not in times]
        return [{"title": annotation["name"], "color": annotation["iconColor"], "time": time * 1000} for time in first]

    def _over_time(self, expression: str) -> list[JSON]:
        times = {"start": self.start, "end": self.end, "step": STEP}
        found: list[JSON] = self.server.ask("query_range", query=self._put_in(expression), **times)["result"]
        return found

    def _now(self, expression: str) -> list[JSON]:
        found: list[JSON] = self.server.ask("query", query=self._put_in(expression), time=self.end)["result"]
        return found

    def _put_in(self, expression: str) -> str:
        for name, value in self.variables.items():
            expression = expression.replace(name, value)
        return expression
