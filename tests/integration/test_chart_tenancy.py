"""What the chart says of tenants: who may reach the operator, whose the training pods are, what
pulls their image."""

from collections.abc import Sequence
from typing import Any

import pytest

from grpo_api.text.contract import PROGRESS_PORT
from grpo_operator.process import settings
from grpo_operator.records.names import LABEL_JOB
from tests.integration.test_chart import AS_POD, only, rendered


def test_nothing_reaches_the_operator_but_its_pages_and_who_may_is_a_value() -> None:
    documents = rendered("metrics.port=9000")
    policy, pod = (
        only(documents, "NetworkPolicy")["spec"],
        only(documents, "Deployment")["spec"]["template"],
    )
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (port,) = [port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": port}]}]
    assert (port, policy["policyTypes"]) == (9000, ["Ingress"])
    documents = rendered("networkPolicy.from[0].podSelector.matchLabels.app=prometheus")
    ((tester, given),) = [
        rule["from"] for rule in only(documents, "NetworkPolicy")["spec"]["ingress"]
    ]
    assert given == {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    assert (
        tester["podSelector"]["matchLabels"].items()
        <= only(documents, "Pod")["metadata"]["labels"].items()
    )
    assert not [d for d in rendered("networkPolicy.enabled=false") if d["kind"] == "NetworkPolicy"]


def test_what_the_operator_reaches_can_be_bounded_by_a_value() -> None:
    collector = "networkPolicy.egress.extra[0].ports[0].port=4318"
    values = ("networkPolicy.egress.enabled=true", collector)
    policy = only(rendered(*values), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    dns, api_server, pods, extra = policy["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert [port["port"] for port in api_server["ports"]] == [443, 6443]
    assert pods["ports"] == [{"protocol": "TCP", "port": PROGRESS_PORT}]
    (peer,) = pods["to"]
    assert peer["podSelector"]["matchExpressions"] == [{"key": LABEL_JOB, "operator": "Exists"}]
    assert extra == {"ports": [{"port": 4318}]}


def watchers(*values: str) -> tuple[Sequence[dict[str, Any]] | None, list[dict[str, Any]]]:
    """Whom the operator is told to let in to training pods, and its chart's documents."""
    documents = rendered(*values)
    return settings.parse(arguments(documents), AS_POD).watchers, documents


def test_the_operators_own_pods_and_prometheus_are_let_in_to_training_pods() -> None:
    found, documents = watchers("namespaceOverride=elsewhere", "commonLabels.a=b")
    assert found
    own, prometheus = found
    pod = only(documents, "Deployment")["spec"]["template"]
    assert own["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert own["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}
    assert prometheus["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}
    found, _ = watchers("trainerPods.networkPolicy.monitoring[0].ipBlock.cidr=10.0.0.1/32")
    assert found
    assert found[1:] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    assert len(watchers("trainerPods.networkPolicy.monitoring=null")[0] or ()) == 1


def test_without_the_policy_the_operator_makes_none_and_has_no_right_to() -> None:
    for value, wanted in (("", True), ("trainerPods.networkPolicy.enabled=false", False)):
        found, documents = watchers(*([value] if value else []))
        rules = [rule for document in documents for rule in document.get("rules") or []]
        assert (
            (found is not None)
            is wanted
            is any("networkpolicies" in rule["resources"] for rule in rules)
        )


def test_no_right_over_secrets_is_asked_for() -> None:
    rules = [rule for one in rendered() for rule in one.get("rules") or []]
    assert not [rule for rule in rules if "secrets" in rule.get("resources", [])]


def arguments(documents: list[dict[str, Any]]) -> list[str]:
    """The operator's flags."""
    found: list[str] = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    return found


@pytest.mark.parametrize(
    ("value", "user"),
    [("", 1000), ("trainerPods.user=1000680000", 1000680000), ("trainerPods.user=null", None)],
)
def test_whose_the_pods_are_and_their_pull_secrets_become_flags(
    value: str, user: int | None
) -> None:
    secrets = ("trainerImage.pullSecrets[0].name=a", "trainerImage.pullSecrets[1].name=b")
    deployment = only(rendered(*secrets, *([value] if value else [])), "Deployment")
    pods = settings.parse(arguments([deployment]), AS_POD).pods
    assert (pods.user, pods.pull_secrets) == (user, ("a", "b"))
    assert "imagePullSecrets" not in deployment["spec"]["template"]["spec"]
