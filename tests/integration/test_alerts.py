"""The matrix of docs/reference/alerts.md: every story is put to the trainer's rules, to every alert
of the chart and to the first rows of the dashboards.

promtool evaluates them, with the rules that Helm renders by default, all stories in few calls. A
cell is held to the whole story: what fires does so at the story's minute and has ended at its end,
what is silent is so at every fifth minute.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.findings.diagnosis import RULES
from grpo_api.report.training_metrics import SAVE_EVERY
from grpo_codegen.alert_page import first_row_color
from grpo_codegen.alerts import ALERTS
from grpo_codegen.dashboards import DASHBOARDS
from grpo_codegen.dashboards.first_row import ALERT_COLORS, FINDING_COLORS
from grpo_codegen.dashboards.promql import NONE
from grpo_codegen.stories import STORIES
from grpo_codegen.stories.job_series import RANK0, SAVED, SAVED_AT
from grpo_codegen.stories.run_findings import findings_at
from grpo_codegen.stories.story import Story
from grpo_codegen.stories.world import rank0
from grpo_codegen.timelines import constant, series, values
from harness.programs.prometheus import program
from tests.integration.test_chart import CHART, REGISTRY, helm, only, rendered

ON = "monitoring.prometheusRule.enabled=true"
EVERY = 5
"""Minutes between two looks at what is to be silent, and between two evaluations of the rules,
which take most of the time here."""
LINKS = (
    "monitoring.prometheusRule.runbookURL=https://docs.example.com/alerts.md",
    "monitoring.prometheusRule.dashboardURL=https://grafana.example.com",
)
CHOSEN = {"$cluster": ".*", "$namespace": "team", "$job": "run"}
"""What Grafana puts into a dashboard's expressions."""


def rules(*settings: str) -> dict[str, Any]:
    """The spec of the chart's PrometheusRule."""
    spec: dict[str, Any] = only(rendered(ON, *settings), "PrometheusRule")["spec"]
    return spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rules."""
    made = tmp_path_factory.mktemp("alerts")
    (made / "alerts.yaml").write_text(yaml.safe_dump(rules(*LINKS)))
    return made


def promtool(folder: Path, *arguments: str) -> str:
    """What it complains of; empty when it finds all well."""
    done = subprocess.run(
        [program("promtool"), *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_promtool_accepts_the_rules(folder: Path) -> None:
    assert promtool(folder, "check", "rules", "alerts.yaml") == ""


ASKED = " ".join(
    [alert.expression for alert in ALERTS]
    + [
        query.expression
        for board in DASHBOARDS.values()
        for panel in board.rows[0].panels
        for query in panel.queries
    ]
)
"""All that is asked for: promtool needs no other series."""
Look = dict[str, Any]


def look(expression: str, minute: int, *samples: tuple[Mapping[str, str], float]) -> Look:
    """What the expression must be at one minute."""
    expected = [{"labels": series("", labels), "value": value} for labels, value in samples]
    return {"expr": expression, "eval_time": f"{minute}m", "exp_samples": expected}


def firing_looks(story: Story) -> Iterator[Look]:
    """All alerts at the story's minute, none at its beginning and end, and at every fifth minute
    none that belongs to other stories."""
    # Once each, however many labels it fires with.
    names = 'max by (alertname) (ALERTS{{alertstate="firing",alertname!~"{}"}})'
    everything, others = names.format(""), names.format("|".join(story.firing))
    firing = [({"alertname": name}, 1.0) for name in sorted(story.firing)]
    yield look(everything, 1)
    yield look(everything, story.at, *firing)
    yield look(everything, story.minutes)
    for minute in range(0, story.minutes + 1, EVERY):
        yield look(others, minute)


Samples = list[tuple[Mapping[str, str], float]]


def first_row_names(story: Story) -> dict[str, Samples]:
    """By the label that a panel shows: what stands in the first row at the story's minute."""
    return {
        "finding": [({"finding": name}, 1.0) for name in story.findings] or _no_finding(story),
        "alertname": [({"alertname": name}, 1.0) for name in sorted(story.firing) or [NONE]],
        "phase": [({"phase": name}, 1.0) for name in _phases(story)],
    }


