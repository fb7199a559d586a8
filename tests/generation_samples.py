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
    "any-engine": {
        "generation": {"memoryShare": 0.5, "servers": {"replicas": 4}, "maxModelLength": 16}
    },
}
"""Changes that must be accepted."""

BAD_GENERATION: tuple[tuple[str, Changes, str, str], ...] = (
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
        "memoryShare and sleep belong to engine Colocated or Auto",
    ),
    (
        "share-of-servers",
        {"generation": {"engine": "Servers", "memoryShare": 0.5}},
        "spec.generation",
        "memoryShare and sleep belong to engine Colocated or Auto",
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
