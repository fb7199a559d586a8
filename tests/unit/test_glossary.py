"""The glossary's words are those of the spec, the status, the metrics and the pages."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.report.metrics import OPERATOR
from grpo_api.report.report import Result
from grpo_api.report.training_metrics import TRAINER
from grpo_api.status.status import ConditionType
from grpo_api.text.contract import LEADER_KIND

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs/reference/glossary.md"
MOST_WORDS = 40
ROW = re.compile(r"^\| (?P<word>[^|]+) \| (?P<meaning>[^|]+) \| (?P<where>[^|]*) ?\|$")
FILES = {"provenance.json"}
DEFINITION: dict[str, Any] = yaml.load(
    (ROOT / "crds" / "grpojob.yaml").read_text(), yaml.CSafeLoader
)
SCHEMA: dict[str, Any] = DEFINITION["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def rows() -> list[tuple[str, str]]:
    """Each word with the cell that says where it is found."""
    found = [ROW.match(line) for line in GLOSSARY.read_text().splitlines()]
    cells = [(one["word"].strip(), one["where"].strip()) for one in found if one]
    return [cell for cell in cells if cell[0] not in ("word", "---")]


def has_field(path: str) -> bool:
    """Return True if the CRD has the field; a path without `spec.` or `status.` is one of the
    spec."""
    names = path.split(".")
    if names[0] not in SCHEMA["properties"]:
        names.insert(0, "spec")
    schema = SCHEMA
    for name in names:
        schema = schema.get("items", schema)
        schema = schema.get("properties", {}).get(name.removesuffix("[]"))
        if schema is None:
            return False
    return True


def is_known(name: str) -> bool:
    """Return True for a metric, condition, result, kind or file of ours, else for a field."""
    metrics = {metric.name for metric in (*OPERATOR, *TRAINER)}
    if name.partition("{")[0] in metrics:
        return True
    if name in {*map(str, ConditionType), *map(str, Result), LEADER_KIND, *FILES}:
        return True
    return has_field(name.partition(":")[0])


def test_the_glossary_has_at_most_forty_words_and_each_once() -> None:
    words = [word for word, _ in rows()]
    assert len(words) == len(set(words))
    assert 20 < len(words) <= MOST_WORDS
    assert words == sorted(words, key=str.lower)


@pytest.mark.parametrize(("word", "where"), rows(), ids=[word for word, _ in rows()])
def test_what_the_glossary_names_exists(word: str, where: str) -> None:
    unknown = [name for name in re.findall(r"`([^`]+)`", where) if not is_known(name)]
    assert unknown == []


def test_a_field_that_does_not_exist_is_found() -> None:
    assert has_field("spec.training.beta")
    assert not has_field("spec.training.bta")
    assert not is_known("WeightsProven")


@pytest.mark.parametrize(
    "word", [word.partition(",")[0].partition(" of ")[0] for word, _ in rows()]
)
def test_the_pages_use_the_glossary_s_words(word: str) -> None:
    pages = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page != GLOSSARY]
    using = [page for page in pages if word.lower() in page.read_text().lower()]
    assert using