def first_row_looks(story: Story) -> Iterator[Look]:
    """What the first row of the story's dashboard says at its minute, by name."""
    names = first_row_names(story)
    for panel in DASHBOARDS[story.board].rows[0].panels:
        expression = panel.queries[0].expression
        for name, value in CHOSEN.items():
            expression = expression.replace(name, value)
        if panel.label in names:
            yield look(expression, story.at, *names[panel.label])
        elif panel.title == "Leaders":
            yield look(expression, story.at, ({}, leaders(story)))


def _no_finding(story: Story) -> Samples:
    """A run that is scraped says that it has none; of another nothing is known."""
    known = [
        line for name, line in story.world.items() if 'job="run"' in name and "finding=" in name
    ]
    is_scraped = any(line(story.at) is not None for line in known)
    return [({"finding": NONE}, 0.0)] if is_scraped else []


def _phases(story: Story) -> list[str]:
    return [
        match[1]
        for name, line in story.world.items()
        if (match := re.fullmatch(r'grpo_job_phase\{.*grpojob="run",phase="(\w+)"\}', name))
        and line(story.at) is not None
    ]


def leaders(story: Story) -> float:
    """How many replicas hold that they lead."""
    without_findings = {**story.base, **story.changes}  # which take seconds for all stories
    lines = [
        line for name, line in without_findings.items() if name.startswith("grpo_operator_leader{")
    ]
    return sum(line(story.at) or 0.0 for line in lines)


def told(story: Story) -> dict[str, Any]:
    """The story as promtool's test, with all looks."""
    return {
        "name": story.name,
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values(line, story.minutes)}
            for name, line in story.world.items()
            if name.partition("{")[0] in ASKED
        ],
        "promql_expr_test": [*firing_looks(story), *first_row_looks(story)],
    }


def complaints(folder: Path, name: str, tests: list[dict[str, Any]]) -> str:
    """What promtool complains of in these tests."""
    whole = {"rule_files": ["alerts.yaml"], "evaluation_interval": f"{EVERY}m", "tests": tests}
    # JSON is YAML, and written a hundred times as fast.
    (folder / f"{name}.yaml").write_text(json.dumps(whole))
    return promtool(folder, "test", "rules", f"{name}.yaml")


def _shares(parts: int) -> dict[str, list[Story]]:
    """One story of each alert and of each finding for `make test`, all others in parts."""
    first: dict[str, Story] = {}
    for story in STORIES:
        for name in (*story.alerts, *story.findings[:1]):
            first.setdefault(name, story)
    gate = {story.name: story for story in (STORIES[0], *first.values())}
    others = [story for story in STORIES if story.name not in gate]
    shares = {f"others-{part}": others[part::parts] for part in range(parts)}
    return {"first": list(gate.values()), **shares}


SHARES = _shares(2)


@pytest.mark.parametrize(
    "share",
    [pytest.param(name, marks=() if name == "first" else pytest.mark.slow) for name in SHARES],
)
def test_findings_alerts_and_first_rows_are_those_of_the_matrix(share: str, folder: Path) -> None:
    stories = SHARES[share]
    found = {story.name: set(findings_at(story.world, story.at)) for story in stories}
    assert found == {story.name: set(story.findings) for story in stories}
    assert complaints(folder, share, [told(story) for story in stories]) == ""


def test_a_bad_story_is_red_or_orange_and_a_good_one_green() -> None:
    assert len(STORIES) >= 60
    for story in STORIES:
        is_good = not (story.findings or story.alerts)
        assert (first_row_color(story) == "green") is is_good, story.name
    assert FINDING_COLORS.keys() == {NONE, *RULES}
    assert ALERT_COLORS.keys() == {NONE, *(alert.name for alert in ALERTS)}


