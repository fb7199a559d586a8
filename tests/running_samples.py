"""What users may and may not say about where a job runs, where it puts its results and how it is
started again.

Part of tests/samples.py, in its notation: changes of its SPEC, and for each bad one the path and
what is said.
"""

from typing import Any

Changes = dict[str, Any]

HUB: Changes = {"repository": "team/out", "tokenSecretRef": {"name": "hub", "key": "token"}}
"""A repository that the model may be pushed to."""

GOOD_RUNNING: dict[str, Changes] = {
    "all-trackers": {
        "checkpoint.volume": {"claimName": "c"},
        "tracking": {
            "runName": "a run",
            "samples": True,
            "wandb": {
                "project": "grpo",
                "entity": "team",
                "tokenSecretRef": {"name": "wandb", "key": "token"},
            },
            "mlflow": {"url": "https://mlflow.example:5000/base", "experiment": "GRPO"},
            "trackio": {
                "project": "grpo",
                "space": "team/training",
                "tokenSecretRef": {"name": "hub", "key": "token"},
            },
            "tensorboard": {},
        },
    },
    "event-files-on-a-volume-of-their-own": {"tracking.tensorboard": {"directory": "/logs"}},
    "model-on-the-hub": {"export": {"to": "Hub", "hub": HUB | {"private": False}}},
    "object-store": {
        "checkpoint": {
            "store": {
                "url": "s3://models/runs",
                "endpoint": "https://s3.example.com",
                "region": "eu-1",
                "credentialsSecretRef": {"name": "store"},
            }
        }
    },
    "azure-store": {"checkpoint": {"store": {"url": "az://account/container/runs"}}},
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
    (
        "event-files-without-a-volume",
        {"tracking.tensorboard": {}},
        "spec",
        "set checkpoint.volume or volumeClaimTemplate, or tracking.tensorboard.directory",
    ),
    (
        "trackio-nowhere",
        {"tracking.trackio": {"project": "p", "tokenSecretRef": {"name": "s", "key": "k"}}},
        "spec.tracking.trackio",
        "exactly one of space and url",
    ),
    (
        "credentials-in-a-tracker-url",
        {"tracking.mlflow": {"url": "https://user:word@mlflow.example"}},
        "spec.tracking.mlflow.url",
        "match",
    ),
    (
        "project-with-its-owner",
        {"tracking.wandb": {"project": "a/b", "tokenSecretRef": {"name": "w", "key": "k"}}},
        "spec.tracking.wandb.project",
        "a name without /",
    ),
    (
        "product-in-words",
        {"placement.gpuProduct": "NVIDIA H100"},
        "spec.placement.gpuProduct",
        "as H100 or NVIDIA-L4",
    ),
    (
        "wandb-without-a-key",
        {"tracking.wandb": {"project": "p"}},
        "spec.tracking.wandb.tokenSecretRef",
        "Required",
    ),
    (
        "export-to-no-repository",
        {"export.to": "Hub"},
        "spec.export",
        "export.to Hub needs export.hub",
    ),
    ("export-to-none-and-hub", {"export.hub": HUB}, "spec.export", "belongs to export.to Hub"),
    (
        "repository-without-namespace",
        {"export": {"to": "Hub", "hub": HUB | {"repository": "out"}}},
        "spec.export.hub.repository",
        "write it as NAMESPACE/NAME",
    ),
    (
        "repository-that-the-hub-refuses",
        {"export": {"to": "Hub", "hub": HUB | {"repository": "team/a--b"}}},
        "spec.export.hub",
        "takes no repository",
    ),
    (
        "export-over-the-base",
        {"model.name": "team/out", "export": {"to": "Hub", "hub": HUB}},
        "spec",
        "whose weights would be replaced",
    ),
    (
        "store-and-volume",
        {"checkpoint": {"volume": {"claimName": "c"}, "store": {"url": "s3://bucket"}}},
        "spec.checkpoint",
        "at most one of volume, volumeClaimTemplate, store",
    ),
    (
        "store-upwards",
        {"checkpoint.store": {"url": "s3://b/../c"}},
        "spec.checkpoint.store.url",
        "write it as s3://",
    ),
    (
        "store-by-http",
        {"checkpoint.store": {"url": "https://b/c"}},
        "spec.checkpoint.store.url",
        "write it as s3://",
    ),
    (
        "endpoint-of-google",
        {"checkpoint.store": {"url": "gs://bucket", "endpoint": "https://s3.example.com"}},
        "spec.checkpoint.store",
        "endpoint and region belong to s3",
    ),
    (
        "azure-without-container",
        {"checkpoint.store": {"url": "az://account"}},
        "spec.checkpoint.store",
        "names account and container",
    ),
    (
        "path-on-a-store",
        {"checkpoint": {"store": {"url": "s3://bucket"}}, "resumeFrom": {"path": "demo-1"}},
        "spec",
        "set checkpoint.volume",
    ),
    (
        "negative-restarts",
        {"restarts.limit": -1},
        "spec.restarts.limit",
        "greater than or equal to 0",
    ),
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
