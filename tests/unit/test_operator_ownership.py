"""Whose a claim, a Service or a NetworkPolicy is, and what mends ours: any metadata, any change,
generated."""

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kube.objects.resources import merge_patch
from grpo_operator.pods.manifests import checkpoint_volume_claim
from grpo_operator.pods.namespace_objects import (
    claim_problem,
    foreign_policy,
    foreign_service,
    is_ours,
    network_policy,
    rendezvous_service,
    repair,
)
from grpo_operator.records.parsing import claim_record, policy_record, service_record
from tests.generated import cases
from tests.unit.operator_world import UID, at, make_job

TEMPLATE = {"checkpoint": {"volumeClaimTemplate": {"size": "1Gi"}}}
META = {"uid": "u", "resourceVersion": "3"}
TEXTS = st.dictionaries(
    st.sampled_from(["a", "b", "app.kubernetes.io/managed-by"]), st.sampled_from(["x", ""])
)


def claim(retain: bool = True, uid: str = UID, **meta: Any) -> Any:
    """The claim that the operator makes for the job `run` with that uid."""
    spec = make_job({"checkpoint": {"volumeClaimTemplate": {"size": "1Gi", "retain": retain}}}).spec
    assert spec is not None
    body = checkpoint_volume_claim(make_job().key, uid, spec)
    assert body is not None
    body["metadata"] |= meta
    return claim_record(body)


def test_without_a_template_there_is_no_claim() -> None:
    spec = make_job().spec
    assert spec is not None
    assert checkpoint_volume_claim(make_job().key, UID, spec) is None


def test_the_jobs_own_claim_is_taken() -> None:
    assert claim_problem(claim(), make_job(TEMPLATE)) == ""
    assert claim_problem(claim(retain=False), make_job(TEMPLATE)) == ""


def test_a_claim_that_an_earlier_job_of_the_name_left_is_taken() -> None:
    assert claim_problem(claim(uid="earlier"), make_job(TEMPLATE)) == ""


def test_a_claim_that_goes_with_an_earlier_job_is_waited_for() -> None:
    assert "uid earlier, which is not this GRPOJob" in claim_problem(
        claim(retain=False, uid="earlier"), make_job(TEMPLATE)
    )


def test_no_claim_that_is_being_deleted_is_taken() -> None:
    for retain in (True, False):
        dying = claim(retain=retain, deletionTimestamp=at(0))
        assert "run-checkpoints is being deleted" in claim_problem(dying, make_job(TEMPLATE))


def test_a_strangers_claim_is_told_with_a_way_out() -> None:
    for labels in ({}, {"app.kubernetes.io/managed-by": "Helm"}, {"grpo.dev/job-name": "run"}):
        assert "name it in spec.checkpoint.volume" in claim_problem(
            claim(labels=labels), make_job(TEMPLATE)
        )


SERVICE = rendezvous_service("team-a")


def service(**changes: Any) -> Any:
    """Our Service as stored, with changed sections."""
    body: Any = copy.deepcopy(SERVICE)
    for section, change in changes.items():
        body[section] |= change
    body["metadata"] |= META
    return body


def test_our_service_needs_no_repair() -> None:
    assert is_ours(service_record(service()), SERVICE)
    assert repair(service_record(service()), SERVICE) is None


@settings(max_examples=cases(100))
@given(
    selector=TEXTS,
    labels=TEXTS,
    publishes=st.booleans(),
    address=st.sampled_from(
        [{"clusterIP": "None"}, {"clusterIP": "10.0.0.9"}, {"type": "ExternalName"}]
    ),
)
def test_any_change_of_our_service_is_undone_and_nothing_else(
    selector: dict[str, str], labels: dict[str, str], publishes: bool, address: dict[str, str]
) -> None:
    body = service()
    body["metadata"]["labels"] |= labels
    body["spec"] = {
        "selector": selector,
        "publishNotReadyAddresses": publishes,
        "ports": [],
    } | address
    found = service_record(body)
    assert is_ours(found, SERVICE)
    mended = applied(body, repair(found, SERVICE) or {})
    assert repair(service_record(mended), SERVICE) is None
    assert mended["spec"]["selector"] == SERVICE["spec"]["selector"]
    assert mended["spec"]["ports"] == []
    assert merge_patch(mended["metadata"], body["metadata"]).keys() <= {"labels"}


def applied(body: Any, patch: Any) -> Any:
    """What a JSON merge patch makes of it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(body) if isinstance(body, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = applied(result.get(key), value)
    return result


def test_a_service_without_our_labels_is_ours_only_by_its_selector() -> None:
    stripped = service_record(service(metadata={"labels": {}}))
    assert is_ours(stripped, SERVICE)
    assert repair(stripped, SERVICE) == {"metadata": {"labels": SERVICE["metadata"]["labels"]}}
    stranger = service_record(
        service(metadata={"labels": {"app": "x"}}, spec={"selector": {"app": "x"}})
    )
    assert not is_ours(stranger, SERVICE)
    assert "Service grpo-rendezvous of this namespace is not the operator's" in foreign_service(
        stranger
    )


WATCHERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "grpo-system"}}}]
SELECTORS = st.fixed_dictionaries(
    {}, optional={"matchLabels": TEXTS, "matchExpressions": st.just([{"key": "a"}])}
)
RULES: st.SearchStrategy[list[dict[str, Any]]] = st.lists(
    st.fixed_dictionaries({}, optional={"from": st.lists(st.just({"podSelector": {}}), max_size=2)})
)


def policy(**changes: Any) -> Any:
    """Our NetworkPolicy as stored, with changed sections."""
    body: Any = copy.deepcopy(network_policy("team-a", WATCHERS))
    for section, change in changes.items():
        body[section] |= change
    body["metadata"] |= META
    return body


@settings(max_examples=cases(100))
@given(
    spec=st.fixed_dictionaries(
        {"podSelector": SELECTORS},
        optional={
            "ingress": RULES,
            "egress": RULES,
            "policyTypes": st.lists(st.sampled_from(["Ingress", "Egress"])),
        },
    ),
    labels=TEXTS,
)
def test_any_change_of_our_policy_is_undone_and_nothing_else(
    spec: dict[str, Any], labels: dict[str, str]
) -> None:
    wanted = network_policy("team-a", WATCHERS)
    assert repair(policy_record(policy()), wanted) is None
    body = policy(spec=spec)
    body["metadata"]["labels"] |= labels
    found = policy_record(body)
    assert is_ours(found, wanted)
    mended = applied(body, repair(found, wanted) or {})
    assert mended["spec"] == wanted["spec"]
    assert repair(policy_record(mended), wanted) is None
    assert merge_patch(mended["metadata"], body["metadata"]).keys() <= {"labels"}


def test_a_policy_without_our_labels_is_a_strangers() -> None:
    found = policy_record(policy(metadata={"labels": {"app": "x"}}))
    assert not is_ours(found, network_policy("team-a", WATCHERS))
    assert "NetworkPolicy grpo-pods of this namespace is not the operator's" in foreign_policy(
        found
    )


def test_without_watchers_a_policy_lets_nobody_else_in() -> None:
    """A rule without a `from` would let in everybody."""
    rules = network_policy("team-a", [])["spec"]["ingress"]
    assert [list(rule) for rule in rules] == [["from"]]