def test_no_or_two_leaders_are_red() -> None:
    (panel,) = (one for one in DASHBOARDS["operator"].rows[0].panels if one.title == "Leaders")

    def color(number: float) -> str | None:
        reached = [color for bound, color in panel.bounds if number >= bound]
        return reached[-1] if reached else panel.base

    red = {story.name for story in STORIES if color(leaders(story)) == "red"}
    assert red == {"operator gone", "nobody leads", "two leaders"}


def test_each_alert_and_finding_has_a_story_and_each_story_its_row() -> None:
    names, stories = [alert.name for alert in ALERTS], [story.name for story in STORIES]
    assert len(set(names)) == len(names)
    assert len(set(stories)) == len(stories)
    assert {name for story in STORIES for name in story.firing} == set(names)
    assert {name for story in STORIES for name in story.findings} == set(RULES)
    page = Path("docs/reference/alerts.md").read_text()
    assert re.findall(r"^\| ([^|]+) \|.*\| (?:red|orange|green) \|$", page, re.MULTILINE) == stories


def test_what_an_alert_says_is_filled_in(folder: Path) -> None:
    """One of each kind of value; promtool compares the words."""
    story = next(story for story in STORIES if story.name == "preempted three times")
    alert = next(alert for alert in ALERTS if alert.name == "GRPOJobRestarting")
    words = {
        "exp_labels": {"severity": "warning", "namespace": "team", "grpojob": "run"},
        "exp_annotations": {
            "summary": "team/run was started 3 times within an hour",
            "description": alert.description,
            "runbook_url": "https://docs.example.com/alerts.md#grpojobrestarting",
            "dashboard_url": "https://grafana.example.com/d/grpo-training?var-namespace=team&var-job=run",
        },
    }
    asked = {"alertname": alert.name, "eval_time": f"{story.at}m", "exp_alerts": [words]}
    test = {**told(story), "promql_expr_test": [], "alert_rule_test": [asked]}
    assert complaints(folder, "words", [test]) == ""


def test_a_run_that_has_saved_nothing_for_hours_is_said_to_have_an_old_checkpoint(
    folder: Path,
) -> None:
    """One that saves every 1,000 steps."""
    saves = {rank0(SAVE_EVERY): constant(1000.0)}
    unsaved = {name: line for name, line in RANK0.items() if name not in (SAVED, SAVED_AT)}
    asked = 'max by (alertname) (ALERTS{alertname="GRPOCheckpointOld",alertstate="firing"})'
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values(line, 300)}
            for name, line in {**unsaved, **saves}.items()
            if name.partition("{")[0] in ASKED
        ],
        "promql_expr_test": [
            look(asked, 240),
            look(asked, 260, ({"alertname": "GRPOCheckpointOld"}, 1.0)),
        ],
    }
    assert complaints(folder, "unsaved", [test]) == ""


def of_two_operators(folder: Path, lines: Mapping[str, str], looks: list[Look]) -> str:
    """What promtool complains of where two operators have these series for an hour."""
    given = [{"series": name, "values": f"{line}x60"} for name, line in lines.items()]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": looks}
    return complaints(folder, "operators", [test])


def test_an_operator_hides_no_alert_on_the_jobs_of_another(folder: Path) -> None:
    """Teams that don't trust each other have an operator each; here that of team a fails and has a
    long queue."""
    lines = {
        'grpo_jobs_longest_wait_seconds{job="a",reason="WaitingForGPUs"}': "5000+0",
        'grpo_jobs_expected_wait_seconds{job="a",reason="WaitingForGPUs"}': "90000+0",
        'grpo_jobs_longest_wait_seconds{job="b",reason="WaitingForGPUs"}': "4500+0",
        'grpo_jobs_expected_wait_seconds{job="b",reason="WaitingForGPUs"}': "0+0",
        'controller_runtime_reconcile_total{job="a",controller="grpojob",result="error"}': "0+60",
        'controller_runtime_reconcile_total{job="b",controller="grpojob",result="success"}': "0+60",
        'controller_runtime_reconcile_total{job="b",controller="grpojob",result="error"}': "0+1",
        'grpo_job_reconcile_failures{job="a",namespace="a",grpojob="run"}': "9+0",
        'grpo_job_reconcile_failures{job="b",namespace="b",grpojob="run"}': "9+0",
    }
    names = "GRPOJobsWaiting|GRPOJobNotReconciled"
    firing = f'max by (alertname, job) (ALERTS{{alertstate="firing",alertname=~"{names}"}})'
    found = [({"alertname": name, "job": "b"}, 1.0) for name in names.split("|")]
    assert of_two_operators(folder, lines, [look(firing, 40, *found)]) == ""


