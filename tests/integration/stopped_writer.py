"""`python -m tests.integration.stopped_writer`: leads, then makes a write of every kind that the
operator makes.

Where the environment says so it stops itself before, as a node that stands still would, so that
others lead when it goes on. What became of each write is printed: first through the gate, then,
where that refused it, past it.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from grpo_api.text.contract import API_VERSION, KIND
from grpo_kube import transport
from grpo_kube.cache import version_of
from grpo_kube.client import Client
from grpo_kube.leader_election import Elector
from grpo_kube.objects.errors import ClusterError, NotLeading
from grpo_kube.objects.resources import CLAIMS, JOBS, NETWORK_POLICIES, PODS, SERVICES, Selection
from grpo_operator.process import settings
from grpo_operator.process.fence import record_leader
from grpo_operator.process.settings import Settings
from grpo_operator.records.names import GRPOJOBS, LABEL_MANAGED_BY, MANAGER
from harness.programs.processes import until

STOPS, GO = "STOPS", "GO"
"""Variables: stop before the writes, and wait for this file before them."""
TOLD = "write: "
"""What a line begins with that says what became of a write."""
OURS = {LABEL_MANAGED_BY: MANAGER}
SELECTOR = f"{LABEL_MANAGED_BY}={MANAGER}"
CONTAINERS = [{"name": "c", "image": "x"}]


class Looked:
    """An object as it is now."""

    def __init__(self, item: Any) -> None:
        self.uid, self.version = version_of(item)


def job_body(name: str) -> dict[str, Any]:
    """A Job of ours that starts no pod."""
    template = {
        "metadata": {"labels": OURS},
        "spec": {"restartPolicy": "Never", "containers": CONTAINERS},
    }
    return {
        "metadata": {"name": name, "labels": OURS},
        "spec": {"suspend": True, "template": template},
    }


async def writes(
    cluster: Client, namespace: str, tag: str
) -> dict[str, Callable[[], Awaitable[Any]]]:
    """A write of every kind, prepared by what is there now."""
    grpojob = await cluster.get(GRPOJOBS, namespace, "run")
    old = Looked(await cluster.get(JOBS, namespace, "old"))
    version = {"resourceVersion": grpojob["metadata"]["resourceVersion"]}
    status = {"metadata": version, "status": {"attempt": 1}}
    labelled = {"name": tag, "labels": OURS}
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    ports = [{"port": 80}]
    policy, retagged = (
        {"metadata": labelled, "spec": {"podSelector": {}}},
        {"metadata": {"labels": {"tag": tag}}},
    )
    gone = Looked(await cluster.get(GRPOJOBS, namespace, "gone"))
    return {
        "status": lambda: cluster.patch(GRPOJOBS, namespace, "run", status, "status"),
        "Job": lambda: cluster.create(JOBS, namespace, job_body(tag)),
        "claim": lambda: cluster.create(CLAIMS, namespace, {"metadata": labelled, "spec": claim}),
        "Service": lambda: cluster.create(
            SERVICES, namespace, {"metadata": labelled, "spec": {"ports": ports}}
        ),
        "mended Service": lambda: cluster.patch(SERVICES, namespace, "own", retagged),
        "NetworkPolicy": lambda: cluster.create(NETWORK_POLICIES, namespace, policy),
        "mended NetworkPolicy": lambda: cluster.patch(NETWORK_POLICIES, namespace, "own", retagged),
        "deletion of a Job": lambda: cluster.delete(JOBS, namespace, "old", old),
        "stopped pods": lambda: cluster.delete_all(Selection(PODS, namespace, SELECTOR)),
        "deletion of a GRPOJob": lambda: cluster.delete(GRPOJOBS, namespace, "gone", gone),
    }


async def outcome(write: Awaitable[Any]) -> str:
    """One word on what became of it."""
    try:
        await write
    except NotLeading:
        return "gate"
    except ClusterError as error:
        return f"{error.code} {error}"
    return "done"


async def main(chosen: Settings) -> None:
    """Leads, stops, writes."""
    assert chosen.election
    namespace, leading = chosen.election.lease.namespace, asyncio.Event()
    configuration = await transport.load(chosen.kubeconfig)
    async with Client(configuration, tries=1) as plain:
        elector = Elector(
            plain, chosen.election, leading, time.time, record_leader if chosen.fenced else None
        )
        standing = asyncio.create_task(elector.run())
        async with Client(configuration, gate=elector.answer_within, tries=1) as gated:
            await leading.wait()
            prepared = await writes(gated, namespace, chosen.election.identity)
            past = await writes(plain, namespace, chosen.election.identity)
            print("leads", flush=True)
            if os.environ.get(STOPS):
                os.kill(os.getpid(), signal.SIGSTOP)
            if go := os.environ.get(GO):
                await asyncio.to_thread(until, "the word to go on", Path(go).exists, 60)
            for kind, write in prepared.items():
                print(f"{TOLD}{kind}: {await outcome(write())}", flush=True)
                if os.environ.get(STOPS):
                    told = await outcome(past[kind]())
                    print(f"{TOLD}past the gate, {kind}: {told}", flush=True)
        standing.cancel()


def things(spec: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What must be there before, by path."""
    pod = {"nodeSelector": {"no": "node"}, "containers": CONTAINERS}
    named = {"name": "own", "labels": OURS}
    service = {"metadata": named, "spec": {"ports": [{"port": 80}]}}
    stays = {"apiVersion": API_VERSION, "kind": KIND, "spec": {**spec, "suspend": True}}
    return [
        *((GRPOJOBS.path("{}"), {**stays, "metadata": {"name": name}}) for name in ("run", "gone")),
        (JOBS.path("{}"), job_body("old")),
        (PODS.path("{}"), {"metadata": {"name": "left", "labels": OURS}, "spec": pod}),
        (SERVICES.path("{}"), service),
        (NETWORK_POLICIES.path("{}"), {"metadata": named, "spec": {"podSelector": {}}}),
    ]


if __name__ == "__main__":
    asyncio.run(main(settings.parse()))
