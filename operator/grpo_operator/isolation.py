"""The NetworkPolicy that all attempts of a namespace share: what may reach their pods.

A gang talks on ports that NCCL and gloo choose, without a password, so that all ports are its own pods' alone. A policy
can't say "of the same job" once for all jobs: the namespace is the boundary.
"""

from collections.abc import Sequence

from grpo_api.contract import PROGRESS_PORT

from .names import COMPONENT_ISOLATION, LABEL_COMPONENT, LABEL_MANAGED_BY, MANAGER, NETWORK_POLICY
from .pod_volumes import Manifest


def network_policy(namespace: str, watchers: Sequence[Manifest]) -> Manifest:
    """Lets our pods of the namespace reach each other, and `watchers`, peers of networking.k8s.io/v1, PROGRESS_PORT.

    What pods may ask for stays open: hubs, object stores and reward services are anywhere.
    """
    ours = {"matchLabels": {LABEL_MANAGED_BY: MANAGER}}
    rules: list[Manifest] = [{"from": [{"podSelector": ours}]}]
    if watchers:  # without a `from` it would be everybody
        rules.append({"from": list(watchers), "ports": [{"protocol": "TCP", "port": PROGRESS_PORT}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": NETWORK_POLICY,
            "namespace": namespace,
            "labels": {LABEL_MANAGED_BY: MANAGER, LABEL_COMPONENT: COMPONENT_ISOLATION},
        },
        "spec": {"podSelector": ours, "policyTypes": ["Ingress"], "ingress": rules},
    }
