"""The NetworkPolicy that the operator makes in each namespace with jobs, and what others do to it.

What the API server makes of its spec is its own; what it holds off on real nodes is
test_network_policies.py's matter.
"""

import logging
from typing import Any

import pytest

from grpo_kube.objects.resources import NETWORK_POLICIES
from grpo_operator.pods.namespace_objects import network_policy
from grpo_operator.records.names import NETWORK_POLICY
from harness.client import ApiStatusError
from tests.integration.operator_bench import Bench

POLICIES = NETWORK_POLICIES.path("{}")
WATCHERS: list[dict[str, Any]] = [
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "grpo-system"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "grpo-operator"}},
    },
    {"ipBlock": {"cidr": "10.1.0.0/16", "except": ["10.1.2.0/24"]}},
    {"namespaceSelector": {}},
]
OPENED = {
    "podSelector": {"matchLabels": {"app": "x"}},
    "ingress": [{}],
    "policyTypes": ["Ingress", "Egress"],
}
STRANGER: dict[str, Any] = {
    "metadata": {"name": NETWORK_POLICY},
    "spec": {"podSelector": {}, "ingress": [{}]},
}


def as_wanted(bench: Bench) -> bool:
    """Whether the policy is there, as the operator makes it."""
    if not bench.exists(POLICIES, NETWORK_POLICY):
        return False
    found, wanted = bench.get(POLICIES, NETWORK_POLICY), network_policy(bench.namespace, WATCHERS)
    labelled: bool = (
        wanted["metadata"]["labels"].items() <= found["metadata"].get("labels", {}).items()
    )
    return labelled and found["spec"] == wanted["spec"]


def test_a_namespace_with_jobs_has_a_policy_that_comes_back_as_it_was(bench: Bench) -> None:
    with bench.operating(watchers=WATCHERS) as operator:
        assert not bench.exists(POLICIES, NETWORK_POLICY)
        bench.submit()
        bench.wait_running()
        assert as_wanted(bench)
        uid = bench.get(POLICIES, NETWORK_POLICY)["metadata"]["uid"]
        for change in (
            {"spec": OPENED},
            {"metadata": {"labels": {"grpo.dev/component": None}}},
            {
                "metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}},
                "spec": {"ingress": None},
            },
        ):
            bench.patch(POLICIES, NETWORK_POLICY, change)
            bench.wait("the policy as it was", lambda: as_wanted(bench))
        assert bench.get(POLICIES, NETWORK_POLICY)["metadata"]["uid"] == uid
        bench.delete(POLICIES, NETWORK_POLICY)
        bench.wait("a new policy", lambda: as_wanted(bench))
        bench.submit("second")
        bench.wait_running("second")
        assert operator.requests()["PATCH", "networkpolicies"] == 3


def test_a_strangers_policy_of_the_name_is_left_told_and_keeps_no_job_waiting(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = bench.post(POLICIES, STRANGER)
    with bench.operating(watchers=WATCHERS):
        bench.submit()
        bench.wait_running()
        assert bench.get(POLICIES, NETWORK_POLICY)["spec"] == stranger["spec"]
        told = [one.message for one in caplog.records if one.levelno == logging.WARNING]
        assert [
            one
            for one in told
            if "NetworkPolicy grpo-pods of this namespace is not the operator's" in one
        ]


def test_peers_that_the_api_server_refuses_are_told_on_the_job(bench: Bench) -> None:
    refused = [{"ipBlock": {"cidr": "nowhere"}}]
    with pytest.raises(ApiStatusError, match="cidr"):
        bench.post(POLICIES, network_policy(bench.namespace, refused))
    with bench.operating(watchers=refused):
        bench.submit()
        bench.wait("the reason", lambda: "cidr" in bench.condition("Scheduled")[2])
        assert bench.children() == []
