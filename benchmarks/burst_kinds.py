"""Ways to create the pods of a burst: GRPOJobs, and the objects that they are compared with.

A bare Job with nothing but a container says what Kubernetes costs. One with the pods that a GRPOJob
has says what our pods cost, and the floor (burst_floor.py) what our writes and watches cost. The
operator's part is what is left. When gangs fail, a script does for the others what the operator
does for GRPOJobs: it makes the next attempt's Job.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from benchmarks.bench_cluster import NAMESPACE, each
from grpo_api.text.contract import API_VERSION, GROUP, KIND
from grpo_kube.client import Client
from grpo_kube.objects.errors import NotFound
from grpo_kube.objects.resources import EVENTS, JOBS, PODS, Object, Selection
from grpo_operator.records.names import (
    COMPONENT_PREFLIGHT,
    GRPOJOBS,
    LABEL_COMPONENT,
    preflight_name,
)
from grpo_operator.records.reasons import Reason

ROUND = f"bench.{GROUP}/round"


def ending(exit_code: int, **more: str) -> Object:
    """What ends a pod of a kwok node at once (kwok.yaml says what more there is)."""
    notes = {"after": "0s", "exit-code": str(exit_code), **more}
    return {
        "metadata": {"annotations": {f"kwok.test/{name}": text for name, text in notes.items()}}
    }


FAILS = ending(1, message='{"result": "Error"}')
"""An error of the trainer."""
CHECKED = ending(0, message="{}")
"""The empty report of a preflight that has found nothing."""
SERVER_SIDE = (
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "generation",
    "managedFields",
    "ownerReferences",
)
CONTROLLER_LABELS = {
    f"{prefix}{name}"
    for prefix in ("", "batch.kubernetes.io/")
    for name in ("job-name", "controller-uid")
}

Create = Callable[[Client, str, str, int], Awaitable[object]]
"""Makes what leads to pods with a mark, by a client, under a name; the mark comes third, then the
attempt's number."""


@dataclass
class Kind:
    """One way to get pods, and what was measured of it."""

    name: str
    create: Create
    _: KW_ONLY
    operated: bool = False
    """Whether the operator sees to it, and its CPU time is part of it."""
    beside: Callable[[Client], AbstractAsyncContextManager[object]] = nullcontext
    """What runs in each round beside what creates, by a client."""
    walls: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    """CPU seconds of each round, by who used them."""

    @property
    def cpus(self) -> list[float]:
        """CPU seconds of each round."""
        return [sum(used.values()) for used in self.parts]


def bare(name: str, pods: int, mark: str) -> Object:
    """An Indexed Job with nothing but a container."""
    template = {
        "metadata": {"labels": {ROUND: mark}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "none"}]},
    }
    shape = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": 0,
    }
    return _object("batch/v1", "Job", name, {**shape, "template": template})


def ours(name: str, pods: int, mark: str, *, gpus: bool = False) -> Object:
    """A small GRPOJob on CPUs, or with one GPU in each of its pods."""
    wanted = {"min": pods, "max": pods}
    place: dict[str, Any] = (
        {"accelerator": "GPU", "gpus": wanted} if gpus else {"accelerator": "CPU"}
    )
    limits = {} if gpus else {"limits": {"memory": "64Mi"}}
    spec = {
        "model": {"name": "/models/tiny", "parameters": "77K"},
        "dataset": {"name": "openai/gsm8k", "config": "main"},
        "rewards": [{"format": {"pattern": "<answer>.*</answer>"}}, {"accuracy": {"score": 2.0}}],
        "placement": {**place, "nodes": pods},
        "export": {"to": "None"},
        "resources": {"requests": {"cpu": "100m"}, **limits},
        "podTemplate": {"metadata": {"labels": {ROUND: mark}}},
    }
    return grpojob(name, spec)


def grpojob(name: str, spec: Object) -> Object:
    """A GRPOJob of this spec."""
    return _object(API_VERSION, KIND, name, spec)


def _object(api_version: str, kind: str, name: str, spec: Object) -> Object:
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


@dataclass(frozen=True)
class Sample:
    """What the operator wrote for one GRPOJob: by attempt its Job and its statuses, and the event
    of a start."""

    jobs: Mapping[int, Object]
    statuses: Mapping[int, Sequence[Object]]
    """The last says that the attempt runs; those before came before its Job."""
    event: Object
    pods: int
    gpus: bool
    preflight: Object | None = None
    """The Job that checked it before its first attempt, where one did."""

    async def create_bare(self, client: Client, name: str, mark: str, attempt: int) -> None:
        """As many pods with nothing in them."""
        await client.create(JOBS, NAMESPACE, bare(f"{name}-{attempt}", self.pods, mark))

    async def create_operated(self, client: Client, name: str, mark: str, attempt: int) -> None:
        """A GRPOJob, of which the operator makes the rest."""
        if attempt == 1:
            await client.create(GRPOJOBS, NAMESPACE, ours(name, self.pods, mark, gpus=self.gpus))

    async def create_same(self, client: Client, name: str, mark: str, attempt: int) -> None:
        """The attempt's Job by itself, and before the first that of the preflight."""
        if attempt == 1 and self.preflight:
            await client.create(JOBS, NAMESPACE, self.preflight_job(name, mark))
        await client.create(JOBS, NAMESPACE, self.job(name, mark, attempt))

    def job(self, name: str, mark: str, attempt: int) -> Object:
        """The same bytes, by names that the operator doesn't look at."""
        return self._renamed(self.jobs[attempt], f"{name}-{attempt}", mark)

    def preflight_job(self, name: str, mark: str) -> Object:
        """The same of the preflight's Job."""
        assert self.preflight is not None, "it was asked for"
        return self._renamed(self.preflight, preflight_name(name), mark)

    def _renamed(self, written: Object, name: str, mark: str) -> Object:
        job = copy.deepcopy(written)
        template = job["spec"]["template"]["metadata"]
        job["metadata"]["name"] = name
        job["metadata"]["labels"] = _unseen(job["metadata"].get("labels", {}))
        template["labels"] = _unseen(template["labels"]) | {ROUND: mark}
        return job


