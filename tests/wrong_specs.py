"""What a person should write instead of 60 of the wrong specs of `samples.BAD`.

golden/recorded/refusals/corrections.json has the sentence that `grpo plan` gives beside it, so that
somebody who reads the difference sees whether the sentence leads there. The API server's sentences
are held to the same specs by integration/test_bad_specs.py.
"""

from typing import Any

from tests.samples import REMOVE

CORRECTIONS: dict[str, dict[str, Any]] = {
    # a name or a shape
    "unknown-field": {"modell": REMOVE},
    "unknown-nested-field": {"training.learning_rate": REMOVE, "training.learningRate": 1e-6},
    "list-for-variables": {"model.chatTemplateKwargs": {"enable_thinking": False}},
    "no-model": {"model": {"name": "Qwen/Qwen2.5-0.5B-Instruct"}},
    "no-dataset": {"dataset": {"name": "openai/gsm8k"}},
    "no-rewards": {"rewards": [{"accuracy": {}}]},
    "empty-rewards": {"rewards": [{"accuracy": {}}]},
    "text-for-list": {"rewards": [{"accuracy": {}}]},
    "text-for-number": {"training.beta": 0.04},
    "quoted-integer": {"training.numGenerations": 4},
    "number-for-text": {"model.name": "7"},
    "fraction-of-a-group": {"training.numGenerations": 2},
    "text-for-boolean": {"suspend": True},
    "token-without-key": {"model.tokenSecretRef.key": "token"},
    "text-for-kwargs": {"generation.kwargs": REMOVE},
    "old-overrides": {"podOverrides": REMOVE},
    # a limit
    "negative-beta": {"training.beta": 0},
    "zero-learning-rate": {"training.learningRate": 1e-6},
    "group-of-one": {"training.numGenerations": 2},
    "zero-prompts": {"training.promptsPerStep": 1},
    "huge-completion": {"training.maxCompletionLength": 1048576},
    "negative-retry": {"retry": 0},
    "zero-gpus": {"placement.gpus.min": 1},
    "zero-temperature": {"training.temperature": 0.1},
    "all-of-the-memory": {"generation.memoryShare": 0.9},
    # one of several words
    "wrong-strategy": {"reference.strategy": "Clone"},
    "wrong-loss": {"training.lossType": "grpo"},
    "wrong-accelerator": {"placement.accelerator": "CPU"},
    "wrong-engine": {"generation.engine": "Colocated"},
    "export-to-the-moon": {"export.to": "None"},
    "schedule-by-metric": {"training.lrSchedulerType": "cosine"},
    "three-gpus-for-an-engine": {"generation.tensorParallel": 4},
    # a text of a certain form
    "small-letter-parameters": {"model.parameters": "7B"},
    "parameters-as-number": {"model.parameters": "1240000000"},
    "memory-in-words": {"placement.gpuMemory": "16G"},
    "bytes-in-GB": {"sharedMemory": "100G"},
    "memory-with-a-space": {"resources.limits.memory": "16Gi"},
    "function-with-a-dot": {"rewards.0.python.function": "my_reward:digits"},
    "url-without-scheme": {"rewards.0.http.url": "http://judge:80"},
    "store-by-http": {"checkpoint.store.url": "s3://bucket/runs", "export": REMOVE},
    "repository-without-namespace": {"export.hub.repository": "team/out"},
    "unicode-reward-name": {"rewards.0.name": "size"},
    "bad-claim-name": {"checkpoint.volume.claimName": "my-claim"},
    "bad-label-value": {"placement.nodeSelector.pool": "a-b"},
    "image-with-space": {"image": "my-image"},
    "model-name-with-space": {"model.name": "my-model"},
    # fields that go together
    "two-rewards-in-one": {"rewards.0.accuracy": REMOVE},
    "same-reward-names": {"rewards.1.name": "b"},
    "two-datasets": {"dataset.files": REMOVE},
    "batch-does-not-divide": {"training.perDeviceTrainBatchSize": 8},
    "half-a-step": {"training.generationBatchSize": 64},
    "clip-range-upside-down": {"training.epsilonHigh": 0.28},
    "beta-without-reference": {"training.beta": 0},
    "kl-limit-without-kl": {"training.beta": 0.04},
    "adapter-forbidden": {"adapter.use": "IfNeeded"},
    "max-below-min": {"placement.gpus.max": 4},
    "gpus-on-cpu": {"placement.gpus": REMOVE},
    "gpus-as-resource": {"resources.limits": {}},
    "lost-model": {"checkpoint.volumeClaimTemplate": {"size": "50Gi"}},
    "override-of-a-field-of-the-spec": {"training.overrides": REMOVE, "training.beta": 0.1},
}
