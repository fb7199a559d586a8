"""Ways to get the pods of a burst: GRPOJobs, and what they are held to.

A bare Job with nothing but a container says what Kubernetes costs. One with the pods that a GRPOJob has says what our
pods cost, and the floor what our objects cost: a GRPOJob, one write of its status and its Job, made by a script. The
operator's part is what is left.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from grpo_api.contract import API_VERSION, GROUP, KIND
from grpo_operator.cluster.api import GRPOJOBS, JOBS, Object
from grpo_operator.cluster.client import HttpCluster

NAMESPACE = "default"
ROUND = f"bench.{GROUP}/round"
SCRIPT = f"bench.{GROUP}/script"
"""Who manages the GRPOJobs that the operator is to leave alone."""
SERVER_SIDE = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "ownerReferences")
CONTROLLER_LABELS = {
    f"{prefix}{name}" for prefix in ("", "batch.kubernetes.io/") for name in ("job-name", "controller-uid")
}

Create = Callable[[HttpCluster, str, str], Awaitable[object]]
"""Makes what leads to pods with a mark, by a client, under a name; the mark comes last."""


@dataclass
class Kind:
    """One way to get pods, and what was measured of it."""

    name: str
    create: Create
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    _: KW_ONLY
    operated: bool = False
    """Whether the operator's CPU time is part of it."""
    parts: list[dict[str, float]] = field(default_factory=list)


def bare(name: str, pods: int, mark: str) -> Object:
    """An Indexed Job with nothing but a container."""
    template = {
        "metadata": {"labels": {ROUND: mark}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "none"}]},
    }
    shape = {"completionMode": "Indexed", "completions": pods, "parallelism": pods, "backoffLimit": 0}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {**shape, "template": template}}


def ours(name: str, pods: int, mark: str, *, gpus: bool = False) -> Object:
    """A small GRPOJob on CPUs, or with one GPU in each of its pods."""
    wanted = {"min": pods, "max": pods}
    place: dict[str, Any] = {"accelerator": "GPU", "gpus": wanted} if gpus else {"accelerator": "CPU"}
    spec = {
        "model": {"name": "/models/tiny", "parameters": "77K"},
        "dataset": {"name": "openai/gsm8k", "config": "main"},
        "rewards": [{"format": {"pattern": "<answer>.*</answer>"}}, {"accuracy": {"score": 2.0}}],
        "placement": {**place, "nodes": pods},
        "export": {"to": "None"},
        "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi"}},
        "podTemplate": {"metadata": {"labels": {ROUND: mark}}},
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


@dataclass(frozen=True)
class Sample:
    """What the operator made of one GRPOJob: the Job of its attempt, and its status once that ran."""

    job: Object
    status: Object
    pods: int
    gpus: bool

    async def create_bare(self, client: HttpCluster, name: str, mark: str) -> None:
        """As many pods with nothing in them."""
        await client.create(JOBS, NAMESPACE, bare(name, self.pods, mark))

    async def create_operated(self, client: HttpCluster, name: str, mark: str) -> None:
        """A GRPOJob, of which the operator makes the rest."""
        await client.create(GRPOJOBS, NAMESPACE, ours(name, self.pods, mark, gpus=self.gpus))

    async def create_same(self, client: HttpCluster, name: str, mark: str) -> None:
        """The attempt's Job by itself."""
        await client.create(JOBS, NAMESPACE, self._job(name, mark))

    async def create_floor(self, client: HttpCluster, name: str, mark: str) -> None:
        """The GRPOJob, one write of all that its status said, and the attempt's Job."""
        body = ours(name, self.pods, mark, gpus=self.gpus)
        body["spec"]["managedBy"] = SCRIPT
        made = (await client.create(GRPOJOBS, NAMESPACE, body))["metadata"]
        version = {"resourceVersion": made["resourceVersion"]}
        await client.patch_status(NAMESPACE, name, {"metadata": version, "status": self.status})
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": made["uid"], "controller": True}
        job = self._job(name, mark)
        job["metadata"]["ownerReferences"] = [owner]
        await client.create(JOBS, NAMESPACE, job)

    def _job(self, name: str, mark: str) -> Object:
        """The same bytes, by names that the operator doesn't look at."""
        job = copy.deepcopy(self.job)
        template = job["spec"]["template"]["metadata"]
        job["metadata"]["name"] = f"{name}-1"
        job["metadata"]["labels"] = _unseen(job["metadata"].get("labels", {}))
        template["labels"] = _unseen(template["labels"]) | {ROUND: mark}
        return job


def _unseen(labels: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in labels.items() if name not in CONTROLLER_LABELS}
    return {name.replace(f"{GROUP}/", f"unseen.{GROUP}/"): value for name, value in own.items()}


async def sample(client: HttpCluster, pods: int, *, gpus: bool) -> Sample:
    """Has the operator run one GRPOJob, and takes what it wrote."""
    name = "sample-gpu" if gpus else "sample"
    await client.create(GRPOJOBS, NAMESPACE, ours(name, pods, "sample", gpus=gpus))
    while True:
        found = await client.get(GRPOJOBS, NAMESPACE, name)
        if found.get("status", {}).get("phase") == "Running":
            break
        await asyncio.sleep(0.1)
    job = await client.get(JOBS, NAMESPACE, f"{name}-1")
    for one in SERVER_SIDE:
        job["metadata"].pop(one, None)
    job.pop("status", None)
    job["spec"].pop("selector", None)
    return Sample(job, found["status"], pods, gpus)


def kinds(one: Sample) -> tuple[Kind, ...]:
    """All ways to get the sample's pods, from the cheapest on."""
    return (
        Kind("bare", one.create_bare),
        Kind("same pods", one.create_same),
        Kind("floor", one.create_floor),
        Kind("GRPOJob", one.create_operated, operated=True),
    )
