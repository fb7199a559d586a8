"""What users may say about the model, the data, the rewards and the training.

Part of tests/samples.py, in its notation: changes of its SPEC.
"""

from typing import Any

Changes = dict[str, Any]

CPU: Changes = {"placement.accelerator": "CPU"}
"""A job without GPUs."""

GOOD_TRAINING: dict[str, Changes] = {
    "smallest": {},
    "no-reference": {"training.beta": 0, "reference.strategy": "None"},
    "whole-numbers": {"training.beta": 1, "training.learningRate": 1},
    "chat-template": {
        "model.chatTemplate": "{% for m in messages %}{{ m.content }}{% endfor %} é ü 你好",
        "model.chatTemplateKwargs": {"enable_thinking": False, "tags": ["a", {"b": [1, 2.5]}]},
    },
    "pinned-batch": {"training.perDeviceTrainBatchSize": 16, "training.generationBatchSize": 128},
    "vespo": {
        "training.lossType": "vespo",
        "training.vespoKPos": 1,
        "training.importanceSampling": {"level": "token", "mode": "truncate"},
    },
    "two-sided-clip": {
        "training.delta": 1.5,
        "training.multiObjectiveAggregation": "normalize_then_sum",
    },
    "entropy": {
        "training.topEntropyQuantile": 0.2,
        "training.useAdaptiveEntropy": True,
        "training.entropyTarget": 2,
        "training.offPolicyMaskThreshold": 0.5,
        "training.useBiasCorrectionKl": False,
    },
    "decay": {
        "training.lrSchedulerType": "warmup_stable_decay",
        "training.lrSchedulerKwargs": {"num_decay_steps": 20, "decay_type": "1-sqrt"},
    },
    "polynomial": {"training.lrSchedulerType": "polynomial"},
    "least-rate": {
        "training.lrSchedulerType": "cosine_warmup_with_min_lr",
        "training.lrSchedulerKwargs": {"min_lr_rate": 0.1, "warmup_lr_rate": 0},
    },
    "overrides": {
        "training.overrides": {
            "tf32": True,
            "torch_empty_cache_steps": 4,
            "log_level": "info",
            "log_level_replica": "error",
            "log_on_each_node": False,
            "ddp_bucket_cap_mb": 50,
            "ddp_broadcast_buffers": False,
            "router_aux_loss_coef": 0,
        },
    },
    "files": {
        "dataset": {
            "files": {"volume": {"claimName": "data", "subPath": "a/b"}, "paths": ["*.jsonl"]}
        },
    },
    "config-map-files": {
        "dataset": {
            "files": {"configMap": {"name": "data"}, "paths": ["train.jsonl"]},
            "columns": {"prompt": "question"},
        },
    },
    "every-reward": {
        "rewards": [
            {"format": {"pattern": r"^\w+$", "score": -1}, "weight": 0.5, "name": "shape"},
            {"accuracy": {"compare": "Numeric", "extract": "Hash"}},
            {"python": {"function": "my_rewards.length:score", "configMap": {"name": "rewards"}}},
            {
                "http": {
                    "url": "http://judge.svc:8000/score",
                    "tokenSecretRef": {"name": "judge", "key": "token"},
                }
            },
            {"model": {"name": "some/reward-model", "parameters": "335M"}},
        ],
    },
    "moving-reference": {
        "reference.sync": {"everySteps": 64, "mixup": 0.5},
        "adapter.use": "Never",
    },
    "offloaded": {"reference": {"strategy": "Offload", "offload": {"target": "CPU"}}},
    "adapter": {
        "adapter": {
            "use": "Always",
            "rank": 8,
            "targetModules": ["q_proj"],
            "learningRate": 1e-5,
        },
        "reference.strategy": "Adapter",
    },
    "cpu": {
        **CPU,
        "placement.nodes": 2,
        "placement.processesPerNode": 2,
        "resources.limits.memory": "2Gi",
    },
    "gpu-limits": {"placement": {"gpus": {"min": 2, "max": 16}, "nodes": 2, "gpuMemory": "80Gi"}},
    "tolerant": {
        "placement": {
            "nodeSelector": {"example.com/pool": "a100"},
            "tolerations": [
                {"operator": "Exists"},
                {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
            ],
        },
    },
    "claim-template": {"checkpoint": {"volumeClaimTemplate": {"size": "100Gi"}, "everySteps": 10}},
    "claim-on-one-node": {
        "placement.nodes": 1,
        "checkpoint.volumeClaimTemplate": {"size": "1Gi", "accessMode": "ReadWriteOnce"},
    },
    "guarded": {"guard": {"maxKL": 10, "maxKLSteps": 3, "hangTimeoutSeconds": 600}},
    "unicode-prompt": {"dataset.systemPrompt": "Réponds ✓ 数学"},
    "unicode-at-the-limit": {"dataset.systemPrompt": "数" * 16384},
    "managed-by-another": {"managedBy": "example.com/dispatcher"},
    "retried": {"retry": 3},
    "checked-whatever-it-takes": {"preflight": "Required"},
    "not-checked": {"preflight": "Off"},
    "hub-cache": {"model.cache": {"claimName": "hub", "subPath": "team/a"}},
    "model-from-image": {
        "model.image": {"reference": "registry.example/models/tiny:1", "pullPolicy": "Always"}
    },
    "from-a-job": {"resumeFrom": {"grpoJob": "earlier"}},
    "from-a-folder": {
        "resumeFrom": {"path": "run-1/attempt-2"},
        "checkpoint.volume": {"claimName": "c"},
    },
    "model-on-the-volume": {
        "export.to": "Volume",
        "checkpoint.volumeClaimTemplate": {"size": "1Gi"},
    },
    "model-on-the-store": {
        "export.to": "ObjectStore",
        "checkpoint.store": {"url": "s3://bucket/runs"},
    },
    "model-thrown-away": {"export.to": "None", "checkpoint.volume": {"claimName": "c"}},
    "suspended": {"suspend": True, "activeDeadlineSeconds": 3600, "ttlSecondsAfterFinished": 0},
}

SCHEDULE = "training.lrSchedulerType"
ARGUMENTS = "training.lrSchedulerKwargs"
BAD_TRAINING: tuple[tuple[str, Changes, str, str], ...] = (
    (
        "delta-without-a-clip",
        {"training.lossType": "cispo", "training.delta": 2},
        "spec.training",
        "delta belongs to lossType grpo",
    ),
    (
        "vespo-of-sequences",
        {"training.lossType": "vespo"},
        "spec.training",
        "set importanceSampling.level to token",
    ),
    (
        "entropy-bounds",
        {"training.entropyCoefMin": 2},
        "spec.training",
        "entropyCoefMin must be at most entropyCoefMax",
    ),
    (
        "argument-of-another-schedule",
        {SCHEDULE: "cosine", ARGUMENTS: {"power": 2}},
        "spec.training",
        "does not take one of lrSchedulerKwargs",
    ),
    (
        "argument-of-no-schedule",
        {ARGUMENTS: {"numCycles": 2}},
        f"spec.{ARGUMENTS}",
        "unknown field",
    ),
    (
        "schedule-without-its-argument",
        {SCHEDULE: "cosine_with_min_lr"},
        "spec.training",
        "needs min_lr, min_lr_rate or num_decay_steps",
    ),
    (
        "two-least-rates",
        {SCHEDULE: "cosine_with_min_lr", ARGUMENTS: {"min_lr": 0, "min_lr_rate": 0}},
        f"spec.{ARGUMENTS}",
        "not both",
    ),
    (
        "polynomial-that-rises",
        {SCHEDULE: "polynomial", "training.learningRate": 1e-7},
        "spec.training",
        "needs a learningRate above",
    ),
    ("schedule-by-metric", {SCHEDULE: "greedy"}, f"spec.{SCHEDULE}", "cosine"),
    (
        "override-of-a-field-of-the-spec",
        {"training.overrides.beta": 0.1},
        "spec.training.overrides.beta",
        "unknown field",
    ),
    (
        "override-of-the-planners",
        {"training.overrides.deepspeed": {"zero_optimization": {"stage": 3}}},
        "spec.training.overrides.deepspeed",
        "unknown field",
    ),
    (
        "override-of-another-type",
        {"training.overrides.tf32": "yes"},
        "spec.training.overrides.tf32",
        "boolean",
    ),
)
"""Changes that must be rejected: name, changes, path and what is said."""
