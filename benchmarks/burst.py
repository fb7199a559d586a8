"""What a GRPOJob costs more than the bare Indexed Job inside it: wall and CPU seconds until its pods exist.

    python -m benchmarks.burst [--singles 20] [--bursts 3] [--jobs 200]

One job of four pods, and a burst of jobs of two pods, ours and bare interleaved in one run on one API level cluster
with kwok nodes, so that a noisy machine disturbs both alike. Prints a table. Never part of the tests; the goals are in
docs/architecture.md.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from grpo_api.contract import API_VERSION, KIND
from grpo_operator.cluster import credentials
from grpo_operator.cluster.api import GRPOJOBS, JOBS, PODS, Object, Resource, Selection
from grpo_operator.cluster.client import HttpCluster
from harness.cluster import Cluster
from harness.controlplane import free_port
from harness.fixtures import serve_grpojobs
from harness.settings import ClusterSettings

ROOT = Path(__file__).parents[1]
NAMESPACE = "default"
ROUND = "bench.grpo.dev/round"
TICKS = os.sysconf("SC_CLK_TCK")
NODES = 40
CREATORS = 32
ROLES = ("apiserver", "etcd", "controller-manager", "scheduler", "kwok")
SETTLE = 2.0
"""Seconds after the last pod runs in which late work is still counted as CPU time."""


@dataclass
class Kind:
    """One way to get pods, and what was measured of it."""

    name: str
    resource: Resource
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    _: KW_ONLY
    parts: list[dict[str, float]] = field(default_factory=list)

    def body(self, name: str, pods: int, mark: str) -> Object:
        """The object that leads to `pods` pods labelled with `mark`."""
        return (ours if self.resource is GRPOJOBS else bare)(name, pods, mark)


def bare(name: str, pods: int, mark: str) -> Object:
    """An Indexed Job with nothing but a container."""
    template = {
        "metadata": {"labels": {ROUND: mark}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "none"}]},
    }
    shape = {"completionMode": "Indexed", "completions": pods, "parallelism": pods, "backoffLimit": 0}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {**shape, "template": template}}


def ours(name: str, pods: int, mark: str) -> Object:
    """A small GRPOJob on CPUs."""
    spec = {
        "model": {"name": "/models/tiny", "parameters": "77K"},
        "dataset": {"name": "openai/gsm8k", "config": "main"},
        "rewards": [{"format": {"pattern": "<answer>.*</answer>"}}, {"accuracy": {"score": 2.0}}],
        "placement": {"accelerator": "CPU", "nodes": pods},
        "export": {"to": "None"},
        "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi"}},
        "podTemplate": {"metadata": {"labels": {ROUND: mark}}},
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


class Bench:
    """A cluster, an operator beside it, and a client."""

    def __init__(self, cluster: Cluster, client: HttpCluster, operator: subprocess.Popen[bytes], port: int) -> None:
        self.cluster, self.client, self.operator, self.port = cluster, client, operator, port
        self._number = 0

    async def round(self, kind: Kind, jobs: int, pods: int) -> None:
        """Creates the jobs, waits for their pods, notes wall and CPU seconds, and clears up."""
        self._number += 1
        mark = f"r{self._number}"
        began, cpu = time.perf_counter(), self.cpu()
        seen = asyncio.create_task(self._pods(mark, jobs * pods))
        gate = asyncio.Semaphore(CREATORS)

        async def create(number: int) -> None:
            async with gate:
                await self.client.create(kind.resource, NAMESPACE, kind.body(f"{mark}-{number}", pods, mark))

        await asyncio.gather(*(create(number) for number in range(jobs)))
        created, ran = await seen
        await asyncio.sleep(SETTLE)
        kind.walls.append(created - began)
        used = {role: (seconds - cpu[role]) / jobs for role, seconds in self.cpu().items()}
        kind.cpus.append(sum(used.values()))
        kind.parts.append(used)
        print(f"  {kind.name:10} {jobs:4} x {pods}: all pods {created - began:7.3f} s, running {ran - began:7.3f} s, "
              f"CPU {kind.cpus[-1] * 1000:6.1f} ms per job", flush=True)  # fmt: skip
        await self._clear(kind, mark)

    async def _pods(self, mark: str, count: int) -> tuple[float, float]:
        """When the last of `count` pods existed, and when the last of them ran."""
        selection = Selection(PODS, NAMESPACE, f"{ROUND}={mark}")
        known: dict[str, str] = {}
        created = 0.0
        while True:
            async for _, pod in self.client.watch(selection, 0, 600):
                if "name" in pod["metadata"]:
                    known[pod["metadata"]["name"]] = pod.get("status", {}).get("phase", "Pending")
                if not created and len(known) == count:
                    created = time.perf_counter()
                if created and all(phase == "Running" for phase in known.values()):
                    return created, time.perf_counter()

    async def _clear(self, kind: Kind, mark: str) -> None:
        """Deletes everything of the round and waits until the API server has nothing of it."""
        await self.client.delete_all(Selection(kind.resource, NAMESPACE))
        await self.client.delete_all(Selection(JOBS, NAMESPACE))
        while True:
            left = 0
            for resource in (PODS, JOBS, GRPOJOBS):
                async for items, _ in self.client.pages(Selection(resource, NAMESPACE)):
                    left += len(items)
            if not left:
                return
            await self.client.delete_all(Selection(PODS, NAMESPACE, f"{ROUND}={mark}"))
            await asyncio.sleep(0.3)

    def cpu(self) -> dict[str, float]:
        """CPU seconds that each part of the cluster, and the operator, have used so far."""
        used = {"operator": cpu_seconds(self.operator.pid)}
        for role in ROLES:
            used[role] = sum(cpu_seconds(pid) for pid in self.cluster.processes.find(role))
        return used

    def rss(self) -> int:
        """Memory of the operator in MiB."""
        pages = Path(f"/proc/{self.operator.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") // 2**20

    def writes(self) -> float:
        """Requests of the operator that change something, so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        counted = [line for line in lines if line.startswith("rest_client_requests_total{")]
        return sum(
            float(line.split()[-1])
            for line in counted
            if any(f'"{verb}"' in line for verb in ("POST", "PATCH", "DELETE"))
        )


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far."""
    with contextlib.suppress(OSError):  # a process may end between the listing and the look
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


@contextlib.contextmanager
def operator_process(
    cluster: Cluster, port: int, arguments: Sequence[str] = (), checkout: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """The operator of a checkout, as a process of its own."""
    command = [sys.executable, "-m", "grpo_operator", "--kubeconfig", str(cluster.kubeconfig), "--log-level", "warning"]
    command += ["--trainer-image", "none", "--metrics-address", "127.0.0.1", "--metrics-port", str(port), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "operator")}
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


async def ready(port: int) -> None:
    """Waits until the operator is ready."""
    while True:
        with contextlib.suppress(OSError):  # not listening yet, or 503 while it lists
            await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/readyz", timeout=5)
            return
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def bench(arguments: list[str]) -> AsyncIterator[Bench]:
    """A cluster with fake nodes and an operator, ready."""
    with Cluster.create(f"burst-{os.getpid()}", ClusterSettings(kwok_nodes=NODES)) as cluster:
        serve_grpojobs(cluster)
        port = free_port()
        with operator_process(cluster, port, arguments) as process:
            async with HttpCluster(await credentials.load(str(cluster.kubeconfig))) as client:
                await ready(port)
                yield Bench(cluster, client, process, port)


def _row(what: str, one: Kind, other: Kind) -> str:
    def cell(values: list[float]) -> str:
        return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"

    wall = statistics.median(other.walls) / statistics.median(one.walls)
    cpu = statistics.median(other.cpus) / statistics.median(one.cpus)
    cpus = f"{statistics.median(one.cpus) * 1000:.0f} / {statistics.median(other.cpus) * 1000:.0f}"
    return f"| {what} | {cell(one.walls)} | {cell(other.walls)} | **{wall:.2f}** | {cpus} | **{cpu:.2f}** |"


async def measure(arguments: argparse.Namespace) -> None:
    """Runs everything and prints the tables."""
    single = Kind("bare", JOBS), Kind("GRPOJob", GRPOJOBS)
    burst = Kind("bare", JOBS), Kind("GRPOJob", GRPOJOBS)
    async with bench(arguments.operator) as one:
        idle = one.rss()
        for kind in single:  # the first of each pays for connections and code that is loaded late
            await one.round(Kind(kind.name, kind.resource), 1, 4)
        for _ in range(arguments.singles):
            for kind in single:
                await one.round(kind, 1, 4)
        writes = one.writes()
        for _ in range(arguments.bursts):
            for kind in burst:
                await one.round(kind, arguments.jobs, 2)
        writes = (one.writes() - writes) / max(1, arguments.bursts * arguments.jobs)
        print("\n| all pods exist | bare, s | GRPOJob, s | ratio | CPU ms per job | ratio |\n|---|---|---|---|---|---|")
        for what, pair in (("one job of 4 pods", single), (f"{arguments.jobs} jobs of 2 pods", burst)):
            if pair[0].walls:
                print(_row(what, *pair))
        if arguments.bursts:
            _print_parts(*burst)
        print(f"\noperator: {idle} MiB idle, {one.rss()} MiB after the bursts; {writes:.1f} writes per job in a burst")


def _print_parts(*kinds: Kind) -> None:
    print("\n| CPU ms per job of a burst | bare | GRPOJob |\n|---|---|---|")
    for role in ("operator", *ROLES):
        print(f"| {role} |", *(f"{statistics.median(part[role] for part in k.parts) * 1000:.1f} |" for k in kinds))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.burst", description=__doc__)
    parser.add_argument("--singles", type=int, default=20, help="rounds of one job (default 20)")
    parser.add_argument("--bursts", type=int, default=3, help="rounds of many jobs (default 3)")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of a burst (default 200)")
    parser.add_argument("operator", nargs="*", help="further arguments of the operator, after --")
    return parser


def main(given: Any = None) -> int:
    """Runs the benchmark."""
    asyncio.run(measure(_parser().parse_args(given)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
