"""What the chart says of tenants: who may reach the operator, whose the training pods are, what pulls their image."""

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


@pytest.mark.parametrize(
    ("value", "user"), [("", 1000), ("trainerPods.user=1000680000", 1000680000), ("trainerPods.user=null", None)]
)
def test_whose_the_pods_are_and_their_pull_secrets_become_flags(value: str, user: int | None) -> None:
    secrets = ("trainerImage.pullSecrets[0].name=a", "trainerImage.pullSecrets[1].name=b")
    deployment = only(rendered(*secrets, *([value] if value else [])), "Deployment")
    pods = settings.parse(deployment["spec"]["template"]["spec"]["containers"][0]["args"], AS_POD).pods
    assert (pods.user, pods.pull_secrets) == (user, ("a", "b"))
    assert "imagePullSecrets" not in deployment["spec"]["template"]["spec"]
