"""What the chart says of tenants: who may reach the operator, whose the training pods are, what pulls their image."""

from collections.abc import Sequence
from typing import Any

import pytest

from grpo_operator import settings
from tests.integration.test_chart import AS_POD, only, rendered


def test_nothing_reaches_the_operator_but_its_pages_and_who_may_is_a_value() -> None:
    documents = rendered("metrics.port=9000")
    policy, pod = only(documents, "NetworkPolicy")["spec"], only(documents, "Deployment")["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (port,) = [port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": port}]}]
    assert (port, policy["policyTypes"]) == (9000, ["Ingress"])
    documents = rendered("networkPolicy.from[0].podSelector.matchLabels.app=prometheus")
    ((tester, given),) = [rule["from"] for rule in only(documents, "NetworkPolicy")["spec"]["ingress"]]
    assert given == {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    assert tester["podSelector"]["matchLabels"].items() <= only(documents, "Pod")["metadata"]["labels"].items()
    assert not [d for d in rendered("networkPolicy.enabled=false") if d["kind"] == "NetworkPolicy"]


def watchers(*values: str) -> tuple[Sequence[dict[str, Any]] | None, list[dict[str, Any]]]:
    """Whom the operator is told to let in to training pods, and its chart's documents."""
    documents = rendered(*values)
    container = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return settings.parse(container["args"], AS_POD).watchers, documents


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
        assert (found is not None) is wanted is any("networkpolicies" in rule["resources"] for rule in rules)


@pytest.mark.parametrize(
    ("value", "user"), [("", 1000), ("trainerPods.user=1000680000", 1000680000), ("trainerPods.user=null", None)]
)
def test_whose_the_pods_are_and_their_pull_secrets_become_flags(value: str, user: int | None) -> None:
    secrets = ("trainerImage.pullSecrets[0].name=a", "trainerImage.pullSecrets[1].name=b")
    deployment = only(rendered(*secrets, *([value] if value else [])), "Deployment")
    pods = settings.parse(deployment["spec"]["template"]["spec"]["containers"][0]["args"], AS_POD).pods
    assert (pods.user, pods.pull_secrets) == (user, ("a", "b"))
    assert "imagePullSecrets" not in deployment["spec"]["template"]["spec"]
