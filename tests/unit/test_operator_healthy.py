"""Healthy while a gang trains: what rank 0 finds in the numbers of its steps."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grpo_api.report.report import Finding
from grpo_api.status.status import Condition
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.report.events import event, telling_change
from grpo_operator.report.status import to_json
from tests.unit.operator_world import (
    NOW,
    active_status,
    after,
    condition,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    of_type,
)

COLLAPSED = Finding(
    finding="EntropyCollapsed",
    since=56,
    confidence=0.9,
    evidence={"entropy": 0.01, "highestEntropy": 0.9},
    advice="The policy repeats itself: raise training.temperature.",
)
FALLING = Finding(finding="RewardFalling", since=70, confidence=0.6)


def status(*findings: Finding, step: int = 80, known: dict[str, Any] | None = None) -> Any:
    """The status of a job that trains, whose rank 0 finds this."""
    pull = make_pull(stage="Training", step=step, findings=list(findings))
    job = make_job(status=known or active_status())
    seen = make_seen(job, make_child(), make_pod(0), make_pod(1), pull=pull)
    return after(seen, Decision(Action.WAIT))


def test_a_run_with_findings_is_not_healthy_and_says_what_to_do() -> None:
    found = status(COLLAPSED, FALLING)
    message = (
        "EntropyCollapsed since step 56. The policy repeats itself: raise training.temperature. "
        "Also RewardFalling since step 70."
    )
    assert of_type(found, "Healthy") == ("False", "EntropyCollapsed", message)
    assert found.reason == "EntropyCollapsed", "kubectl's column"
    assert [one["finding"] for one in to_json(found)["findings"]] == [
        "EntropyCollapsed",
        "RewardFalling",
    ]


def test_a_run_without_findings_is_healthy_after_some_steps() -> None:
    assert of_type(status(), "Healthy")[:2] == ("True", "NoFindings")
    assert status().reason is None
    assert status().findings is None
    early = {one.type for one in status(step=19).conditions}
    assert "Healthy" not in early
    assert of_type(status(COLLAPSED, step=3), "Healthy")[0] == "False"


def test_numbers_that_move_change_no_condition() -> None:
    """Each change of a condition is written at once."""
    moved = COLLAPSED.model_copy(update={"evidence": {"entropy": 0.005}, "confidence": 0.95})
    assert of_type(status(COLLAPSED), "Healthy") == of_type(status(moved), "Healthy")


def test_a_finding_and_its_end_are_an_event() -> None:
    job = make_job()
    sick, well = status(COLLAPSED), status()
    conditions: list[list[Condition]] = [[], well.conditions]
    for old in conditions:
        told = telling_change(old, sick.conditions)
        assert told is not None
        made = event(job, told, NOW)
        assert (made["type"], made["reason"]) == ("Warning", "EntropyCollapsed")
    told = telling_change(sick.conditions, well.conditions)
    assert told is not None
    assert event(job, told, NOW)["type"] == "Normal"
    unchanged = [one for one in sick.conditions if one.type != "Healthy"]
    assert telling_change(unchanged, [*unchanged, *well.conditions]) is None, "no news"


def test_a_gang_that_is_degraded_says_that_first() -> None:
    known = active_status()
    known["conditions"].append(condition("Degraded", reason="CheckpointNotWritten"))
    pull = make_pull(
        stage="Training", step=80, findings=[COLLAPSED], checkpoint_problem="the volume is full"
    )
    seen = make_seen(make_job(status=known), make_child(), make_pod(0), make_pod(1), pull=pull)
    assert after(seen, Decision(Action.WAIT)).reason == "CheckpointNotWritten"


@given(
    findings=st.lists(
        st.builds(
            Finding,
            finding=st.from_regex(r"[A-Z][A-Za-z]{0,63}", fullmatch=True),
            since=st.integers(0, 2**31),
            confidence=st.floats(0, 1),
            evidence=st.dictionaries(
                st.text(min_size=1, max_size=20),
                st.floats(allow_nan=False, allow_infinity=False),
                max_size=4,
            ),
            advice=st.text(max_size=300),
        ),
        min_size=1,
        max_size=16,
    )
)
def test_whatever_a_pod_reports_is_a_status_that_can_be_written(findings: list[Finding]) -> None:
    found = status(*findings)
    held, reason, message = of_type(found, "Healthy")
    assert (held, reason) == ("False", findings[0].finding)
    assert len(message) <= 1024
    assert to_json(found)
