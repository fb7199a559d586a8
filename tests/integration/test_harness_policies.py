"""What the harness takes NetworkPolicies to say, and that nftables itself understands it.

That packets are refused is shown where there are pods: tests/e2e/test_network_policies.py.
"""

import re
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.nodes.isolation import World, matches, ruleset
from harness.programs import prerequisites

Object = dict[str, Any]
NAMESPACES = [
    {"metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}}}
    for name in ("team", "other")
]


def pod(address: str, namespace: str = "team", **labels: str) -> Object:
    ports = [{"name": "metrics", "containerPort": 8080}]
    return {
        "metadata": {"name": address, "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"name": "c", "ports": ports}]},
        "status": {"podIP": address, "phase": "Running"},
    }


def policy(ingress: list[Object], selector: Object | None = None, **spec: Any) -> Object:
    return {
        "metadata": {"namespace": "team"},
        "spec": {"podSelector": selector or {}, "ingress": ingress, **spec},
    }


A, B, STRANGER = (
    pod("10.0.0.1", app="a"),
    pod("10.0.0.2", app="b"),
    pod("10.0.1.1", "other", app="a"),
)
PODS = [A, B, STRANGER]


def rules(*policies: Object, pods: list[Object] | None = None) -> list[str]:
    text = ruleset(World(list(policies), pods or PODS, NAMESPACES))
    return [line.strip() for line in text.splitlines() if re.match(r"\s+ip6? ", line)]


def test_a_pod_that_nobody_selects_takes_everything() -> None:
    assert rules() == []
    assert rules(policy([], {"matchLabels": {"app": "c"}})) == []
    assert rules(policy([], policyTypes=["Egress"])) == []


def test_a_pod_that_is_selected_takes_nothing_else() -> None:
    chosen = {"matchLabels": {"app": "a"}}
    assert rules(policy([], chosen)) == ["ip daddr 10.0.0.1 drop"], "the policy is its namespace's"
    own = policy([{"from": [{"podSelector": {}}]}], chosen)
    assert rules(own) == [
        "ip daddr 10.0.0.1 ip saddr 10.0.0.1 accept",
        "ip daddr 10.0.0.1 ip saddr 10.0.0.2 accept",
        "ip daddr 10.0.0.1 drop",
    ]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({}, "accept"),
        ({"from": []}, "accept"),
        ({"ports": [{"port": 8080}]}, "tcp dport 8080 accept"),
        ({"ports": [{"port": "metrics"}]}, "tcp dport 8080 accept"),
        ({"ports": [{"port": 53, "protocol": "UDP"}]}, "udp dport 53 accept"),
        ({"ports": [{"port": 1, "endPort": 9}]}, "tcp dport 1-9 accept"),
        ({"ports": [{"protocol": "TCP"}]}, "meta l4proto tcp accept"),
        ({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}, "ip saddr 10.0.0.0/8 accept"),
        (
            {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]},
            "ip saddr 10.0.0.0/8 ip saddr != 10.1.0.0/16 accept",
        ),
        (
            {
                "from": [
                    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}}}
                ]
            },
            "ip saddr 10.0.1.1 accept",
        ),
        (
            {"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "b"}}}]},
            "ip saddr 10.0.0.2 accept",
        ),
    ],
)
def test_a_rule_says_who_may_come_and_where_to(rule: Object, said: str) -> None:
    chosen = {"matchLabels": {"app": "a"}}
    assert rules(policy([rule], chosen)) == [f"ip daddr 10.0.0.1 {said}", "ip daddr 10.0.0.1 drop"]


def test_pods_without_an_address_of_their_own_are_left_out() -> None:
    ended, hosted, new = (pod("10.0.0.9") for _ in range(3))
    ended["status"]["phase"] = "Succeeded"
    hosted["spec"]["hostNetwork"] = True
    del new["status"]["podIP"]
    assert rules(policy([]), pods=[ended, hosted, new]) == []


@given(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz")),
    st.sampled_from("abc"),
    st.sets(st.sampled_from("xyz")),
)
def test_expressions_are_each_others_opposites(
    labels: dict[str, str], key: str, values: set[str]
) -> None:
    item = {"metadata": {"labels": labels}}
    for one, other in (("In", "NotIn"), ("Exists", "DoesNotExist")):
        said = [
            matches({"matchExpressions": [{"key": key, "operator": name, "values": values}]}, item)
            for name in (one, other)
        ]
        assert sorted(said) == [False, True]


ADDRESSES = st.sampled_from(["10.0.0.1", "10.0.0.2", "fd00::1"])
PEERS: st.SearchStrategy[Object] = st.one_of(
    st.just({"podSelector": {}}),
    st.just({"namespaceSelector": {}}),
    st.just({"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.2.0.0/16"]}}),
    st.just({"ipBlock": {"cidr": "fd00::/8"}}),
)
PORTS = st.fixed_dictionaries(
    {},
    optional={
        "protocol": st.sampled_from(["TCP", "UDP", "SCTP"]),
        "port": st.one_of(st.integers(1, 9), st.just("metrics")),
    },
)
RULE = st.fixed_dictionaries(
    {}, optional={"from": st.lists(PEERS, max_size=2), "ports": st.lists(PORTS, max_size=2)}
)


def test_nftables_takes_whatever_is_said(tmp_path: Any) -> None:
    """All of a few hundred rulesets, in one run of nft that changes nothing."""
    texts: list[str] = []

    @given(st.lists(RULE, max_size=3), st.lists(ADDRESSES, unique=True))
    def say(ingress: list[Object], addresses: list[str]) -> None:
        texts.append(ruleset(World([policy(ingress)], [pod(one) for one in addresses], NAMESPACES)))

    say()
    prerequisites.require(nodes=True)
    file = tmp_path / "all.nft"
    file.write_text("".join(texts))
    command = ["unshare", "--net", "nft", "--check", "--file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
