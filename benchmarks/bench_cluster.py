"""A cluster of kwok nodes with a checkout's operator beside it, and what that operator uses and
asks."""

import asyncio
import contextlib
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.pages import ROOT
from grpo_kube import transport
from grpo_kube.client import Client
from grpo_kube.objects.resources import JOBS, PODS, Object, Selection
from grpo_operator.records.names import GRPOJOBS
from harness.cluster import Cluster
from harness.controlplane import free_port
from harness.definitions import definition_change
from harness.programs.processes import flags
from harness.settings import ClusterSettings

NAMESPACE = "default"
NODES = 40
CLIENTS = 32
"""Requests that scripts have under way at a time."""
TICKS = os.sysconf("SC_CLK_TCK")
T = TypeVar("T")


class Bench:
    """A cluster, an operator beside it, and a client of its API server."""

    def __init__(
        self, cluster: Cluster, client: Client, operator: subprocess.Popen[bytes], port: int
    ) -> None:
        self.cluster, self.client, self.operator, self.port = cluster, client, operator, port

    async def items(self, selection: Selection) -> list[Object]:
        """A LIST."""
        return [item async for page, _ in self.client.pages(selection) for item in page]

    async def phases(self, phase: str, count: int) -> None:
        """Wait until `count` jobs are in a phase."""
        while True:
            jobs = await self.items(Selection(GRPOJOBS, NAMESPACE))
            if sum(job.get("status", {}).get("phase") == phase for job in jobs) >= count:
                return
            await asyncio.sleep(0.5)

    async def clear(self) -> None:
        """Deletes everything, and waits until the API server has nothing of it."""
        selections = [Selection(resource, NAMESPACE) for resource in (GRPOJOBS, JOBS, PODS)]
        while any([await self.items(selection) for selection in selections]):
            for selection in selections:
                await self.client.delete_all(selection)
            await asyncio.sleep(0.3)

    def scrape(self) -> bytes:
        """The operator's metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            page: bytes = answer.read()
        return page

    def requests(self) -> Counter[str]:
        """The operator's requests so far, as `VERB resource`."""
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(self.scrape().decode()):
            for sample in family.samples:
                if sample.name == "rest_client_requests_total":
                    name = f"{sample.labels['method']} {sample.labels['resource']}"
                    found[name] += int(sample.value)
        return found


@contextlib.asynccontextmanager
async def bench_cluster(
    name: str,
    settings: ClusterSettings,
    *,
    arguments: Sequence[str] = (),
    checkout: Path = ROOT,
) -> AsyncIterator[Bench]:
    """Start a cluster and a checkout's operator, and yield both when they are ready."""
    with Cluster.create(f"{name}-{os.getpid()}", settings) as cluster:
        with definition_change(cluster):
            definition = checkout / "crds" / "grpojob.yaml"
            cluster.kubectl("apply", "--server-side", "-f", str(definition))
        port = free_port()
        with operator_process(cluster, port, arguments, checkout) as process:
            async with Client(await transport.load(str(cluster.kubeconfig))) as client:
                await ready(port)
                yield Bench(cluster, client, process, port)


@contextlib.contextmanager
def operator_process(
    cluster: Cluster, port: int, arguments: Sequence[str] = (), checkout: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """The operator of a checkout, as a process of its own."""
    options = {
        "--kubeconfig": cluster.kubeconfig,
        "--log-level": "warning",
        "--trainer-image": "none",
        "--metrics-address": "127.0.0.1",
        "--metrics-port": port,
    }
    command = [sys.executable, "-m", "grpo_operator", *flags(options), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "operator")}
    process = subprocess.Popen([str(part) for part in command], env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


async def ready(port: int) -> None:
    """Waits until the operator is ready."""
    while True:
        with contextlib.suppress(OSError):  # not listening yet, or 503 while it lists
            await asyncio.to_thread(
                urllib.request.urlopen, f"http://127.0.0.1:{port}/readyz", timeout=5
            )
            return
        await asyncio.sleep(0.1)


async def each(items: Iterable[T], action: Callable[[T], Coroutine[Any, Any, object]]) -> None:
    """Do the action for every item, for at most CLIENTS at a time."""
    gate = asyncio.Semaphore(CLIENTS)

    async def act(item: T) -> None:
        async with gate:
            await action(item)

    await asyncio.gather(*map(act, items))


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far; 0 once it has ended."""
    with contextlib.suppress(OSError):  # it may end between the listing and the look
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


def memory_mib(pid: int, field: str = "VmRSS") -> float:
    """A field of a process' memory in MiB, such as VmHWM for the most so far (proc(5), status)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
