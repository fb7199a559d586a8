"""The stories' dashboards, drawn by Grafana's own components as in Grafana, of what a real
Prometheus answers.

No pixels are compared: what a reader meets is measured in the page. `make pictures` draws them for
one's own eyes.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from grpo_api.report import metrics, training_metrics
from grpo_codegen.dashboards import DASHBOARDS
from grpo_codegen.stories import STORIES
from grpo_codegen.stories.story import Story
from tools.pictures.browser import HEIGHT, Browser, browser
from tools.pictures.bundle import page
from tools.pictures.drawing import Drawing, View, draw, told

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
]
MOST = 12
"""Most series in a panel."""
NAMES = {
    name
    for metric in (*training_metrics.TRAINER, *metrics.OPERATOR)
    for name in (metric.name, metric.key)
}
NOBODY_WAITS, NOTHING_FAILED = {"Who waits longest"}, {"Failed jobs by reason", "Failed jobs"}
SILENT = {
    "Time left",
    "Age of the last checkpoint",
    "KL, of what the guard allows",
    "Completions not scored",
}
"""Empty while rank 0 answers nobody."""
SERVERS = {
    "Engines that serve",
    "Syncs that the last engine lacks",
    "Tokens per second of an engine",
    "Prompts that wait in engines",
    "Cache of keys and values in use",
}
"""Empty without engines in pods of their own."""
ENGINES = SERVERS | {
    "Engine against trainer",
    "Weight of a token in the loss",
    "Sync of the weights, and its proof",
    "Proofs that failed, engines given up",
}
"""Empty where the policy samples by itself."""
EMPTY: dict[str, dict[str, set[str]]] = {
    TRAINING: {
        "two engines": set(),
        "engine gone": set(),
        "engine computes otherwise": set(),
        "engine with other weights": {"Age of the last checkpoint"},
        "diverging fast": ENGINES | {"KL, of what the guard allows"},
        "NaN": ENGINES | SILENT | {"Standstill, of what is allowed"},
        "OOM and re-plan": ENGINES | {"Age of the last checkpoint"},
        "stalled exporter": ENGINES | SILENT,
        "hang": ENGINES | {"Age of the last checkpoint"},
        "on CPUs": ENGINES
        | {
            "KL, of what the guard allows",
            "Distance from the reference (KL)",
            "Slowest rank over the median",
            "Memory: load",
            "Memory: sync",
            "Memory: generate",
            "Memory: reference",
            "Memory: forward",
            "Memory: backward",
            "Memory: step",
            "Memory beside tensors",
            "Effective training time",
            "What its GPUs did",
            "Cost so far",
            "How busy its GPUs are",
            "Memory of its GPUs",
        },
        "operator gone": ENGINES
        | {
            "Phase",
            "Restarts",
            "Standstill, of what is allowed",
            "Effective training time",
            "What its GPUs did",
            "Cost so far",
        },
    },
    FLEET: {
        "NaN": NOBODY_WAITS,
        "waiting for GPUs": NOTHING_FAILED,
        "on CPUs": NOBODY_WAITS
        | NOTHING_FAILED
        | {
            "GPUs held, by product",
            "GPUs held, by namespace",
            "GPUs free, by product",
            "GPUs held and idle, by namespace",
            "Effective training time",
            "What the GPUs did",
            "Dearest jobs",
            "Highest KL",
            "Slowest rank over the median",
        },
        "operator gone": NOBODY_WAITS
        | NOTHING_FAILED
        | {
            "Jobs that run",
            "Jobs that wait",
            "Jobs that begin again",
            "Failed within an hour",
            "GPUs held",
            "Dearest jobs",
        },
    },
    OPERATOR: {
        "operator gone": {
            "Version",
            "Reconciles that fail",
            "Deafest watch",
            "Objects it can't read",
        },
        "queue stuck": {"Reconciles that fail"},
    },
}
"""By dashboard and story the panels that have nothing to show and say so in words."""
QUIET = {TRAINING: ENGINES, FLEET: NOBODY_WAITS | NOTHING_FAILED, OPERATOR: set[str]()}
"""Those of all other stories."""
MARKS = {
    "healthy": Counter(Checkpoint=3, Reference=2),
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
    with told(story, tmp_path) as server:
        drawing = draw(chromium, server, board, View.of(story))
    assert drawing.errors == []
    assert {panel["title"]: panel["faults"] for panel in drawing.panels if panel["faults"]} == {}
    assert [
        panel["title"] for panel in drawing.panels if panel["title"] not in panel["words"]
    ] == []
    assert [panel["title"] for panel in drawing.panels if panel["title"] in NAMES] == []
    assert [panel["title"] for panel in drawing.panels if len(panel["legend"]) > MOST] == []
    assert drawing.empty == EMPTY[board].get(story.name, QUIET[board])
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


def test_every_panel_has_something_to_show_in_some_story() -> None:
    for board, of_stories in EMPTY.items():
        sets = [of_stories.get(name, QUIET[board]) for name in STORY]
        assert set.intersection(*sets) == set(), board


def test_the_first_screen_has_the_verdicts(chromium: Browser, tmp_path: Path) -> None:
    with told(STORY["diverging slowly"], tmp_path) as server:
        draw(chromium, server, TRAINING, View.of(STORY["diverging slowly"]))
    places = (
        "[...document.querySelectorAll('[data-type=stat]')].map(one => "
        "one.getBoundingClientRect().bottom)"
    )
    assert max(chromium.evaluate(places)[:10]) < HEIGHT / 2
    assert chromium.picture(HEIGHT).startswith(b"\x89PNG")
