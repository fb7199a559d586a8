"""When, where and how often a gang that has ended starts again: pauses, limits, the user's rules,
nodes left out."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.report import Result
from grpo_api.spec.run_policy import FailedResult, RestartRule, RestartsSpec
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.pods.manifests import attempt_of, indexed_job
from grpo_operator.report.status import build_status
from tests.generated import cases
from tests.unit.operator_world import (
    PLAN,
    PODS,
    active_status,
    at,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    of_type,
    said,
    terminated,
)


def end(attempt: int, reason: str = "Error", ran: int = 5, node: str = "") -> dict[str, Any]:
    return {
        "attempt": attempt,
        "reason": reason,
        "runningSeconds": ran,
        "node": node,
        "endTime": at(-30),
    }


def crashed(
    *ends: dict[str, Any],
    ago: float = 0.0,
    code: int = 139,
    spec: Any = None,
    ran: float = 60,
    **status: Any,
) -> Observation:
    """Rank 0 crashed without a word so many seconds ago; what ended before is known."""
    attempt = len(ends) + 1
    full = active_status(attempt, ends=list(ends), **status)
    full["conditions"][1]["lastTransitionTime"] = at(-ran)
    job = make_job(spec, full)
    return make_seen(
        job,
        make_child(attempt),
        make_pod(0, attempt, terminated(code)),
        make_pod(1, attempt),
        ago=ago,
    )


def pause(seen: Observation) -> float:
    """Seconds until the next attempt; 0 where it may begin now."""
    decision = judged(seen)
    assert decision.action in (Action.WAIT, Action.ADMIT)
    return decision.requeue_after or 0.0


@pytest.mark.parametrize(
    ("earlier", "seconds"), [(0, 0), (1, 10), (2, 20), (3, 40), (5, 160), (6, 300), (10, 300)]
)
def test_the_first_restart_has_no_pause_and_each_further_one_doubles_it(
    earlier: int, seconds: float
) -> None:
    ends = [end(number + 1) for number in range(earlier)]
    limits = {"restarts": {"limit": 100}}
    assert pause(crashed(*ends, spec=limits)) == pytest.approx(seconds)
    assert pause(crashed(*ends, spec=limits, ago=seconds)) == 0


def test_uncounted_ends_pause_alike() -> None:
    job = make_job(status=active_status(3, ends=[end(1, "Preempted"), end(2, "Preempted")]))
    decision = judged(
        make_seen(job, make_child(3), make_pod(0, 3, deleted=True), make_pod(1, 3), ago=0)
    )
    assert (decision.action, decision.reason) == (Action.WAIT, "RestartBackoff")
    assert decision.requeue_after == pytest.approx(20.0)


def test_a_gang_that_ran_well_for_a_while_starts_anew_without_a_pause() -> None:
    assert pause(crashed(end(1), end(2), ran=600)) == 0
    assert pause(crashed(end(1), end(2, ran=700))) == 0
    assert pause(crashed(end(1, ran=700), end(2))) == pytest.approx(10.0)


def test_a_release_begins_a_new_row_of_pauses() -> None:
    assert pause(crashed(end(1), end(2), end(3, "SchedulingTimeout"))) == 0


def test_a_job_that_pauses_is_restarting_and_says_why() -> None:
    seen = crashed(end(1), end(2))
    status = build_status(seen, judged(seen))
    assert status.phase == "Restarting"
    assert of_type(status, "Running")[:2] == ("False", "RestartBackoff")
    assert "attempt 3 ended with Error" in of_type(status, "Degraded")[2]
    assert "the next attempt begins after a pause of 20 s" in of_type(status, "Running")[2]
    assert (status.restarts, len(status.ends)) == (0, 2)


def test_uncounted_restarts_have_a_limit_and_a_counter() -> None:
    spec = {"restarts": {"uncountedLimit": 2}}
    for done, action in ((1, Action.ADMIT), (2, Action.FAIL)):
        job = make_job(spec, active_status(uncountedRestarts=done))
        seen = make_seen(job, make_child(), make_pod(0, deleted=True), make_pod(1))
        decision = judged(seen)
        assert decision.action is action
        committed = build_status(seen, Decision(Action.COMMIT, ended=decision.ended, plan=PLAN))
        assert (committed.uncounted_restarts, committed.restarts) == (done + 1, 0)
    assert decision.message.startswith("Preempted after 2 of 2 uncounted restarts: ")


RULES = [
    {"action": "Fail", "onExitCodes": {"operator": "In", "values": [3, 139]}},
    {"action": "RestartUncounted", "onReasons": ["OOMKilled"]},
    {"action": "Restart", "onResults": ["BadInput", "Preempted"]},
]


@pytest.mark.parametrize(
    ("state", "action", "counted"),
    [
        (terminated(3), Action.FAIL, False),
        (terminated(137, reason="OOMKilled"), Action.ADMIT, False),
        (terminated(43, said("BadInput")), Action.ADMIT, True),
        (terminated(143, said("Preempted")), Action.ADMIT, True),
        (terminated(1, said("Error")), Action.ADMIT, True),
        (terminated(42, said("DivergedKL")), Action.FAIL, False),
    ],
    ids=[
        "by its exit code",
        "by the kubelet's reason",
        "what else fails",
        "a disruption",
        "unmatched",
        "permanent",
    ],
)
def test_the_first_rule_that_an_end_matches_decides(
    state: dict[str, Any], action: Action, counted: bool
) -> None:
    job = make_job({"restarts": {"rules": RULES}}, active_status())
    decision = judged(make_seen(job, make_child(), make_pod(0, state=state), make_pod(1)))
    assert (decision.action, decision.counted) == (action, counted)


@pytest.mark.parametrize(
    ("rule", "is_matched"), [("Error", False), ("Preempted", True), ("OutOfMemory", False)]
)
@pytest.mark.parametrize("state", [terminated(1, said("Error")), terminated(137)])
def test_a_drained_pod_matches_rules_for_preemption_whatever_it_says(
    state: dict[str, Any], rule: str, is_matched: bool
) -> None:
    spec = {"restarts": {"rules": [{"action": "Fail", "onResults": [rule]}]}}
    target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    drained = make_pod(0, state=state, conditions=[target])
    job = make_job(spec, active_status())
    decision = judged(make_seen(job, make_child(), drained, make_pod(1)))
    assert (decision.action is Action.FAIL) == is_matched
    assert not decision.counted or is_matched


@pytest.mark.parametrize("reason", ["PreemptionByScheduler", "EvictionByEvictionAPI"])
@pytest.mark.parametrize("state", [None, terminated(143, said("Preempted")), terminated(137)])
def test_a_pod_that_the_cluster_deletes_matches_rules_by_its_reason_before_it_has_ended(
    state: dict[str, Any] | None, reason: str
) -> None:
    spec = {"restarts": {"rules": [{"action": "Fail", "onReasons": [reason]}]}}
    target = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "why"}
    ending = make_pod(0, state=state, conditions=[target], deleted=True)
    seen = make_seen(make_job(spec, active_status()), make_child(), ending, make_pod(1))
    assert judged(seen).action is Action.FAIL
    assert state or f"was deleted while it ran: {reason}: why" in judged(seen).message


def test_a_job_that_failed_by_a_rule_names_it() -> None:
    job = make_job({"restarts": {"rules": [RULES[1], RULES[0]]}}, active_status())
    decision = judged(make_seen(job, make_child(), make_pod(0, state=terminated(3)), make_pod(1)))
    assert decision.message.startswith(
        "spec.restarts.rules[1] says Fail for this end: the container ended with exit"
    )


def test_rules_know_every_result_that_is_no_success() -> None:
    assert set(FailedResult.__args__) == set(Result) - {Result.SUCCEEDED}  # type: ignore[attr-defined]


CODES = st.lists(st.integers(1, 255), min_size=1, max_size=5)


@settings(max_examples=cases(200))
@given(
    st.lists(
        st.tuples(st.sampled_from(["In", "NotIn"]), CODES, st.sampled_from(["Restart", "Fail"])),
        max_size=5,
    ),
    st.integers(1, 255),
)
def test_any_rules_on_exit_codes_do_what_they_say(
    rules: list[tuple[str, list[int], str]], code: int
) -> None:
    written = [
        {"action": do, "onExitCodes": {"operator": how, "values": values}}
        for how, values, do in rules
    ]
    RestartsSpec.model_validate({"rules": written})
    seen = crashed(code=code, spec={"restarts": {"rules": written}}, ago=10)
    first = next((do for how, values, do in rules if (code in values) == (how == "In")), "Restart")
    assert judged(seen).action is (Action.FAIL if first == "Fail" else Action.ADMIT)


@pytest.mark.parametrize(
    "rule", [{"action": "Fail"}, {"action": "Fail", "onResults": ["Hang"], "onReasons": ["X"]}]
)
def test_a_rule_says_exactly_one_thing(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="set exactly one of"):
        RestartRule.model_validate(rule)


def committed(seen: Observation) -> Any:
    """The status after the next attempt was committed."""
    asked = judged(seen)
    assert asked.action is Action.ADMIT
    return build_status(seen, replace(asked, action=Action.COMMIT, plan=PLAN))


def test_a_node_where_two_attempts_in_a_row_died_without_a_word_is_left_out() -> None:
    first = committed(crashed(ran=700))
    assert (first.ends[-1].node, first.avoided_nodes) == ("node-0", [])
    second = committed(crashed(end(1, node="node-0"), ran=700))
    assert second.avoided_nodes == ["node-0"]
    elsewhere = committed(crashed(end(1, node="node-7"), ran=700))
    assert elsewhere.avoided_nodes == []


@pytest.mark.parametrize(
    ("changes", "avoided"),
    [
        ({}, ["node-1"]),
        ({"step": 79}, []),
        ({"attempt": 2}, []),
        ({"node": "somebody-elses"}, []),
        ({"finding": "NoSignal"}, []),
    ],
)
def test_the_node_of_a_lasting_straggler_is_left_out_after_the_next_end(
    changes: dict[str, Any], avoided: list[str]
) -> None:
    facts = {"step": 80, "attempt": 1, "node": "node-1", "finding": "Straggler"} | changes
    finding = {"finding": facts["finding"], "since": 30, "confidence": 0.9, "node": facts["node"]}
    progress = {"attempt": facts["attempt"], "step": facts["step"]}
    seen = crashed(ran=700, findings=[finding], progress=progress)
    assert committed(seen).avoided_nodes == avoided


def test_a_trainer_that_says_why_it_ended_does_not_blame_its_node() -> None:
    job = make_job(status=active_status(2, ends=[end(1, node="node-0", ran=700)]))
    seen = make_seen(
        job, make_child(2), make_pod(0, 2, terminated(1, said("Error"))), make_pod(1, 2)
    )
    assert committed(seen).avoided_nodes == []


@pytest.mark.parametrize(
    "terms", [None, [{}], [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {}]]
)
def test_pods_keep_away_from_avoided_nodes(terms: list[dict[str, Any]] | None) -> None:
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        }
    }
    pods = {"podTemplate": {"spec": {"affinity": affinity}}} if terms else {}
    job = make_job(pods, active_status(avoidedNodes=["node-0", "node-3"]))
    pod = indexed_job(attempt_of(job, job.valid_spec, PLAN, 2), PODS)["spec"]["template"]["spec"]
    found = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    away = [
        {"key": "metadata.name", "operator": "NotIn", "values": [node]}
        for node in ("node-0", "node-3")
    ]
    assert found == [
        {**term, "matchFields": away} if term else {} for term in terms or [{"matchFields": []}]
    ]


def test_a_suspension_gives_avoided_nodes_another_chance() -> None:
    job = make_job({"suspend": True}, active_status(avoidedNodes=["node-0"]))
    seen = make_seen(job, make_child(), make_pod(0))
    assert build_status(seen, judged(seen)).avoided_nodes == []
