"""What a GRPOJob costs more than the Indexed Job inside it: wall and CPU seconds until its pods exist.

    python -m benchmarks.burst [--singles 20] [--bursts 3] [--jobs 200] [--gpus]

One job of four pods, and a burst of jobs of two pods, in all the ways of burst_kinds.py, interleaved in one run on one
API level cluster with kwok nodes, so that a noisy machine disturbs all alike. Prints tables. Never part of the tests;
the goals are in docs/architecture.md.
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
from pathlib import Path
from typing import Any

from benchmarks.burst_kinds import NAMESPACE, ROUND, Kind, kinds, sample
from grpo_operator.cluster import credentials
from grpo_operator.cluster.api import GRPOJOBS, JOBS, PODS, Selection
from grpo_operator.cluster.client import HttpCluster
from harness.cluster import Cluster
from harness.controlplane import free_port
from harness.fixtures import serve_grpojobs
from harness.settings import ClusterSettings, GpuSettings

ROOT = Path(__file__).parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
NODES = 40
GPUS_PER_NODE = 64
"""Room for a thousand jobs of two GPUs."""
CREATORS = 32
ROLES = ("apiserver", "etcd", "controller-manager", "scheduler", "kwok")
SETTLE = 2.0
"""Seconds after the last pod runs in which late work is still counted as CPU time."""


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
                await kind.create(self.client, f"{mark}-{number}", mark)

        await asyncio.gather(*(create(number) for number in range(jobs)))
        created, ran = await seen
        await asyncio.sleep(SETTLE)
        kind.walls.append(created - began)
        used = {role: (seconds - cpu[role]) / jobs for role, seconds in self.cpu().items()}
        if not kind.operated:
            del used["operator"]
        kind.cpus.append(sum(used.values()))
        kind.parts.append(used)
        print(f"  {kind.name:10} {jobs:4} x {pods}: all pods {created - began:7.3f} s, running {ran - began:7.3f} s, "
              f"CPU {kind.cpus[-1] * 1000:6.1f} ms per job", flush=True)  # fmt: skip
        await self.clear()

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

    async def clear(self) -> None:
        """Deletes everything and waits until the API server has nothing of it."""
        await self.client.delete_all(Selection(GRPOJOBS, NAMESPACE))
        await self.client.delete_all(Selection(JOBS, NAMESPACE))
        while True:
            left = 0
            for resource in (PODS, JOBS, GRPOJOBS):
                async for items, _ in self.client.pages(Selection(resource, NAMESPACE)):
                    left += len(items)
            if not left:
                return
            await self.client.delete_all(Selection(PODS, NAMESPACE, ROUND))
            await asyncio.sleep(0.3)

    def cpu(self) -> dict[str, float]:
        """CPU seconds that each part of the cluster, the operator and this client have used so far."""
        used = {"operator": cpu_seconds(self.operator.pid), "client": cpu_seconds(os.getpid())}
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
async def bench(arguments: list[str], gpus: int = 0) -> AsyncIterator[Bench]:
    """A cluster with fake nodes, of so many GPUs each, and an operator, ready."""
    settings = ClusterSettings(kwok_nodes=NODES, gpus=GpuSettings(gpus))
    with Cluster.create(f"burst-{os.getpid()}", settings) as cluster:
        serve_grpojobs(cluster)
        port = free_port()
        with operator_process(cluster, port, arguments) as process:
            async with HttpCluster(await credentials.load(str(cluster.kubeconfig))) as client:
                await ready(port)
                yield Bench(cluster, client, process, port)


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def _print(what: str, measured: Sequence[Kind]) -> None:
    """A table of all kinds, with what each takes of the one with the same pods."""
    same = next(kind for kind in measured if kind.name == "same pods")
    print(f"\n| {what} | all pods exist, s | of same pods | CPU ms per job | of same pods | by part |")
    print("|---|---|---|---|---|---|")
    for kind in measured:
        wall = statistics.median(kind.walls) / statistics.median(same.walls)
        cpu = statistics.median(kind.cpus) / statistics.median(same.cpus)
        parts = {role: statistics.median(one[role] for one in kind.parts) * 1000 for role in kind.parts[0]}
        said = ", ".join(f"{role} {spent:.1f}" for role, spent in parts.items())
        print(f"| {kind.name} | {_cell(kind.walls)} | {wall:.2f} | {statistics.median(kind.cpus) * 1000:.0f} "
              f"| {cpu:.2f} | {said} |", flush=True)  # fmt: skip


async def _turns(one: Bench, rounds: int, jobs: int, pods: int, *, gpus: bool) -> None:
    """All kinds in turns; prints what was measured."""
    if not rounds:
        return
    measured = kinds(await sample(one.client, pods, gpus=gpus))
    await one.clear()
    for kind in measured:  # the first of each pays for connections and code that is loaded late
        await one.round(Kind(kind.name, kind.create, operated=kind.operated), 1, pods)
    writes = one.writes()
    for _ in range(rounds):
        for kind in measured:
            await one.round(kind, jobs, pods)
    _print(f"{jobs} of {pods} pods{' with a GPU each' if gpus else ''}", measured)
    print(f"{(one.writes() - writes) / (rounds * jobs):.1f} writes of the operator per job")


async def measure(arguments: argparse.Namespace) -> None:
    """Runs everything and prints the tables."""
    async with bench(arguments.operator, gpus=GPUS_PER_NODE if arguments.gpus else 0) as one:
        idle = one.rss()
        await _turns(one, arguments.singles, 1, 4, gpus=arguments.gpus)
        await _turns(one, arguments.bursts, arguments.jobs, 2, gpus=arguments.gpus)
        print(f"\noperator: {idle} MiB idle, {one.rss()} MiB after the bursts")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.burst", description=__doc__)
    parser.add_argument("--singles", type=int, default=20, help="rounds of one job (default 20)")
    parser.add_argument("--bursts", type=int, default=3, help="rounds of many jobs (default 3)")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of a burst (default 200)")
    parser.add_argument("--gpus", action="store_true", help="jobs on GPUs instead of CPUs")
    parser.add_argument("operator", nargs="*", help="further arguments of the operator, after --")
    return parser


def main(given: Any = None) -> int:
    """Runs the benchmark."""
    asyncio.run(measure(_parser().parse_args(given)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
