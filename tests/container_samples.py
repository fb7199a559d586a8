"""What users may and may not say about the training container: its environment and its resources.

Part of tests/samples.py, in its notation: changes of its SPEC, and for each bad one the path and
what is said.
"""

from typing import Any

Changes = dict[str, Any]

GOOD_CONTAINERS: dict[str, Changes] = {
    "environment": {
        "env": [
            {"name": "A", "value": ""},
            {"name": "http.proxy", "value": "http://proxy:3128"},
            {
                "name": "B",
                "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}},
            },
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "s", "key": "k"}}},
            {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['team']"}}},
            {
                "name": "E",
                "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}},
            },
            {"name": "HF_HOME", "value": "/cache"},
        ],
        "envFrom": [
            {"prefix": "NCCL_", "configMapRef": {"name": "nccl"}},
            {"secretRef": {"name": "s"}},
        ],
    },
    "resources": {
        "resources": {
            "requests": {
                "cpu": "500m",
                "memory": "1.5Gi",
                "ephemeral-storage": "10G",
                "rdma/hca": "1",
            },
            "limits": {
                "cpu": "1e1",
                "memory": "2Gi",
                "hugepages-2Mi": "64Mi",
                "rdma/hca": "1",
                "nvidia.com/hostdev": "2",
            },
        },
    },
    "resources-as-numbers": {"resources.limits": {"cpu": "2", "memory": "17179869184"}},
    "same-amount-twice": {"resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": "1.5"}}},
}
"""Changes that must be accepted."""

NORMALISED: dict[str, Changes] = {
    "numbers-as-quantities": {
        "resources": {"requests": {"cpu": 1}, "limits": {"cpu": 2.0, "memory": 17179869184}}
    },
    "nulls": {
        "env": None,
        "resources": {"requests": None},
        "podTemplate.spec.affinity": None,
        "image": None,
    },
    "null-in-a-map": {"podTemplate.metadata.labels": {"team": None}},
    "null-in-a-list": {"env": [{"name": "A", "value": None}]},
    "integral-float": {
        "training.numGenerations": 8.0,
        "podTemplate.spec.terminationGracePeriodSeconds": 60.0,
    },
}
"""Changes that must be accepted and read as if they had been written otherwise."""

BAD_CONTAINERS: tuple[tuple[str, Changes, str, str], ...] = (
    (
        "value-and-source",
        {
            "env": [
                {
                    "name": "A",
                    "value": "b",
                    "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}},
                }
            ]
        },
        "spec.env[0]",
        "at most one of value and valueFrom",
    ),
    (
        "source-of-nothing",
        {"env": [{"name": "A", "valueFrom": {}}]},
        "spec.env[0].valueFrom",
        "exactly one of",
    ),
    (
        "two-sources",
        {
            "env": [
                {
                    "name": "A",
                    "valueFrom": {
                        "secretKeyRef": {"name": "s", "key": "k"},
                        "fieldRef": {"fieldPath": "metadata.name"},
                    },
                },
            ],
        },
        "spec.env[0].valueFrom",
        "exactly one of",
    ),
    (
        "old-secret",
        {"env": [{"name": "A", "secret": {"name": "s"}}]},
        "spec.env[0].secret",
        "unknown field",
    ),
    (
        "reserved-variable",
        {"env": [{"name": "GRPO_PLAN", "value": "x"}]},
        "spec.env[0]",
        "remove it",
    ),
    (
        "reserved-token",
        {"env": [{"name": "GRPO_REWARD_TOKEN_0", "value": "x"}]},
        "spec.env[0]",
        "remove it",
    ),
    ("reserved-rank", {"env": [{"name": "MASTER_ADDR", "value": "x"}]}, "spec.env[0]", "remove it"),
    (
        "segments-under-a-name-that-engines-do-not-read",
        {"env": [{"name": "PYTORCH_ALLOC_CONF", "value": "a:1, expandable_segments:True"}]},
        "spec.env[0]",
        "PYTORCH_CUDA_ALLOC_CONF, spelt expandable_segments:True",
    ),
    (
        "segments-spelt-as-engines-do-not-read-them",
        {"env": [{"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "expandable_segments : True"}]},
        "spec.env[0]",
        "PYTORCH_CUDA_ALLOC_CONF, spelt expandable_segments:True",
    ),
    (
        "same-variable-twice",
        {"env": [{"name": "A"}, {"name": "A"}]},
        "spec.env",
        "uplicate|more than one",
    ),
    ("bad-variable-name", {"env": [{"name": "A=B"}]}, "spec.env[0].name", "match"),
    ("dots-as-a-name", {"env": [{"name": ".."}]}, "spec.env[0].name", "match"),
    (
        "empty-env-from",
        {"envFrom": [{"prefix": "A_"}]},
        "spec.envFrom[0]",
        "exactly one of configMapRef",
    ),
    (
        "reserved-prefix",
        {"envFrom": [{"prefix": "GRPO_", "secretRef": {"name": "s"}}]},
        "spec.envFrom[0]",
        "another prefix",
    ),
    (
        "gpus-as-resource",
        {"resources.limits": {"nvidia.com/gpu": "1"}},
        "spec.resources",
        "placement.gpus",
    ),
    (
        "mig-as-resource",
        {"resources.requests": {"nvidia.com/mig-1g.10gb": 1}},
        "spec.resources",
        "placement.gpus",
    ),
    (
        "amd-as-resource",
        {"resources.limits": {"amd.com/gpu": "1"}},
        "spec.resources",
        "placement.gpus",
    ),
    (
        "request-above-limit",
        {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "2G"}}},
        "spec.resources",
        "exceed its limit",
    ),
    (
        "extended-without-limit",
        {"resources.requests": {"rdma/hca": "1"}},
        "spec.resources",
        "must equal",
    ),
    ("half-a-card", {"resources.limits": {"rdma/hca": "500m"}}, "spec.resources", "whole pieces"),
    (
        "memory-without-unit",
        {"resources.limits": {"memory": 2}},
        "spec.resources",
        "write 2Gi for 2",
    ),
    ("unknown-resource", {"resources.limits": {"mem": "1Gi"}}, "spec.resources.limits", "be cpu"),
    (
        "memory-with-a-space",
        {"resources.limits": {"memory": "16 GB"}},
        "spec.resources.limits.memory",
        "match",
    ),
    (
        "negative-memory",
        {"resources.limits": {"memory": "-1"}},
        "spec.resources.limits.memory",
        "match",
    ),
    (
        "negative-number",
        {"resources.limits": {"memory": -1}},
        "spec.resources.limits.memory",
        "match|greater than or equal to 0",
    ),
    (
        "quantity-as-float",
        {"resources.limits": {"cpu": 0.5}},
        "spec.resources.limits.cpu",
        "string",
    ),
    ("old-cpu", {"placement.cpu": "1"}, "spec.placement.cpu", "unknown field"),
)
"""Name, changes, path and reason of what must be rejected."""