@pytest.mark.parametrize(
    ("leads", "shown"), [((1, 0, 1), 1.0), ((1, 1, 1), 2.0), ((1, 0, 0), 0.0), ((0, 0, 1), 0.0)]
)
def test_each_of_several_operators_has_one_leader(
    folder: Path, leads: tuple[int, ...], shown: float
) -> None:
    replicas = ('job="a",instance="1"', 'job="a",instance="2"', 'job="b",instance="3"')
    lines = {
        f"grpo_operator_leader{{{labels}}}": f"{value}+0"
        for labels, value in zip(replicas, leads, strict=True)
    }
    (panel,) = (one for one in DASHBOARDS["operator"].rows[0].panels if one.title == "Leaders")
    expression = panel.queries[0].expression.replace("$cluster", ".*")
    assert of_two_operators(folder, lines, [look(expression, 40, ({}, shown))]) == ""


def test_what_costs_time_alone_is_only_an_information(folder: Path) -> None:
    """The severity of a finding is a template."""
    severities = {"straggler": "info", "collapsed reward": "warning"}
    tests = []
    for name, severity in severities.items():
        story = next(story for story in STORIES if story.name == name)
        chosen = 'max by (severity) (ALERTS{alertname="GRPORunFinding",alertstate="firing"})'
        asked = [look(chosen, story.at, ({"severity": severity}, 1.0))]
        tests.append({**told(story), "promql_expr_test": asked})
    assert complaints(folder, "severities", tests) == ""


def test_links_are_left_out_without_an_address() -> None:
    annotations = [rule["annotations"] for rule in rules()["groups"][0]["rules"]]
    assert all(found.keys() == {"summary", "description"} for found in annotations)


def test_the_cluster_stays_in_every_rule() -> None:
    for alert in ALERTS:
        clauses = re.findall(r"\bby \(([^)]*)\)", alert.expression)
        assert clauses, alert.name
        assert all(clause.startswith("cluster") for clause in clauses), alert.name


def test_only_the_operators_own_alerts_wake_somebody() -> None:
    critical = {alert.name for alert in ALERTS if alert.severity == "critical"}
    assert critical == {
        "GRPOTwoLeaders",
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
        for rule in rules(f"{prefix}.thresholds.unscoredShare=0.25", *LINKS)["groups"][0]["rules"]
    }
    assert found["GRPORewardsUnscored"]["expr"].endswith("> 0.25")
    assert not [rule for rule in found.values() if re.search(r"<\w+>", json.dumps(rule))]
    assert found["GRPOEngineDown"]["annotations"]["runbook_url"].endswith(".md#grpoenginedown")


def test_every_alert_can_be_switched_off_and_a_misspelt_one_is_rejected() -> None:
    key = "monitoring.prometheusRule.disabled"
    names = [alert.name for alert in ALERTS]
    for off in (names[::2], names[1::2]):
        left = [rule["alert"] for rule in rules(f"{key}={{{','.join(off)}}}")["groups"][0]["rules"]]
        assert left == [name for name in names if name not in off]
    chosen = ("--set", ON, "--set", f"{key}={{GRPOJobRestarted}}")
    done = helm("template", "x", str(CHART), *REGISTRY, *chosen)
    assert done.returncode != 0
    assert "GRPOJobRestarting" in done.stderr
