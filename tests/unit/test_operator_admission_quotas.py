"""Gangs whose pods would not be created take no place: quotas, PriorityClasses and ServiceAccounts
are looked at."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_kube.objects.json_reader import Unreadable
from grpo_kube.objects.times import Observed
from grpo_operator.admission.plan_cache import Plans
from grpo_operator.admission.quota_gate import Allowance
from grpo_operator.admission.scheduler import UNCOUNTED_SECONDS, CycleInput, schedule
from grpo_operator.admission.snapshot import QuotaFacts, is_in_scope, quota_facts
from grpo_operator.decide.cleanup import clean_up
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.observation import observe
from tests.generated import cases
from tests.unit.operator_world import (
    LIMITS,
    NOW,
    active_status,
    at,
    condition,
    make_child,
    make_job,
    make_seen,
)
from tests.unit.queue_world import answered, cluster, gang, job, judged

GPU = "requests.nvidia.com/gpu"


def quota(hard: dict[str, Any], used: dict[str, Any] | None = None, **spec: Any) -> QuotaFacts:
    meta = {"namespace": "team-a", "name": "team-quota"}
    return quota_facts(
        {"metadata": meta, "spec": spec, "status": {"hard": hard, "used": used or {}}}
    )


def said(*quotas: QuotaFacts, of: Any = None, **more: Any) -> tuple[str, str]:
    """Reason and message for a gang of two pods with four GPUs each, on a cluster that has them."""
    one = of or job("a", gang(2, 4))
    found = judged([one], cluster(4, 4, quotas={"team-a": quotas}, **more))[one.uid]
    return found.reason, found.message


def test_a_quota_that_the_gang_exceeds_keeps_it_from_taking_a_place() -> None:
    reason, message = said(quota({GPU: "8"}, {GPU: "2"}))
    assert reason == "WaitingForQuota"
    assert message == (
        "ResourceQuota team-quota of namespace team-a allows 8 requests.nvidia.com/gpu; "
        "2 are used, and the gang needs 8"
    )
    jobs = [job("a", gang(2, 4), age=20), job("b", gang(1, 4), age=10)]
    found = judged(jobs, cluster(4, 4, quotas={"team-a": (quota({GPU: "4"}),)}))
    assert (found["uid-a"].admitted, found["uid-b"].admitted) == (False, True)


@pytest.mark.parametrize(
    ("hard", "used", "fits"),
    [
        ({GPU: "8"}, {}, True),
        ({"pods": "2"}, {}, True),
        ({"pods": "2"}, {"pods": "1"}, False),
        ({"count/pods": "1"}, {}, False),
        ({"count/jobs.batch": "3"}, {"count/jobs.batch": "3"}, False),
        ({"count/jobs.batch": "3"}, {"count/jobs.batch": "2"}, True),
        ({"requests.memory": "1Gi"}, {}, False),
        ({"memory": "2Gi"}, {}, True),
        ({"cpu": "1"}, {"cpu": "500m"}, False),
        ({"limits.memory": "1Ki"}, {}, True),
        ({"services": "0", "persistentvolumeclaims": "0"}, {}, True),
    ],
)
def test_each_resource_of_a_quota_is_held_against_the_whole_gang(
    hard: dict[str, str], used: dict[str, str], fits: bool
) -> None:
    assert (said(quota(hard, used))[0] == "Admitted") is fits


@pytest.mark.parametrize(
    ("resource", "is_kept"),
    [("count/jobs.batch", False), ("count/pods", False), ("pods", True), (GPU, True)],
)
def test_a_job_that_waits_for_a_quota_of_objects_keeps_none_for_its_logs(
    resource: str, is_kept: bool
) -> None:
    reason, message = said(quota({resource: "1"}, {resource: "1"}))
    waits = {**condition("Admitted", "False", reason), "message": message}
    one = make_job(status=active_status(2, conditions=[waits]))
    kept = clean_up(make_seen(one, make_child(1, ended="Failed")), LIMITS).delete_jobs == ()
    assert kept is is_kept


@given(pods=st.integers(1, 8), millicores=st.integers(1, 5000), used=st.integers(0, 20_000))
@example(pods=3, millicores=800, used=600)
def test_a_gang_that_a_quota_of_cores_just_allows_is_admitted(
    pods: int, millicores: int, used: int
) -> None:
    wanted = pods * millicores
    spec = job("a", gang(pods, 1)).spec
    assert spec is not None
    requests = spec.resources.model_copy(update={"requests": {"cpu": f"{millicores}m"}})
    spec = spec.model_copy(update={"resources": requests})
    one = job("a", gang(pods, 1))
    one = replace(one, typed=replace(one.content, spec=spec, declared=spec))
    for hard, fits in ((used + wanted, True), (used + wanted - 1, False)):
        of_team = quota({"requests.cpu": f"{hard}m"}, {"requests.cpu": f"{used}m"})
        there = cluster(4, quotas={"team-a": (of_team,)})
        assert (Allowance(there).problem(one, gang(pods, 1)) is None) is fits


@pytest.mark.parametrize(
    ("spec", "priority", "counted"),
    [
        ({}, "", True),
        ({"scopes": ["Terminating"]}, "", False),
        ({"scopes": ["NotTerminating", "NotBestEffort"]}, "", True),
        ({"scopes": ["BestEffort"]}, "", False),
        ({"scopes": ["PriorityClass"]}, "high", True),
        ({"scopes": ["PriorityClass"]}, "", False),
        ({"scopes": ["CrossNamespacePodAffinity"]}, "high", False),
    ],
)
def test_a_quota_counts_only_pods_of_its_scopes(
    spec: dict[str, Any], priority: str, counted: bool
) -> None:
    assert is_in_scope(quota({"pods": "0"}, **spec), priority) is counted


@pytest.mark.parametrize(
    ("operator", "values", "by_priority"),
    [
        ("In", ["high"], {"high": True, "low": False, "": False}),
        ("NotIn", ["high"], {"high": False, "low": True, "": True}),
        ("Exists", [], {"high": True, "": False}),
        ("DoesNotExist", [], {"high": False, "": True}),
    ],
)
def test_a_scope_selector_chooses_by_priority_class(
    operator: str, values: list[str], by_priority: dict[str, bool]
) -> None:
    selector = {
        "matchExpressions": [{"scopeName": "PriorityClass", "operator": operator, "values": values}]
    }
    found = quota({"pods": "0"}, scopeSelector=selector)
    assert {name: is_in_scope(found, name) for name in by_priority} == by_priority


def test_a_job_without_a_class_counts_as_of_the_clusters_default() -> None:
    selector = {
        "matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": ["usual"]}]
    }
    none = quota({GPU: "0"}, scopeSelector=selector)
    assert said(none)[0] == "Admitted"
    assert (
        said(none, priorities={"usual": 7, "": 7}, default_priority="usual")[0] == "WaitingForQuota"
    )


def test_two_gangs_do_not_get_one_quota() -> None:
    jobs = [job("a", gang(1, 4), age=20), job("b", gang(1, 4), age=10)]
    found = judged(jobs, cluster(8, quotas={"team-a": (quota({GPU: "6"}),)}))
    assert (found["uid-a"].admitted, found["uid-b"].reason) == (True, "WaitingForQuota")
    assert "4 are used, and the gang needs 4" in found["uid-b"].message


@settings(max_examples=cases(40))
@given(step=st.integers(-86400, 86400), passed=st.integers(0, 60))
def test_a_gang_that_was_just_committed_is_counted_until_its_pods_are(
    step: int, passed: int
) -> None:
    """The clock was set since."""
    new = job("new", gang(1, 4), active=True)
    status = new.status.model_copy(update={"attempt_start_time": at(0)})
    new = replace(new, typed=replace(new.content, status=status))
    tracker = FirstSeenTracker()
    observe(new, [], [], now=NOW, at=Observed(0), first_seen_tracker=tracker)
    times = tracker.times(new.key)
    asked = CycleInput(
        jobs=(new, job("a", gang(1, 4))),
        snapshot=cluster(8, 8, quotas={"team-a": (quota({GPU: "6"}),)}),
        limits=LIMITS,
        default_image="trainer:1",
        admitted_for={new.uid: times.admitted_for(new, NOW + passed + step, Observed(passed))},
    )
    found = schedule(asked, Plans())
    is_counted = passed >= UNCOUNTED_SECONDS
    assert found.verdicts["uid-a"].admitted == is_counted
    seconds_left = None if is_counted else UNCOUNTED_SECONDS - passed
    assert found.requeue_after == seconds_left, "the quota may not change again"


def test_a_priority_class_that_does_not_exist_holds_nothing() -> None:
    one = job("a", gang(1, 4), priorityClassName="urgent")
    reason, message = said(of=one, priorities={"high": 10})
    assert reason == "PriorityClassNotFound"
    assert message.startswith("spec.placement.priorityClassName: no PriorityClass urgent exists")
    assert said(of=one)[0] == "Admitted", "where classes can't be seen, nobody knows"


def test_a_service_account_that_does_not_exist_holds_nothing() -> None:
    reason, message = said(service_accounts={"team-a": frozenset({"other"})})
    assert reason == "ServiceAccountNotFound"
    assert "namespace team-a has no ServiceAccount default" in message
    assert said(service_accounts={"team-a": frozenset({"default"})})[0] == "Admitted"
    assert said(service_accounts={"team-b": frozenset()})[0] == "Admitted", (
        "this namespace's can't be seen"
    )


async def test_a_gang_that_restarts_gives_its_place_back_and_waits_for_what_it_names() -> None:
    """Its pods would not be created, and it would hold GPUs until somebody notices that."""
    one = job("a", gang(1, 4), active=True)
    there = cluster(8, service_accounts={"team-a": frozenset({"other"})})
    asked = await answered([one], there, one)
    assert (asked.action, asked.reason) == ("Queue", "ServiceAccountNotFound")
    there = cluster(8, service_accounts={"team-a": frozenset({"default"})})
    assert (await answered([one], there, one)).action == "Commit"


async def test_who_waits_for_a_quota_is_queued_with_a_plan() -> None:
    one = job("a", gang(2, 4))
    answer = await answered([one], cluster(4, 4, quotas={"team-a": (quota({GPU: "1"}),)}), one)
    assert (answer.action, answer.reason, answer.plan) == ("Queue", "WaitingForQuota", gang(2, 4))


def test_a_quota_with_a_wrong_type_is_set_aside() -> None:
    with pytest.raises(Unreadable, match=r"spec\.scopes"):
        quota({}, scopes="All")
