"""What users may and may not say about where a job runs and how it is started again.

Part of tests/samples.py, in its notation: changes of its SPEC, and for each bad one the path and what is said.
"""

from typing import Any

Changes = dict[str, Any]

GOOD_RUNNING: dict[str, Changes] = {
    "create-pods": {
        "placement": {
            "provisioning": "CreatePods",
            "gpuProduct": "NVIDIA-L4",
            "gpusPerNode": 4,
            "nodes": 2,
            "nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-l4"},
            "provisioningTimeoutSeconds": 1200,
        },
    },
    "restart-rules": {
        "restarts": {
            "limit": 0,
            "uncountedLimit": 10000,
            "startTimeoutSeconds": 86400,
            "rules": [
                {"action": "Fail", "onExitCodes": {"operator": "NotIn", "values": [1, 255]}},
                {"action": "RestartUncounted", "onResults": ["RewardError", "Hang"]},
                {"action": "Restart", "onReasons": ["OOMKilled", "UnexpectedAdmissionError"]},
            ],
        },
    },
}
"""Changes that must be accepted."""

BAD_RUNNING: tuple[tuple[str, Changes, str, str], ...] = (
    ("negative-restarts", {"restarts.limit": -1}, "spec.restarts.limit", "greater than or equal to 0"),
    (
        "rule-about-nothing",
        {"restarts.rules": [{"action": "Fail"}]},
        "spec.restarts.rules[0]",
        "set exactly one of onExitCodes, onResults, onReasons",
    ),
    (
        "rule-about-two",
        {"restarts.rules": [{"action": "Fail", "onResults": ["Hang"], "onReasons": ["Evicted"]}]},
        "spec.restarts.rules[0]",
        "set exactly one of onExitCodes, onResults, onReasons",
    ),
    (
        "rule-about-success",
        {"restarts.rules": [{"action": "Fail", "onResults": ["Succeeded"]}]},
        "spec.restarts.rules[0].onResults[0]",
        "Preempted",
    ),
    (
        "exit-code-0",
        {"restarts.rules": [{"action": "Fail", "onExitCodes": {"operator": "In", "values": [0]}}]},
        "spec.restarts.rules[0].onExitCodes.values[0]",
        "greater than or equal to 1",
    ),
    (
        "undeclared-nodes",
        {
            "placement": {
                "provisioning": "CreatePods",
                "gpuProduct": "NVIDIA-L4",
                "nodes": 2,
                "nodeSelector": {"a": "b"},
            }
        },
        "spec.placement",
        "declare gpuProduct, gpusPerNode and nodes",
    ),
    (
        "declared-nodes-and-a-choice",
        {
            "placement": {
                "provisioning": "CreatePods",
                "gpuProduct": "NVIDIA-L4",
                "gpusPerNode": 4,
                "nodes": 2,
                "nodeSelector": {"a": "b"},
                "gpus": {"max": 4},
            },
        },
        "spec.placement",
        "remove gpus and queueName",
    ),
    (
        "gpus-per-node-of-no-node",
        {"placement": {"gpusPerNode": 4}},
        "spec.placement",
        "gpusPerNode belongs to provisioning CreatePods",
    ),
)
"""Changes that must be rejected: name, change, path, and a part of the message."""
