"""Pages say what the code says: drawn layers are the contracts, and every word of a status is
explained."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.job import parse_spec
from grpo_api.report import metrics, training_metrics
from grpo_api.report.report import Result
from grpo_api.spec import immutability
from grpo_api.status.status import Condition, ConditionType, Phase
from grpo_operator.records.reasons import Reason
from grpo_operator.report import kstatus
from grpo_operator.report.status import phase
from grpo_planner.result.result import PlanReason
from grpo_planner.search.notes import spec_notes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def explained(page: str, section: str, column: int) -> list[str]:
    """The words in backquotes of one column of the tables of a section."""
    text = (DOCS / page).read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[column] for line in text.splitlines() if line.startswith("|")]
    return [word for cell in cells for word in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize(
    ("section", "words"),
    [("Conditions", ConditionType), ("Phases", Phase), ("Reasons", {*Reason, *PlanReason})],
)
def test_the_page_of_conditions_explains_each_word_once(section: str, words: Iterable[str]) -> None:
    assert sorted(explained("reference/conditions.md", section, column=1)) == sorted(
        {str(word) for word in words}
    )


def conditions_named(text: str) -> set[str]:
    """The conditions among the words in backquotes."""
    return set(re.findall(r"`(\w+)`", text)) & set(ConditionType)


def test_each_reason_is_explained_at_a_condition_that_has_it() -> None:
    page = (DOCS / "reference/conditions.md").read_text().partition("\n## Reasons\n")[2]
    conditions_of = defaultdict(set)
    for recorded in (ROOT / "tests/golden/recorded/status").glob("*.json"):
        shown = re.findall(r'"(\w+)=(?:True|False|Unknown) (\w+) since', recorded.read_text())
        for condition, reason in shown:
            conditions_of[reason].add(condition)
    assert len(conditions_of) > 40
    heading: set[str] = set()
    for line in page.splitlines():
        named = conditions_named(line)
        row = re.match(r"\| `(\w+)` \|", line)
        if row and row[1] in conditions_of:
            assert conditions_of[row[1]] & (heading | named), row[1]
        elif line and not line.startswith("|"):
            heading = named


def test_the_column_reason_follows_the_conditions_that_the_page_names_in_this_order() -> None:
    page = (DOCS / "reference/conditions.md").read_text()
    (named,) = re.findall(r"condition\nthat is not well, of ([^.]*)\.", page)
    assert re.findall(r"`(\w+)`", named) == [kind for kind, _ in kstatus._STEPS]


def test_the_page_of_symptoms_has_the_phase_of_each_reason() -> None:
    page = (DOCS / "how-to/operate/troubleshoot.md").read_text()
    rows = re.findall(r"^\| `(\w+)`, `(\w+)`", page, re.MULTILINE)
    phases = [(word, reason) for word, reason in rows if word in set(Phase)]
    assert len(phases) >= 3
    for word, reason in phases:
        refusal = Condition.model_validate(
            {"type": ConditionType.ADMITTED, "status": "False", "reason": reason}
            | {"lastTransitionTime": "2026-01-01T00:00:00Z"}
        )
        assert phase([refusal]) == word, reason


def test_the_page_of_faults_has_an_answer_to_every_result_but_success() -> None:
    answered = set(explained("explanation/faults.md", "Answers", column=2))
    assert set(Result) - {Result.SUCCEEDED} <= answered
    assert answered <= {*map(str, Result), *map(str, Reason)}


def test_the_page_of_changes_has_every_field_that_may_change() -> None:
    changeable = set(explained("how-to/train/resume.md", "Change", column=2))
    assert {*immutability.ALWAYS, *immutability.WHILE_STOPPED} <= changeable | {"rewards"}


def test_pages_name_only_metrics_that_exist() -> None:
    declared = {metric.name for metric in (*metrics.OPERATOR, *training_metrics.TRAINER)}
    for page in DOCS.rglob("*.md"):
        named = re.findall(r"`(grpo_(?:jobs?|training|operator)_\w+[a-z])[`{]", page.read_text())
        assert {name.removesuffix("_bucket") for name in named} <= declared, page


def drawn_layers() -> dict[str, list[set[str]]]:
    """The layers of each room as the page draws them: two rooms side by side, a line per layer,
    highest first."""
    rooms: dict[str, list[set[str]]] = {}
    for block in re.findall(
        r"```\n(grpo_.*?)```", (DOCS / "internals/architecture.md").read_text(), re.DOTALL
    ):
        lines = block.splitlines()
        middle = lines[0].rindex("grpo_")
        for title, *layers in (
            [line[:middle] for line in lines],
            [line[middle:] for line in lines],
        ):
            rooms[title.strip()] = [
                set(layer.replace("/", "").split()) for layer in layers if layer.strip()
            ]
    return rooms


def test_the_drawn_layers_are_those_that_the_linter_checks() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    checked = {
        contract["containers"][0]: [set(layer.split(" | ")) for layer in contract["layers"]]
        for contract in contracts
        if contract["type"] == "layers" and contract["containers"]
    }
    drawn = drawn_layers()
    assert set(drawn) == {"grpo_api", "grpo_operator", "grpo_planner", "grpo_trainer"}
    assert drawn == {room: checked[room] for room in drawn}


def test_each_place_that_the_architecture_names_defines_what_it_names() -> None:
    page = (DOCS / "internals/architecture.md").read_text()
    rows = re.findall(r"^\| (?:is|are) .*\]\(\.\./\.\./(\S+)\) \| `(\w+)` \|$", page, re.MULTILINE)
    assert len(rows) >= 30
    for path, name in rows:
        source = (ROOT / path).read_text()
        assert re.search(
            rf"^ *(?:(?:async )?(?:def|class) {name}\b|{name} = )", source, re.MULTILINE
        ), (
            path,
            name,
        )


def documents() -> Iterator[dict[str, Any]]:
    """The objects in the YAML blocks of README and pages, and those that a workflow creates."""
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for block in re.findall(r"```yaml[^\n]*\n(.*?)```", page.read_text(), re.DOTALL):
            for document in yaml.safe_load_all(block):
                if isinstance(document, dict):
                    yield document
                    for template in (document.get("spec") or {}).get("templates", ()):
                        yield yaml.safe_load(template.get("resource", {}).get("manifest", "{}"))


def test_the_jobs_of_the_pages_have_no_setting_that_a_plan_warns_of() -> None:
    jobs = [document for document in documents() if document.get("kind") == "GRPOJob"]
    assert len(jobs) >= 6
    for job in jobs:
        assert list(spec_notes(parse_spec(job["spec"]))) == [], job["metadata"]


def test_the_argo_workflow_makes_a_valid_job_and_waits_for_phases_that_end_one() -> None:
    page = (DOCS / "how-to/integrate/argo-workflows.md").read_text()
    workflow, rights = (
        yaml.safe_load(block) for block in re.findall(r"```yaml \S+\n(.*?)```", page, re.DOTALL)
    )
    steps = {template["name"]: template for template in workflow["spec"]["templates"]}
    training = steps["train"]["resource"]
    job = yaml.safe_load(training["manifest"])
    parse_spec(job["spec"])
    conditions = [training["successCondition"], training["failureCondition"]]
    assert conditions == [f"status.phase == {phase}" for phase in (Phase.SUCCEEDED, Phase.FAILED)]
    (rule, _) = rights["rules"]
    assert rule["apiGroups"] == [job["apiVersion"].partition("/")[0]]
    assert {"create", "get", "watch"} <= set(rule["verbs"])
