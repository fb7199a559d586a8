"""The floor of a burst: a script that does the operator's writes and watches, and decides nothing.

For each attempt it writes the statuses that the operator wrote for a sample, its Job, and one
event; the last status and the event once all pods run, as the operator does. A preflight's Job it
makes before, and waits for the end of its pod. It watches the kinds that change while gangs start.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from benchmarks.bench_cluster import NAMESPACE
from benchmarks.burst_kinds import Kind, Sample, ours, unseen
from grpo_api.text.contract import API_VERSION, GROUP, KIND
from grpo_kube.client import Client
from grpo_kube.objects.errors import Conflict
from grpo_kube.objects.resources import BOUND_PODS, EVENTS, JOBS, PODS, Selection
from grpo_operator.records.names import (
    COMPONENT_PREFLIGHT,
    GRPOJOBS,
    LABEL_COMPONENT,
    LABEL_JOB,
)

SCRIPT = f"bench.{GROUP}/script"
"""Who manages the GRPOJobs that the operator is to leave alone."""
LABEL, COMPONENT = unseen(LABEL_JOB), unseen(LABEL_COMPONENT)
WATCHED = (Selection(GRPOJOBS), Selection(JOBS, labels=LABEL), Selection(PODS, fields=BOUND_PODS))
"""What the operator watches of a burst beside the pods of its jobs."""


class Floor:
    """The script, and which pods of each Job it has seen running."""

    def __init__(self, sample: Sample) -> None:
        """Of what the operator wrote for the sample."""
        self._sample = sample
        self._running: dict[str, set[str]] = {}
        self._checked: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    @asynccontextmanager
    async def watching(self, client: Client) -> AsyncIterator[None]:
        """Watches, and tells of each gang that runs."""
        async with asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(_hear(client, selection)) for selection in WATCHED]
            watches.append(tasks.create_task(self._follow(client, tasks)))
            yield
            for watch in watches:
                watch.cancel()

    async def create(self, client: Client, name: str, mark: str, attempt: int) -> None:
        """The GRPOJob, the statuses that come before the attempt's Job, and that."""
        if attempt == 1:
            body = ours(name, self._sample.pods, mark, gpus=self._sample.gpus)
            body["spec"]["managedBy"] = SCRIPT
            await client.create(GRPOJOBS, NAMESPACE, body)
        statuses = list(self._sample.statuses[attempt][:-1])
        if attempt == 1 and self._sample.preflight:
            check = self._sample.preflight_job(name, mark)
            await client.create(JOBS, NAMESPACE, check)
            first = {"status": statuses.pop(0)}
            await client.patch(GRPOJOBS, NAMESPACE, name, first, "status")
            await self._checked[name].wait()
            await _delete_job(client, check["metadata"]["name"])
        for status in statuses:
            made = (await client.patch(GRPOJOBS, NAMESPACE, name, {"status": status}, "status"))[
                "metadata"
            ]
        owner = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": name,
            "uid": made["uid"],
            "controller": True,
        }
        job = self._sample.job(name, mark, attempt)
        job["metadata"]["ownerReferences"] = [owner]
        await client.create(JOBS, NAMESPACE, job)

    async def _follow(self, client: Client, tasks: asyncio.TaskGroup) -> None:
        """Tells of each gang when the last of its pods runs."""
        async for _, pod in client.watch(Selection(PODS, labels=LABEL), 0, 600):
            labels = pod["metadata"].get("labels", {})
            if labels.get(COMPONENT) == COMPONENT_PREFLIGHT:
                if pod.get("status", {}).get("phase") == "Succeeded":
                    self._checked[pod["metadata"]["name"].rsplit("-", 2)[0]].set()
                continue
            if LABEL not in labels or pod.get("status", {}).get("phase") != "Running":
                continue
            job = pod["metadata"]["name"].rsplit("-", 2)[0]
            known = self._running.setdefault(job, set())
            if len(known) == self._sample.pods or pod["metadata"].get("deletionTimestamp"):
                continue
            known.add(pod["metadata"]["name"])
            if len(known) == self._sample.pods:
                tasks.create_task(self._tell(client, *job.rsplit("-", 1)))

    async def _tell(self, client: Client, name: str, attempt: str) -> None:
        """The status that says that a gang runs, and the event of it."""
        number = int(attempt)
        status = {"status": self._sample.statuses[number][-1]}
        await client.patch(GRPOJOBS, NAMESPACE, name, status, "status")
        event = dict(self._sample.event)
        event["metadata"] = {"name": f"{name}.{number}", "namespace": NAMESPACE}
        event["involvedObject"] = event["involvedObject"] | {"name": name}
        await client.create(EVENTS, NAMESPACE, event)


class _Seen(NamedTuple):
    """An object as it was read."""

    uid: str
    version: int


async def _delete_job(client: Client, name: str) -> None:
    """Deletes a Job and its pods as the operator does: as it is known, and again where the Job
    controller has changed it meanwhile."""
    while True:
        made = (await client.get(JOBS, NAMESPACE, name))["metadata"]
        seen = _Seen(made["uid"], int(made["resourceVersion"]))
        with suppress(Conflict):
            return await client.delete(JOBS, NAMESPACE, name, seen)


async def _hear(client: Client, selection: Selection) -> None:
    """Reads all events of a selection."""
    async for _ in client.watch(selection, 0, 600):
        pass


def kinds(one: Sample) -> tuple[Kind, ...]:
    """All ways to get the sample's pods, from the cheapest on."""
    floor = Floor(one)
    return (
        Kind("bare", one.create_bare),
        Kind("same pods", one.create_same),
        Kind("floor", floor.create, beside=floor.watching),
        Kind("GRPOJob", one.create_operated, operated=True),
    )
