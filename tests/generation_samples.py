"""What users may and may not say about the engine that samples the completions.

Part of tests/samples.py, in its notation: changes of its SPEC, and for each bad one the path and
what is said.
"""

from typing import Any

Changes = dict[str, Any]

GOOD_GENERATION: dict[str, Changes] = {
    "transformers": {"generation.engine": "Transformers"},
    "colocated-engine": {
        "generation": {
            "engine": "Colocated",
            "memoryShare": 0.3,
            "sleep": True,
            "tensorParallel": 2,
            "sequencesAtATime": 96,
            "maxModelLength": 2048,
            "engineArguments": {"enforceEager": True, "blockSize": 16, "kvCacheDtype": "fp8"},
        },
        "guard.maxEngineMismatch": 0.5,
    },
    "engines-of-their-own": {
        "generation": {
            "engine": "Servers",
            "servers": {
                "replicas": 2,
                "gpusPerReplica": 4,
                "gpuProduct": "NVIDIA-L4",
                "resources": {"requests": {"cpu": "4", "memory": "64Gi"}},
            },
            "engineArguments": {"maxNumSeqs": 256},
        },
        "guard.weightSyncTimeoutSeconds": 60,
    },
    "stop-strings": {"generation.stop": ["</answer>", "\n\nQuestion:"]},
    "arguments-of-transformers": {
        "generation": {
            "engine": "Transformers",
            "kwargs": {
                "typical_p": 0.9,
                "min_new_tokens": 8,
                "suppress_tokens": [7, 9],
                "sequence_bias": [[[3, 4], -1.5]],
                "renormalize_logits": True,
            },
        }
    },
    "arguments-of-vllm": {
        "generation": {
            "engine": "Colocated",
            "fallback": "Never",
            "kwargs": {"presence_penalty": 0.5, "bad_words": ["sorry"], "min_tokens": 8},
        }
    },
    "any-engine": {
        "generation": {"memoryShare": 0.5, "servers": {"replicas": 4}, "maxModelLength": 16}
    },
}
"""Changes that must be accepted."""

BAD_GENERATION: tuple[tuple[str, Changes, str, str], ...] = (
    (
        "arguments-of-no-engine",
        {"generation.kwargs": {"typical_p": 0.9}},
        "spec.generation",
        "kwargs are arguments of one engine",
    ),
    (
        "arguments-that-a-fallback-lacks",
        {"generation": {"engine": "Colocated", "kwargs": {"min_tokens": 8}}},
        "spec.generation",
        "fallback to Never",
    ),
    ("empty-stop", {"generation.stop": [""]}, "spec.generation.stop", "at least 1"),
    ("no-stop", {"generation.stop": []}, "spec.generation.stop", "at least 1"),
    ("many-stops", {"generation.stop": ["a"] * 17}, "spec.generation.stop", "at most 16"),
    ("text-for-kwargs", {"generation.kwargs": "a=1"}, "spec.generation.kwargs", "object"),
    ("wrong-engine", {"generation.engine": "vLLM"}, "spec.generation.engine", "Colocated"),
    (
        "servers-without-servers",
        {"generation": {"engine": "Colocated", "servers": {}}},
        "spec.generation",
        "servers belongs to engine Servers or Auto",
    ),
    (
        "servers-that-sleep",
        {"generation": {"engine": "Servers", "sleep": True}},
        "spec.generation",
        "memoryShare, sleep and tensorParallel belong to engine Colocated or Auto",
    ),
    (
        "servers-with-tensor-parallel",
        {"generation": {"engine": "Servers", "tensorParallel": 2}},
        "spec.generation",
        "servers.gpusPerReplica",
    ),
    (
        "three-gpus-for-an-engine",
        {"generation.tensorParallel": 3},
        "spec.generation.tensorParallel",
        "1.*2.*4.*8.*16",
    ),
    (
        "nothing-at-a-time",
        {"generation.sequencesAtATime": 0},
        "spec.generation.sequencesAtATime",
        "greater than or equal",
    ),
    (
        "share-of-servers",
        {"generation": {"engine": "Servers", "memoryShare": 0.5}},
        "spec.generation",
        "memoryShare, sleep and tensorParallel belong to engine Colocated or Auto",
    ),
    (
        "arguments-of-no-engine",
        {"generation": {"engine": "Transformers", "engineArguments": {}}},
        "spec.generation",
        "maxModelLength and engineArguments are an engine's",
    ),
    (
        "all-of-the-memory",
        {"generation.memoryShare": 1},
        "spec.generation.memoryShare",
        "less than 1",
    ),
    (
        "no-replicas",
        {"generation.servers.replicas": 0},
        "spec.generation.servers.replicas",
        "greater than or equal",
    ),
    (
        "unknown-engine-argument",
        {"generation.engineArguments": {"trustRemoteCode": True}},
        "spec.generation.engineArguments.trustRemoteCode",
        "unknown field",
    ),
    (
        "odd-blocks",
        {"generation.engineArguments": {"blockSize": 7}},
        "spec.generation.engineArguments",
        "8",
    ),
    (
        "no-mismatch",
        {"guard.maxEngineMismatch": 0},
        "spec.guard.maxEngineMismatch",
        "greater than 0",
    ),
)
"""Changes that must be rejected: name, change, path, and a part of the message."""
