"""GRPOJobs that must be accepted and ones that must be rejected, each with the reason in one place.

The models (tests/unit/test_schema.py) and the real API server (tests/integration/test_bad_specs.py)
are asked about the same specs. Those about containers and pods are in files of their own.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from grpo_api.text.contract import API_VERSION, KIND
from tests.container_samples import BAD_CONTAINERS, GOOD_CONTAINERS
from tests.generation_samples import BAD_GENERATION, GOOD_GENERATION
from tests.pod_samples import BAD_PODS, GOOD_PODS
from tests.running_samples import BAD_RUNNING, GOOD_RUNNING
from tests.training_samples import BAD_TRAINING, CPU, GOOD_TRAINING

REMOVE = object()
"""As the value of a change: the field is taken out."""

SPEC: dict[str, Any] = {
    "model": {"name": "meta-llama/Llama-3.2-1B-Instruct", "parameters": "1.24B"},
    "dataset": {"name": "openai/gsm8k", "config": "main"},
    "rewards": [{"format": {"pattern": "<answer>.*</answer>"}}, {"accuracy": {"score": 2.0}}],
    "export": {"to": "None"},
}
"""The smallest useful spec."""


def job(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A GRPOJob of that name."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


def changed(changes: dict[str, Any], spec: dict[str, Any] = SPEC) -> dict[str, Any]:
    """A copy of the spec with dotted paths such as `rewards.0.weight` set to new values."""
    result = copy.deepcopy(spec)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place: Any = result
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        if value is REMOVE:
            del place[last]
        else:
            place[int(last) if isinstance(place, list) else last] = value
    return result


@dataclass(frozen=True)
class Bad:
    """A change that makes SPEC wrong; the answer names the path and says what is allowed."""

    name: str
    changes: dict[str, Any]
    path: str
    says: str
    base: dict[str, Any] = field(default_factory=lambda: SPEC)

    @property
    def spec(self) -> dict[str, Any]:
        """The wrong spec."""
        return changed(self.changes, self.base)


GOOD: dict[str, dict[str, Any]] = {
    **GOOD_TRAINING,
    **GOOD_CONTAINERS,
    **GOOD_PODS,
    **GOOD_RUNNING,
    **GOOD_GENERATION,
    "model-beside-checkpoints": {"export": REMOVE, "checkpoint.volume": {"claimName": "c"}},
}
"""Changes of SPEC that must be accepted."""


BAD: tuple[Bad, ...] = (
    Bad("unknown-field", {"modell": {"name": "x"}}, "spec.modell", "unknown field"),
    Bad(
        "unknown-nested-field",
        {"training.learning_rate": 1e-6},
        "spec.training.learning_rate",
        "unknown field",
    ),
    Bad("unknown-null", {"training.lr": None}, "spec.training.lr", "unknown field"),
    Bad("unknown-null-below", {"training": {"lr": None}}, "spec.training.lr", "unknown field"),
    Bad("empty-template", {"model.chatTemplate": ""}, "spec.model.chatTemplate", "at least 1"),
    Bad(
        "long-template",
        {"model.chatTemplate": "x" * 32769},
        "spec.model.chatTemplate",
        "32768",
    ),
    Bad(
        "list-for-variables",
        {"model.chatTemplateKwargs": ["enable_thinking"]},
        "spec.model.chatTemplateKwargs",
        "object",
    ),
    Bad("no-model", {"model": REMOVE}, "spec.model", "Required"),
    Bad("no-dataset", {"dataset": REMOVE}, "spec.dataset", "Required"),
    Bad("no-rewards", {"rewards": REMOVE}, "spec.rewards", "Required"),
    Bad("empty-rewards", {"rewards": []}, "spec.rewards", "at least 1"),
    Bad("33-rewards", {"rewards": [{"accuracy": {}}] * 33}, "spec.rewards", "at most 32"),
    Bad("text-for-number", {"training.beta": "much"}, "spec.training.beta", "number"),
    Bad(
        "quoted-integer",
        {"training.numGenerations": "4"},
        "spec.training.numGenerations",
        "integer",
    ),
    Bad("number-for-text", {"model.name": 7}, "spec.model.name", "string"),
    Bad(
        "fraction-of-a-group",
        {"training.numGenerations": 2.5},
        "spec.training.numGenerations",
        "integer",
    ),
    Bad("text-for-boolean", {"suspend": "yes"}, "spec.suspend", "boolean"),
    Bad("text-for-list", {"rewards": "accuracy"}, "spec.rewards", "array"),
    Bad(
        "negative-beta", {"training.beta": -0.1}, "spec.training.beta", "greater than or equal to 0"
    ),
    Bad(
        "zero-learning-rate",
        {"training.learningRate": 0},
        "spec.training.learningRate",
        "greater than 0",
    ),
    Bad(
        "group-of-one",
        {"training.numGenerations": 1},
        "spec.training.numGenerations",
        "greater than or equal to 2",
    ),
    Bad(
        "zero-prompts",
        {"training.promptsPerStep": 0},
        "spec.training.promptsPerStep",
        "greater than or equal to 1",
    ),
    Bad(
        "huge-completion",
        {"training.maxCompletionLength": 10**9},
        "spec.training.maxCompletionLength",
        "1048576",
    ),
    Bad("huge-seed", {"training.seed": 2**63 - 1}, "spec.training.seed", "4294967295"),
    Bad(
        "hub-cache-outside",
        {"model.cache": {"claimName": "hub", "subPath": "../x"}},
        "spec.model.cache",
        "inside the volume",
    ),
    Bad(
        "model-from-two-places",
        {"model.volume": {"claimName": "c"}, "model.image": {"reference": "models:1"}},
        "spec.model",
        "set at most one of volume, image",
    ),
    Bad(
        "model-from-no-image",
        {"model.image": {"reference": ""}},
        "spec.model.image.reference",
        "at least 1",
    ),
    Bad(
        "model-from-a-place-with-blanks",
        {"model.image": {"reference": "a b"}},
        "spec.model.image.reference",
        "should match",
    ),
    Bad("from-nothing", {"resumeFrom": {}}, "spec.resumeFrom", "exactly one of grpoJob and path"),
    Bad(
        "from-both",
        {"resumeFrom": {"grpoJob": "a", "path": "b"}},
        "spec.resumeFrom",
        "exactly one of grpoJob and path",
    ),
    Bad("from-a-folder-nowhere", {"resumeFrom": {"path": "a"}}, "spec", "set checkpoint.volume"),
    Bad(
        "from-outside",
        {"resumeFrom": {"path": "a/../../b"}, "checkpoint.volume": {"claimName": "c"}},
        "spec.resumeFrom",
        "stay inside the volume",
    ),
    Bad("from-a-long-name", {"resumeFrom": {"grpoJob": "a" * 53}}, "spec.resumeFrom.grpoJob", "52"),
    Bad("negative-retry", {"retry": -1}, "spec.retry", "greater than or equal to 0"),
    Bad(
        "zero-gpus",
        {"placement.gpus.min": 0},
        "spec.placement.gpus.min",
        "greater than or equal to 1",
    ),
    Bad(
        "zero-deadline",
        {"activeDeadlineSeconds": 0},
        "spec.activeDeadlineSeconds",
        "greater than or equal to 1",
    ),
    Bad(
        "negative-ttl",
        {"ttlSecondsAfterFinished": -5},
        "spec.ttlSecondsAfterFinished",
        "greater than or equal to 0",
    ),
    Bad("wrong-strategy", {"reference.strategy": "clone"}, "spec.reference.strategy", "Clone"),
    Bad("wrong-preflight", {"preflight": "Yes"}, "spec.preflight", "Required"),
    # YAML reads an unquoted Off as false.
    Bad("preflight-off-without-quotes", {"preflight": False}, "spec.preflight", "Off"),
    Bad("wrong-loss", {"training.lossType": "ppo"}, "spec.training.lossType", "dapo"),
    Bad("wrong-accelerator", {"placement.accelerator": "TPU"}, "spec.placement.accelerator", "CPU"),
    Bad("empty-model-name", {"model.name": ""}, "spec.model.name", "at least 1"),
    Bad("model-by-url", {"model.name": "https://hub/a/b"}, "spec", "write a hub id such as"),
    Bad("model-name-with-space", {"model.name": "my model"}, "spec.model.name", "match"),
    Bad("zero-parameters", {"model.parameters": "0B"}, "spec.model.parameters", "write it as 7B"),
    Bad("small-letter-parameters", {"model.parameters": "7b"}, "spec.model.parameters", "as 7B"),
    Bad(
        "parameters-in-words", {"model.parameters": "one billion"}, "spec.model.parameters", "as 7B"
    ),
    Bad(
        "parameters-as-number", {"model.parameters": 1240000000}, "spec.model.parameters", "string"
    ),
    Bad(
        "two-rewards-in-one",
        {"rewards.0.accuracy": {}},
        "spec.rewards[0]",
        "exactly one of format, accuracy",
    ),
    Bad(
        "reward-without-kind",
        {"rewards.1": {"weight": 1}},
        "spec.rewards[1]",
        "exactly one of format, accuracy",
    ),
    Bad(
        "same-reward-names",
        {"rewards.0.name": "a", "rewards.1.name": "a"},
        "spec",
        "different names",
    ),
    Bad(
        "format-without-pattern",
        {"rewards.0.format": {}},
        "spec.rewards[0].format.pattern",
        "Required",
    ),
    Bad("unicode-reward-name", {"rewards.0.name": "größe"}, "spec.rewards[0].name", "match"),
    Bad(
        "unicode-function",
        {"rewards.0": {"python": {"function": "módulo:f"}}},
        "spec.rewards[0].python",
        "module:function",
    ),
    Bad(
        "function-with-a-dot",
        {"rewards.0": {"python": {"function": "my_reward.digits"}}},
        "spec.rewards[0].python.function",
        "such as my_reward:digits",
    ),
    Bad(
        "url-without-scheme",
        {"rewards.0": {"http": {"url": "judge:80"}}},
        "spec.rewards[0].http.url",
        "write it as http://",
    ),
    Bad(
        "two-datasets",
        {"dataset.files": {"configMap": {"name": "d"}, "paths": ["a"]}},
        "spec.dataset",
        "exactly one",
    ),
    Bad(
        "no-dataset-source", {"dataset": {"split": "train"}}, "spec.dataset", "exactly one of name"
    ),
    Bad(
        "files-without-volume",
        {"dataset": {"files": {"paths": ["a"]}}},
        "spec.dataset.files",
        "exactly one of volume",
    ),
    Bad(
        "files-outside-volume",
        {"dataset": {"files": {"configMap": {"name": "d"}, "paths": ["a/../../b"]}}},
        "spec.dataset.files",
        "inside the volume",
    ),
    Bad(
        "config-of-files",
        {"dataset": {"files": {"configMap": {"name": "d"}, "paths": ["a"]}, "config": "main"}},
        "spec.dataset",
        "belong to a hub dataset",
    ),
    Bad(
        "batch-does-not-divide",
        {"training.perDeviceTrainBatchSize": 7},
        "spec.training",
        "must divide",
    ),
    Bad("half-a-step", {"training.generationBatchSize": 65}, "spec.training", "multiple of"),
    Bad("mean-high", {"training.expectedCompletionLength": 513}, "spec.training", "at most max"),
    Bad(
        "importance-bounds-upside-down",
        {"training.importanceSampling": {"clip": {"min": 1, "max": 0.5}}},
        "spec.training.importanceSampling.clip",
        "min must be below max",
    ),
    Bad(
        "clip-range-upside-down", {"training.epsilonHigh": 0.1}, "spec.training", "at least epsilon"
    ),
    Bad("beta-without-reference", {"reference.strategy": "None"}, "spec", "needs training.beta 0"),
    Bad(
        "reference-without-beta",
        {"training.beta": 0, "reference.strategy": "Clone"},
        "spec",
        "set reference.strategy to None or Auto",
    ),
    Bad(
        "sync-without-reference",
        {"training.beta": 0, "reference.sync": {}},
        "spec",
        "needs training.beta above 0",
    ),
    Bad("unknown-finding", {"guard.stopOn": ["Bored"]}, "spec.guard.stopOn", "EntropyCollapsed"),
    Bad("kl-limit-without-kl", {"training.beta": 0, "guard.maxKL": 1}, "spec", "there is no KL"),
    Bad(
        "adapter-forbidden",
        {"adapter.use": "Never", "reference.strategy": "Adapter"},
        "spec",
        "adapter.use IfNeeded",
    ),
    Bad(
        "adapter-and-clone",
        {"adapter.use": "Always", "reference.strategy": "Clone"},
        "spec",
        "Auto, Adapter or None",
    ),
    Bad(
        "rate-of-no-adapter",
        {"adapter": {"use": "Never", "learningRate": 1e-5}},
        "spec.adapter",
        "remove it or change use",
    ),
    Bad("adapter-sync", {"adapter.use": "Always", "reference.sync": {}}, "spec", "frozen base"),
    Bad(
        "offload-of-clone",
        {"reference": {"strategy": "Clone", "offload": {}}},
        "spec.reference",
        "Offload, Sharded",
    ),
    Bad(
        "offload-to-a-disk",
        {"reference.offload.target": "NVMe"},
        "spec.reference.offload",
        "set target to CPU",
    ),
    Bad(
        "max-below-min",
        {"placement.gpus": {"min": 4, "max": 2}},
        "spec.placement.gpus",
        "at least min",
    ),
    Bad(
        "nodes-without-gpus",
        {"placement": {"nodes": 4, "gpus": {"max": 2}}},
        "spec.placement",
        "at least nodes",
    ),
    Bad(
        "gpus-on-cpu", {**CPU, "placement.gpus": {}}, "spec.placement", "belong to accelerator GPU"
    ),
    Bad(
        "processes-on-gpu",
        {"placement.processesPerNode": 2},
        "spec.placement",
        "belongs to accelerator CPU",
    ),
    Bad("zero-gpu-memory", {"placement.gpuMemory": "0"}, "spec.placement.gpuMemory", "as 100G"),
    Bad(
        "no-gpu-memory",
        {"placement.gpuMemory": 0},
        "spec.placement.gpuMemory",
        "as 100G|greater than or equal to 1",
    ),
    Bad("memory-in-words", {"placement.gpuMemory": "16 GB"}, "spec.placement.gpuMemory", "as 100G"),
    Bad("bytes-in-GB", {"sharedMemory": "100GB"}, "spec.sharedMemory", "as 100G, 100Gi"),
    Bad("millibytes", {"placement.gpuMemory": "512m"}, "spec.placement.gpuMemory", "as 100G"),
    Bad(
        "half-a-second",
        {"rewards.0.format.timeoutSeconds": 0.5},
        "spec.rewards[0].format.timeoutSeconds",
        "integer",
    ),
    Bad(
        "token-without-key",
        {"model.tokenSecretRef": {"name": "hub"}},
        "spec.model.tokenSecretRef.key",
        "Required",
    ),
    Bad(
        "bad-label-value",
        {"placement.nodeSelector": {"pool": "a b"}},
        "spec.placement.nodeSelector.pool",
        "match",
    ),
    Bad(
        "bad-label-key",
        {"placement.nodeSelector": {"-pool": "a"}},
        "spec.placement.nodeSelector",
        "label's key|match",
    ),
    Bad(
        "sync-of-adapter",
        {"reference": {"strategy": "Adapter", "sync": {}}},
        "spec.reference",
        "reference of its own",
    ),
    Bad(
        "seconds-without-effect",
        {"placement.tolerations": [{"operator": "Exists", "tolerationSeconds": 5}]},
        "spec.placement.tolerations[0]",
        "needs effect NoExecute",
    ),
    Bad(
        "toleration",
        {"placement.tolerations": [{}]},
        "spec.placement.tolerations[0]",
        "Equal needs key",
    ),
    Bad(
        "two-checkpoint-volumes",
        {"checkpoint": {"volume": {"claimName": "c"}, "volumeClaimTemplate": {"size": "1Gi"}}},
        "spec.checkpoint",
        "at most one of volume, volumeClaimTemplate, store",
    ),
    Bad(
        "claim-of-one-node",
        {
            "placement.nodes": 2,
            "checkpoint.volumeClaimTemplate": {"size": "1Gi", "accessMode": "ReadWriteOnce"},
        },
        "spec",
        "set checkpoint.volumeClaimTemplate.accessMode to ReadWriteMany",
    ),
    Bad(
        "claim-without-size",
        {"checkpoint.volumeClaimTemplate": {}},
        "spec.checkpoint.volumeClaimTemplate",
        "Required",
    ),
    Bad(
        "lost-model",
        {"export": REMOVE},
        "spec",
        "the trained model would be lost .* export.to None",
    ),
    Bad("export-to-no-volume", {"export.to": "Volume"}, "spec", "set checkpoint.volume"),
    Bad("export-to-no-store", {"export.to": "ObjectStore"}, "spec", "set checkpoint.store"),
    Bad("export-to-the-moon", {"export.to": "Moon"}, "spec.export.to", "Volume"),
    Bad("export-to-nothing", {"export": {}}, "spec.export.to", "Required"),
    Bad(
        "bad-claim-name",
        {"checkpoint.volume": {"claimName": "My_Claim"}},
        "spec.checkpoint.volume.claimName",
        "match",
    ),
    Bad(
        "sub-path-outside",
        {"checkpoint.volume": {"claimName": "c", "subPath": "../x"}},
        "spec.checkpoint.volume",
        "inside the volume",
    ),
    Bad("image-with-space", {"image": "my image"}, "spec.image", "match"),
    Bad("manager-without-domain", {"managedBy": "dispatcher"}, "spec.managedBy", "match"),
    Bad("manager-in-capitals", {"managedBy": "Example.com/dispatcher"}, "spec.managedBy", "match"),
    Bad("long-manager", {"managedBy": f"example.com/{'x' * 60}"}, "spec.managedBy", "63"),
    Bad(
        "zero-temperature",
        {"training.temperature": 0},
        "spec.training.temperature",
        "greater than 0",
    ),
    Bad(
        "long-pattern",
        {"rewards.0.format.pattern": "x" * 4097},
        "spec.rewards[0].format.pattern",
        "4096",
    ),
    *(
        Bad(*sample)
        for sample in (
            *BAD_CONTAINERS,
            *BAD_PODS,
            *BAD_RUNNING,
            *BAD_GENERATION,
            *BAD_TRAINING,
        )
    ),
)
"""Specs that must be rejected."""
