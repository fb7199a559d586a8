"""The stories' dashboards, drawn by Grafana's own components as in Grafana, of what a real
Prometheus answers.

No pixels are compared: what a reader meets is measured in the page. `make pictures` draws them for
one's own eyes.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from grpo_api.report import metrics, training_metrics
from grpo_codegen.alert_page import first_row_color
from grpo_codegen.dashboards import DASHBOARDS, grafana
from grpo_codegen.dashboards.first_row import ALERT_COLORS, FINDING_COLORS
from grpo_codegen.dashboards.panels import Row
from grpo_codegen.stories import STORIES
from grpo_codegen.stories.story import Story
from tests.integration.test_alerts import first_row_names
from tools.pictures.browser import HEIGHT, Browser, browser, page
from tools.pictures.drawing import JSON, Drawing, View, draw, draw_answers, scraped

pytestmark = pytest.mark.slow

STORY = {story.name: story for story in STORIES}
TRAINING, FLEET, OPERATOR = DASHBOARDS
ALWAYS = {
    ("healthy", TRAINING),
    ("OOM and re-plan", TRAINING),
    ("two engines", TRAINING),
    ("on CPUs", TRAINING),
    ("NaN", FLEET),
    ("operator gone", OPERATOR),
}
"""What is drawn each time; `make soak` draws all."""
CELLS = [
    pytest.param(
        STORY[name],
        board,
        id=f"{name}-{board}",
        marks=() if (name, board) in ALWAYS else (pytest.mark.soak,),
    )
    for name, board in product(STORY, DASHBOARDS)
    if not STORY[name].steps
]
NAMED = ("finding", "alertname", "phase")
"""Labels whose values the first row shows."""
MOST = 12
"""Most series in a panel."""
NAMES = {
    name
    for metric in (*training_metrics.TRAINER, *metrics.OPERATOR)
    for name in (metric.name, metric.key)
}
MARKS = {
    "healthy": Counter(Checkpoint=3, Reference=2),
    "straggler": Counter(Attempt=1, Checkpoint=1, Finding=1),
    "OOM and re-plan": Counter({"Attempt": 2, "Restart": 1, "Out of memory": 1}),
    "preempted three times": Counter(Attempt=4, Checkpoint=4),
    "operator gone": Counter(Attempt=1, Checkpoint=1),
}
"""Annotations of some stories' training: each change once, none at a job's beginning or for an
operator's absence."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser(page()) as one:
        yield one


@pytest.mark.parametrize(("story", "board"), CELLS)
def test_a_reader_finds_everything_legible(
    story: Story, board: str, chromium: Browser, tmp_path: Path
) -> None:
    with scraped(story, tmp_path) as server:
        drawing = draw(chromium, server, board, View.of(story))
    assert drawing.errors == []
    assert {panel["title"]: panel["faults"] for panel in drawing.panels if panel["faults"]} == {}
    assert [
        panel["title"] for panel in drawing.panels if panel["title"] not in panel["words"]
    ] == []
    assert [panel["title"] for panel in drawing.panels if panel["title"] in NAMES] == []
    assert [panel["title"] for panel in drawing.panels if len(panel["legend"]) > MOST] == []
    assert unsaid(drawing, board) == []
    if board == TRAINING and story.name in MARKS:
        assert Counter(mark["title"] for mark in drawing.marks) == MARKS[story.name]


def unsaid(drawing: Drawing, board: str) -> list[str]:
    """Titles of empty panels that don't say why; a gauge's words are painted and can't be read
    here."""
    why = {panel.title: panel.empty for row in DASHBOARDS[board].rows for panel in row.panels}
    found = [
        panel
        for panel in drawing.panels
        if panel["title"] in drawing.empty and panel["type"] != "gauge"
    ]
    return [panel["title"] for panel in found if why[panel["title"]] not in panel["words"]]


def test_a_bad_story_is_red_or_orange_for_whoever_looks_and_a_good_one_green(
    chromium: Browser,
) -> None:
    """Only the first row is drawn, of the names that test_alerts.py holds to Prometheus."""
    painted = {story.name: worst_color(chromium, story) for story in STORIES}
    assert painted == {story.name: first_row_color(story) for story in STORIES}


def worst_color(chromium: Browser, story: Story) -> str:
    """The worst colour that a name in the first row is painted with."""
    names = {
        label: [values for values, _ in shown] for label, shown in first_row_names(story).items()
    }
    drawing = first_row_drawing(chromium, story, names)
    colors = {
        color_name(color)
        for panel in drawing.panels
        for word, color in zip(panel["words"], panel["colors"], strict=True)
        if word != panel["title"]
    }
    return next((name for name in ("red", "orange") if name in colors), "green")


def first_row_drawing(
    chromium: Browser, story: Story, names: Mapping[str, Sequence[Mapping[str, str]]]
) -> Drawing:
    """The panels of names in the first row; `names` has the series of each by its label."""
    board = DASHBOARDS[story.board]
    named = tuple(panel for panel in board.rows[0].panels if panel.label in NAMED)
    text = json.loads(grafana.render(replace(board, rows=(Row("First row", named),))))
    answers: dict[int, list[list[JSON]]] = {
        shown["id"]: [
            [{"metric": labels, "value": [story.at * 60, "1"]} for labels in names[panel.label]]
        ]
        for shown, panel in zip(text["panels"][1:], named, strict=True)
    }
    drawing = draw_answers(chromium, text, answers, [], View.of(story))
    assert drawing.errors == []
    return drawing


@pytest.mark.parametrize("count", [1, 4])
def test_names_stay_legible_when_many_things_are_wrong_at_once(
    count: int, chromium: Browser
) -> None:
    longest_findings = sorted(FINDING_COLORS, key=len)[-count:]
    longest_alerts = sorted(ALERT_COLORS, key=len)[-count:]
    names = {
        "finding": [{"finding": name} for name in longest_findings],
        "alertname": [{"alertname": name} for name in longest_alerts],
        "phase": [{"phase": "Running"}],
    }
    drawing = first_row_drawing(chromium, STORY["healthy"], names)
    assert {panel["title"]: panel["faults"] for panel in drawing.panels if panel["faults"]} == {}
    shown = {word for panel in drawing.panels for word in panel["words"]}
    assert shown >= {*longest_findings, *longest_alerts}


def color_name(color: str) -> str:
    """The name of a colour as browsers write it, `rgb(r, g, b)`."""
    red, green, blue = (int(part) for part in re.findall(r"\d+", color)[:3])
    if red < 150 or red - blue < 100:
        return "other"
    return "red" if green < red / 2.5 else "orange"


def test_the_first_screen_has_the_whole_page_with_its_curves(
    chromium: Browser, tmp_path: Path
) -> None:
    with scraped(STORY["diverging slowly"], tmp_path) as server:
        draw(chromium, server, TRAINING, View.of(STORY["diverging slowly"]), is_open=False)
    places = (
        "[...document.querySelectorAll('[data-panel]:not([data-type=row])')].map(one => "
        "one.getBoundingClientRect().bottom)"
    )
    assert max(chromium.evaluate(places)) < HEIGHT
    assert chromium.picture(HEIGHT).startswith(b"\x89PNG")