def unseen(label: str) -> str:
    """What one of our labels is called on an object that the operator is not to look at."""
    return label.replace(f"{GROUP}/", f"unseen.{GROUP}/")


def _unseen(labels: Mapping[str, str]) -> dict[str, str]:
    return {unseen(name): value for name, value in labels.items() if name not in CONTROLLER_LABELS}


async def sample(client: Client, pods: int, *, gpus: bool, preflight: bool = False) -> Sample:
    """Has the operator run one GRPOJob, and again after all of its pods have failed, and takes what
    it wrote. With `preflight` it checks the job before that."""
    name, mark = ("sample-gpu" if gpus else "sample"), "sample"
    made = await client.create(GRPOJOBS, NAMESPACE, ours(name, pods, mark, gpus=gpus))
    jobs, statuses = {}, {}
    version = int(made["metadata"]["resourceVersion"])
    check = await _preflight_of(client, name, version) if preflight else None
    for attempt in (1, 2):
        statuses[attempt], version = await _written(client, name, attempt, version)
        jobs[attempt] = _as_written(await client.get(JOBS, NAMESPACE, f"{name}-{attempt}"))
        if attempt == 1:
            await fail(client, mark)
    return Sample(jobs, statuses, await _told(client, name), pods, gpus, check)


def _as_written(job: Object) -> Object:
    """A Job as it was created."""
    for one in SERVER_SIDE:
        job["metadata"].pop(one, None)
    job.pop("status", None)
    job["spec"].pop("selector", None)
    return job


async def _preflight_of(client: Client, name: str, version: int) -> Object:
    """The Job of a GRPOJob's preflight, which the operator deletes once it has ended."""
    about = Selection(JOBS, NAMESPACE, fields=f"metadata.name={preflight_name(name)}")
    async for _, job in client.watch(about, version, 60):
        if "name" in job["metadata"]:
            return _as_written(job)
    raise RuntimeError("the sample has no preflight")


@asynccontextmanager
async def passing_preflights(client: Client) -> AsyncIterator[None]:
    """Ends the pods of all preflights as soon as they run, as if they had found nothing."""

    async def end(label: str) -> None:
        about = Selection(PODS, NAMESPACE, f"{label}={COMPONENT_PREFLIGHT}")
        ended: set[str] = set()
        while True:
            async for _, pod in client.watch(about, 0, 600):
                name = pod["metadata"].get("name", "")
                if pod.get("status", {}).get("phase") == "Running" and name not in ended:
                    ended.add(name)
                    with suppress(NotFound):
                        await client.patch(PODS, NAMESPACE, name, CHECKED)

    async with asyncio.TaskGroup() as tasks:
        labels = (LABEL_COMPONENT, unseen(LABEL_COMPONENT))
        watches = [tasks.create_task(end(label)) for label in labels]
        yield
        for watch in watches:
            watch.cancel()


async def _written(
    client: Client, name: str, attempt: int, version: int
) -> tuple[list[Object], int]:
    """Each status that was written to a GRPOJob after a version of it until this attempt runs, and
    the last version."""
    found: list[Object] = []
    async for _, item in client.watch(
        Selection(GRPOJOBS, NAMESPACE, fields=f"metadata.name={name}"), version, 60
    ):
        if "name" not in item["metadata"]:
            continue
        version, status = int(item["metadata"]["resourceVersion"]), item.get("status", {})
        found.append(status)
        if (status.get("phase"), status.get("attempt")) == ("Running", attempt):
            break
        for one in status.get("conditions", ()):
            if (one["type"], one["status"]) == ("Planned", "False"):
                raise RuntimeError(f"the sample has no plan: {one['message']}")
    return found, version


async def _told(client: Client, name: str) -> Object:
    """The event of a start."""
    about = Selection(
        EVENTS, NAMESPACE, fields=f"involvedObject.name={name},reason={Reason.ALL_PODS_RUNNING}"
    )
    while True:
        async for found, _ in client.pages(about):
            if found:
                return found[0]
        await asyncio.sleep(0.1)


async def fail(client: Client, mark: str) -> None:
    """Ends all pods of a mark with an error, at once."""

    async def end(pod: Object) -> None:
        await client.patch(PODS, NAMESPACE, pod["metadata"]["name"], FAILS)

    async for pods, _ in client.pages(Selection(PODS, NAMESPACE, f"{ROUND}={mark}")):
        await each(pods, end)
