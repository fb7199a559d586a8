"""Every word that a status says is explained in one page, and no page explains a word that none says any more."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from grpo_api.report import Result
from grpo_api.status import ConditionType, Phase
from grpo_operator.reasons import Reason
from grpo_planner import PlanReason

DOCS = Path(__file__).parents[2] / "docs"


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
    assert sorted(explained("conditions.md", section, column=1)) == sorted({str(word) for word in words})


def test_the_page_of_faults_has_an_answer_to_every_result_but_success() -> None:
    answered = set(explained("faults.md", "Answers", column=2))
    assert set(Result) - {Result.SUCCEEDED} <= answered
    assert answered <= {*map(str, Result), *map(str, Reason)}
