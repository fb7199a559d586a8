"""Healthy while a gang trains: what rank 0 finds in the numbers of its steps."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.report.report import Finding
from grpo_api.status.status import Condition
from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import LEAVES_NO_ATTEMPT, Action, Decision
from grpo_operator.decide.observation import Silence
from grpo_operator.report.events import event, telling_change
from grpo_operator.report.status import to_json
from tests.unit.operator_world import (
    NOW,
    PLAN,
    active_status,
    after,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    of_type,
    terminated,
)

COLLAPSED = Finding(
    finding="EntropyCollapsed",
    since=56,
    confidence=0.9,
    evidence={"entropy": 0.01, "highestEntropy": 0.9},
    advice="The policy repeats itself: raise training.temperature.",
)
FALLING = Finding(finding="RewardFalling", since=70, confidence=0.6)


def status(
    *findings: Finding,
    step: int = 80,
    stage: str = "Training",
    known: dict[str, Any] | None = None,
) -> Any:
    """The status of a job that trains, whose rank 0 finds this."""
    pull = make_pull(stage=stage, step=step, findings=list(findings))
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


def test_a_run_that_begins_anew_is_not_well_by_what_the_last_attempt_was() -> None:
    well = to_json(status())
    new = status(step=3, known=well)
    assert of_type(new, "Healthy")[:2] == ("Unknown", "TooFewSteps")
    assert of_type(status(step=20, known=to_json(new)), "Healthy")[:2] == ("True", "NoFindings")
    starts = status(step=0, stage="Loading", known=well)
    assert of_type(starts, "Healthy")[0] == "True", "it may go on from a checkpoint"


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
    begun = status(step=3, known=to_json(sick))
    told = telling_change(sick.conditions, begun.conditions)
    assert told is not None
    assert (told.status, event(job, told, NOW)["type"]) == ("Unknown", "Normal")
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


def test_a_finding_of_a_rank_names_its_pod_and_node() -> None:
    slow = Finding(finding="Straggler", since=12, confidence=0.8, evidence={"rank": 1.0})
    placed = slow.model_copy(update={"pod": "run-1-1-abcde", "node": "node-1", "advice": "Look."})
    told = of_type(status(placed), "Healthy")
    message = "Straggler since step 12 (rank 1, pod run-1-1-abcde, node node-1). Look."
    assert told == ("False", "Straggler", message)


def unanswered(known: dict[str, Any], after_seconds: float = 300.0) -> Any:
    """The status of a job whose rank 0 has been silent for so long."""
    silence = Silence(Observed(NOW - after_seconds), "10.0.0.7:8080: no answer in time")
    pull = make_pull(stage="Training", step=80, findings=[COLLAPSED])
    seen = make_seen(
        make_job(status=known), make_child(), make_pod(0), make_pod(1), pull=pull, silence=silence
    )
    return after(seen, judged(seen))


def test_a_run_that_nobody_sees_is_not_healthy() -> None:
    for before in (status(), status(COLLAPSED)):
        silent = unanswered(to_json(before))
        state, reason, message = of_type(silent, "Healthy")
        assert (state, reason) == ("Unknown", "Unseen")
        assert "nobody knows how the run learns" in message
        assert silent.reason == "ProgressUnknown"
        names = [finding.finding for finding in silent.findings]
        assert names == ["Unseen", "EntropyCollapsed"]
        assert (silent.findings[0].since, silent.findings[0].evidence) == (80, {})
        again = unanswered(to_json(silent))
        assert again.findings == silent.findings, "a silence that goes on writes nothing"
    assert of_type(unanswered(to_json(status()), 30.0), "Healthy")[0] == "False", "what is known"


def test_a_run_that_answers_again_is_judged_again() -> None:
    silent = to_json(unanswered(to_json(status())))
    assert of_type(status(known=silent), "Healthy")[:2] == ("True", "NoFindings")
    assert status(known=silent).findings is None
    assert of_type(status(step=3, known=silent), "Healthy")[:2] == ("Unknown", "TooFewSteps")
    assert of_type(status(COLLAPSED, known=silent), "Healthy")[0] == "False"


@pytest.mark.parametrize("action", [*LEAVES_NO_ATTEMPT, Action.COMMIT])
@pytest.mark.parametrize("heard", [False, True])
def test_a_run_that_nobody_saw_end_is_not_said_to_run_or_to_be_well(
    action: Action, heard: bool
) -> None:
    unseen = unanswered(to_json(status()))
    silence = Silence(Observed(NOW - 300.0), "10.0.0.7:8080: no answer in time")
    ended = make_pod(1, state=terminated(1))
    seen = make_seen(
        make_job(status=to_json(unseen)), make_child(), make_pod(0), ended,
        pull=make_pull(stage="Training", step=80) if heard else None, silence=silence,
    )  # fmt: skip
    settling = after(seen, Decision(Action.WAIT))
    assert of_type(settling, "Healthy") == of_type(unseen, "Healthy")
    assert of_type(settling, "Degraded") == of_type(unseen, "Degraded"), "it is not whole"
    left = after(seen, Decision(action, "Because", "why", plan=PLAN))
    assert of_type(left, "Healthy")[:2] == ("Unknown", "Unseen")
    assert "Rank 0 runs" not in of_type(left, "Healthy")[2]


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
