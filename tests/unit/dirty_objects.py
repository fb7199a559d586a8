"""Real-looking API objects, and strategies that put anything into any of their fields.

What an API server would refuse is generated too: a newer server, a proxy or a bug may let it
through.
"""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.unit.operator_world import GPU_PLAN, KEY, SPEC, UID, active_status, at, said

LABELS = {
    "grpo.dev/job-name": KEY.name,
    "grpo.dev/job-uid": UID,
    "grpo.dev/attempt": "1",
    "batch.kubernetes.io/job-completion-index": "0",
}
META: dict[str, Any] = {
    "namespace": KEY.namespace,
    "name": "run-1",
    "uid": "job-1",
    "resourceVersion": "11",
    "generation": 2,
    "creationTimestamp": at(-100),
    "labels": LABELS,
    "annotations": {"note": "any"},
    "ownerReferences": [{"controller": True, "uid": UID, "kind": "GRPOJob"}],
}
TERMINATED = {
    "exitCode": 1,
    "reason": "Error",
    "message": said("OutOfMemory", step=3),
    "finishedAt": at(-5),
}
POD: dict[str, Any] = {
    "metadata": META | {
        "name": "run-1-0-abcde",
        "uid": "pod-1-0",
        "deletionTimestamp": at(20),
        "deletionGracePeriodSeconds": 30,
        "ownerReferences": [{"controller": True, "uid": "job-1", "kind": "Job"}],
    },
    "spec": {"nodeName": "node-0", "containers": [{"resources": {"requests": {"cpu": "1",
    "nvidia.com/gpu": "4"}}}]},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "reason": "Evicted",
        "message": "the node was low on memory",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"},
            {"type": "Ready", "status": "False"},
            {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
        ],
        "containerStatuses": [{"name": "trainer", "state": {"terminated": TERMINATED,
        "waiting": {"reason": "x"}}}],
    },
}  # fmt: skip
ALIVE = {key: value for key, value in POD["metadata"].items() if not key.startswith("deletion")}
PENDING: dict[str, Any] = {
    "metadata": ALIVE,
    "spec": {},
    "status": {"phase": "Pending", "conditions": POD["status"]["conditions"][:1]},
}
STUCK: dict[str, Any] = {
    "metadata": ALIVE,
    "spec": {"nodeName": "node-0"},
    "status": {
        "phase": "Pending",
        "containerStatuses": [
            {
                "name": "trainer",
                "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            }
        ],
    },
}
JOB: dict[str, Any] = {
    "metadata": META,
    "spec": {"suspend": False},
    "status": {
        "conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]
    },
}
RUNNING_JOB: dict[str, Any] = {"metadata": META, "spec": {}, "status": {}}
GRPOJOB: dict[str, Any] = {
    "metadata": {**META, "name": KEY.name, "uid": UID, "ownerReferences": []},
    "spec": {**SPEC, "managedBy": "grpo.dev/operator"},
    "status": active_status(
        plan=GPU_PLAN, phase="Running", jobUid="job-1", progress={"step": 3, "totalSteps": 9,
        "percent": 33},
        metrics={"kl": "0.1"}, outcome={"result": "Hang", "step": 2}, restarts=1,
        checkpoint={"step": 2, "time": at(-9), "bytes": 9, "where": "pvc://a/b"},
        export={"to": "Volume", "path": "pvc://a/b", "format": "Model", "bytes": 9,
                "weightsHash": f"sha256:{'0' * 64}"},
        pods=[{"name": "run-1-0-abcde", "index": 0, "phase": "Running"}],
    ),
}  # fmt: skip
NODE: dict[str, Any] = {
    "metadata": {
        "name": "node-0",
        "labels": {"nvidia.com/gpu.product": "H100", "nvidia.com/gpu.memory": "81559"},
    },
    "spec": {
        "unschedulable": False,
        "taints": [{"key": "a", "value": "b", "effect": "NoSchedule"}],
    },
    "status": {
        "allocatable": {"cpu": "8", "nvidia.com/gpu": "4"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}
SERVICE: dict[str, Any] = {"metadata": META, "spec": {"clusterIP": "None"}}

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40)
VALUES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=9), below, max_size=3)
    ),
    max_leaves=5,
)
EXTREMES: tuple[Any, ...] = (
    "", "abc", "-1", "²", "٣", "9" * 30, "1e3", "NaN", "Draining", 2**63, -(2**63) - 1, 10**400,
    float("inf"), {}, [],
    [0], None, True, "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-11-21T12:00:00",
    "2026-02-30T00:00:00Z",
    "x" * 40_000,
)  # fmt: skip


def places(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value below an object."""
    pairs = (
        item.items()
        if isinstance(item, dict)
        else enumerate(item)
        if isinstance(item, list)
        else ()
    )
    for key, value in pairs:
        yield (*path, key)
        yield from places(value, (*path, key))


@st.composite
def dirty(draw: st.DrawFn, base: Any) -> Any:
    """An object in which one to three values were replaced or removed."""
    item = copy.deepcopy(base)
    for path in draw(
        st.lists(st.sampled_from(sorted(places(base), key=repr)), min_size=1, max_size=3)
    ):
        place = item
        for key in path[:-1]:
            place = place[key] if _has(place, key) else {}
        if not _has(place, path[-1]):
            continue
        if isinstance(place, dict) and draw(st.integers(0, 5)) == 0:
            del place[path[-1]]
        else:
            place[path[-1]] = draw(st.sampled_from(EXTREMES) | VALUES)
    return item


def _has(place: Any, key: Any) -> bool:
    if isinstance(place, dict):
        return key in place
    return isinstance(place, list) and isinstance(key, int) and key < len(place)
