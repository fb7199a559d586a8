"""Every alert of the chart is put to every story by promtool: each fires where it says so, and
nowhere else.

The rules are those that Helm renders by default. A cell of the matrix is held to the whole story:
what fires does so at the story's minute and has ended at its end, what is silent is so at every
fifth minute.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_codegen.alerts import ALERTS
from grpo_codegen.alerts.alert import Alert
from grpo_codegen.stories import STORIES
from grpo_codegen.stories.story import Story
from grpo_codegen.timelines import values
from harness.programs.prometheus import program
from tests.integration.test_chart import CHART, helm, only, rendered

ON = "monitoring.prometheusRule.enabled=true"
EVERY = 5
"""Minutes between two looks at what is to be silent."""


def matrix() -> str:
    """The table of alerts and stories as the documents have it, which are generated from them."""
    page = Path("docs/alerts.md").read_text()
    return page[page.index("| alert |") :].split("\n\n")[0]


def rules(*settings: str) -> dict[str, Any]:
    """The spec of the chart's PrometheusRule."""
    spec: dict[str, Any] = only(rendered(ON, *settings), "PrometheusRule")["spec"]
    return spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rules."""
    made = tmp_path_factory.mktemp("alerts")
    (made / "alerts.yaml").write_text(yaml.safe_dump(rules()))
    return made


def promtool(folder: Path, *arguments: str) -> str:
    """What it complains of; empty when it finds all well."""
    done = subprocess.run(
        [program("promtool"), *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_promtool_accepts_the_rules(folder: Path) -> None:
    assert promtool(folder, "check", "rules", "alerts.yaml") == ""


def firing(alert: Alert, minute: int, fires: bool) -> dict[str, Any]:
    """A look at one alert at one minute."""
    alerts = f'ALERTS{{alertname="{alert.name}",alertstate="firing"}}'
    # One, however many labels it fires with.
    expression = f"count(count by (alertname) ({alerts})) or vector(0)"
    return {
        "expr": expression,
        "eval_time": f"{minute}m",
        "exp_samples": [{"labels": "{}", "value": int(fires)}],
    }


def looks(alert: Alert, story: Story) -> list[dict[str, Any]]:
    """All looks at one cell of the matrix."""
    if story.name in alert.fires_in:
        return [
            firing(alert, 1, False),
            firing(alert, story.at, True),
            firing(alert, story.minutes, False),
        ]
    return [firing(alert, minute, False) for minute in range(0, story.minutes + 1, EVERY)]


def told(story: Story) -> dict[str, Any]:
    """The story as promtool's test, with all alerts."""
    return {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values(line, story.minutes)}
            for name, line in story.world.items()
        ],
        "promql_expr_test": [look for alert in ALERTS for look in looks(alert, story)],
    }


FIRST_STORIES = {alert.fires_in[0] for alert in ALERTS}
"""One story of each alert: those of `make test`."""


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(one, marks=() if one.name in FIRST_STORIES else pytest.mark.slow)
        for one in STORIES
    ],
    ids=lambda story: story.name,
)
def test_alerts_fire_where_they_say_so_and_nowhere_else(story: Story, folder: Path) -> None:
    test = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [told(story)]}
    file = folder / f"{story.name}.yaml".replace(" ", "-")
    file.write_text(yaml.safe_dump(test))
    assert promtool(folder, "test", "rules", file.name) == ""


def test_each_alert_has_its_row_and_fires_somewhere() -> None:
    names, stories = [alert.name for alert in ALERTS], [story.name for story in STORIES]
    assert len(set(names)) == len(names)
    assert len(set(stories)) == len(stories)
    assert {name for alert in ALERTS for name in alert.fires_in} <= set(stories)
    assert [alert.name for alert in ALERTS if not alert.fires_in] == []
    assert re.findall(r"^\| \[(\w+)\]", matrix(), re.MULTILINE) == names


def test_what_an_alert_says_is_filled_in(folder: Path) -> None:
    """One of each kind of value; promtool compares the words."""
    story = next(story for story in STORIES if story.name == "preempted three times")
    alert = next(alert for alert in ALERTS if alert.name == "GRPOJobRestarting")
    words = {
        "exp_labels": {"severity": "warning", "namespace": "team", "grpojob": "run"},
        "exp_annotations": {
            "summary": "team/run was started 3 times within an hour",
            "description": alert.description,
            "runbook_url": "https://grpo.dev/docs/alerts.md#grpojobrestarting",
        },
    }
    look = {"alertname": alert.name, "eval_time": f"{story.at}m", "exp_alerts": [words]}
    test = {**told(story), "promql_expr_test": [], "alert_rule_test": [look]}
    everything = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (folder / "words.yaml").write_text(yaml.safe_dump(everything))
    assert promtool(folder, "test", "rules", "words.yaml") == ""


def test_only_the_operators_own_alerts_wake_somebody() -> None:
    critical = {alert.name for alert in ALERTS if alert.severity == "critical"}
    assert critical == {
        "GRPOOperatorDown",
        "GRPOOperatorDeaf",
        "GRPOOperatorFailing",
        "GRPOQueueStuck",
    }
    assert not [
        alert.name
        for alert in ALERTS
        if alert.severity == "critical" and "grpojob)" in alert.expression
    ]


def test_thresholds_are_the_charts_values() -> None:
    prefix = "monitoring.prometheusRule"
    values = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["prometheusRule"][
        "thresholds"
    ]
    used = {
        name for alert in ALERTS for name in re.findall(r"<(\w+)>", alert.expression + alert.for_)
    }
    assert used == values.keys()
    found = {
        rule["alert"]: rule
        for rule in rules(f"{prefix}.thresholds.maxKL=7.5")["groups"][0]["rules"]
    }
    assert found["GRPOKLHigh"]["expr"].endswith("> 7.5")
    assert not [
        rule for rule in found.values() if re.search(r"<\w+>", f"{rule['expr']} {rule['for']}")
    ]
    assert found["GRPOJobPending"]["for"] == "1h"
    assert found["GRPOKLHigh"]["annotations"]["runbook_url"].endswith("/docs/alerts.md#grpoklhigh")


def test_every_alert_can_be_switched_off_and_a_misspelt_one_is_rejected() -> None:
    key = "monitoring.prometheusRule.disabled"
    names = [alert.name for alert in ALERTS]
    for off in (names[::2], names[1::2]):
        left = [rule["alert"] for rule in rules(f"{key}={{{','.join(off)}}}")["groups"][0]["rules"]]
        assert left == [name for name in names if name not in off]
    done = helm("template", "x", str(CHART), "--set", ON, "--set", f"{key}={{GRPOStragler}}")
    assert done.returncode != 0
    assert "GRPOStraggler" in done.stderr
